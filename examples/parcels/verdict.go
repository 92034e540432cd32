package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/penstock-mq/penstock/contracttest/stage"
	"github.com/penstock-mq/penstock/examples/parcels/scan"
)

// result is what was expected and what is in the database. Nothing in it comes from the middleware but replayed, which the
// consumers reported, and which the verdict does not use.
type result struct {
	want expectation

	effects   int // rows in the application's own table
	twice     int // identities with more than one effect
	missing   int // identities without their effect
	foreign   int // effects that are no valid copy of their event
	drifted   int // parcels whose state or count does not follow from the scans
	receipts  int
	commits   int
	torn      int
	conflicts int
	refused   int

	events     int
	deliveries int
	replayed   uint64
	kills      map[stage.Point]int
	words      stage.LastWords // of those killed
	planned    int
	bare       bool
	took       time.Duration
}

// inspect reads the database with plain SQL, after its last user has gone.
func inspect(ctx context.Context, path string, want expectation) (*result, error) {
	db, err := sql.Open("sqlite", dataSource(path, url.Values{"_pragma": {"query_only(1)"}}))
	if err != nil {
		return nil, fmt.Errorf("open the database to check it: %w", err)
	}
	defer db.Close()
	r := &result{want: want}
	if err := r.readEffects(ctx, db); err != nil {
		return nil, fmt.Errorf("check the effects: %w", err)
	}
	if err := r.readCounts(ctx, db); err != nil {
		return nil, fmt.Errorf("check the database: %w", err)
	}
	return r, nil
}

// readEffects compares every effect with what was sent under its identity.
func (r *result) readEffects(ctx context.Context, db *sql.DB) error {
	rows, err := db.QueryContext(ctx, `SELECT id, parcel, status, depot, weight_g, at FROM scans`)
	if err != nil {
		return err
	}
	defer rows.Close()
	found := map[string]int{}
	for rows.Next() {
		var e scan.Event
		var at string
		if err := rows.Scan(&e.ID, &e.Parcel, &e.Status, &e.Depot, &e.WeightGrams, &at); err != nil {
			return err
		}
		if e.At, err = time.Parse(time.RFC3339, at); err != nil {
			return err
		}
		r.effects++
		found[e.ID]++
		if found[e.ID] == 2 {
			r.twice++
		}
		if !sentAs(e, r.want.valid[e.ID]) {
			r.foreign++
		}
	}
	for id := range r.want.valid {
		if found[id] == 0 {
			r.missing++
		}
	}
	return rows.Err()
}

func sentAs(effect scan.Event, copies []scan.Event) bool {
	for _, c := range copies {
		c.City, c.Recipient = effect.City, effect.Recipient // are not stored
		if c.At.Equal(effect.At) {
			c.At = effect.At
		}
		if c == effect {
			return true
		}
	}
	return false
}

func (r *result) readCounts(ctx context.Context, db *sql.DB) error {
	counts := []struct {
		into  *int
		query string
	}{
		{&r.drifted, `
			SELECT count(*) FROM parcels p
			WHERE p.scans <> (SELECT count(*) FROM scans s WHERE s.parcel = p.parcel)
			   OR p.at <> (SELECT max(s.at) FROM scans s WHERE s.parcel = p.parcel)
			   OR NOT EXISTS (SELECT 1 FROM scans s WHERE s.parcel = p.parcel AND s.at = p.at
			                  AND s.status = p.status AND s.depot = p.depot)`},
		{&r.receipts, `
			SELECT count(*) FROM penstock_receipts r JOIN penstock_markers m ON m.nonce = r.nonce WHERE r.state = 1`},
		{&r.commits, `SELECT count(*) FROM penstock_markers`},
		{&r.torn, `SELECT count(*) FROM penstock_receipts WHERE nonce NOT IN (SELECT nonce FROM penstock_markers)`},
		{&r.conflicts, `SELECT count(*) FROM penstock_dead_letters WHERE kind = 'conflict'`},
		{&r.refused, `SELECT count(*) FROM penstock_dead_letters WHERE kind = 'refused'`},
	}
	var tables int
	err := db.QueryRowContext(ctx, `SELECT count(*) FROM sqlite_schema WHERE name = 'penstock_receipts'`).Scan(&tables)
	if err != nil {
		return err
	}
	for _, c := range counts {
		if tables == 0 && strings.Contains(c.query, "penstock_") {
			continue // without the middleware there are none
		}
		if err := db.QueryRowContext(ctx, c.query).Scan(c.into); err != nil {
			return err
		}
	}
	return nil
}

// complaints says what is wrong, in the order of importance; none means that the promise was kept.
func (r *result) complaints() []string {
	var found []string
	check := func(wrong bool, format string, args ...any) {
		if wrong {
			found = append(found, fmt.Sprintf(format, args...))
		}
	}
	distinct := len(r.want.valid)
	check(r.effects != distinct, "%d effects for %d distinct events", r.effects, distinct)
	check(r.twice > 0, "%d events took effect more than once", r.twice)
	check(r.missing > 0, "%d events are lost", r.missing)
	check(r.foreign > 0, "%d effects are not what was sent", r.foreign)
	check(r.drifted > 0, "%d parcels are not where their scans say", r.drifted)
	check(r.receipts != r.effects, "%d receipts for %d effects", r.receipts, r.effects)
	check(r.torn > 0, "%d receipts are torn", r.torn)
	check(r.conflicts != r.want.conflicts, "%d conflicts diverted, %d sent", r.conflicts, r.want.conflicts)
	check(r.refused != r.want.refused, "%d invalid events diverted, %d sent", r.refused, r.want.refused)
	kills := 0
	for _, n := range r.kills {
		kills += n
	}
	check(kills != r.planned, "%d kills instead of %d: nothing is proved", kills, r.planned)
	return found
}

// print writes the table and the verdict; its error wraps errVerdict where the promise was not kept.
func (r *result) print(out io.Writer) error {
	t := table.NewWriter()
	t.SetOutputMirror(out)
	t.SetStyle(table.StyleLight)
	t.Style().Options.SeparateColumns = false
	t.SetColumnConfigs([]table.ColumnConfig{{Number: 2, Align: text.AlignRight}})
	t.AppendRows([]table.Row{
		{"sent", r.want.sent, fmt.Sprintf("messages: %d events, %d duplicates", r.events, r.want.sent-r.events)},
		{"delivered", r.deliveries, "attempts, each with a token of its own"},
		{"distinct", len(r.want.valid), "identities with a valid payload"},
		{"effects", r.effects, "rows in the application's table"},
		{"receipts", r.receipts, "committed with their effect"},
		{"commits", r.commits, "transactions: what is in flight shares one"},
		{"replays", r.replayed, "recognised as done, changed nothing"},
		{"conflicts", r.conflicts, "same identity, other payload: diverted"},
		{"refused", r.refused, "invalid payload: diverted"},
	})
	for i, p := range points() {
		if r.kills[p] > 0 {
			name := "kills"
			if i > 0 {
				name = ""
			}
			t.AppendRow(table.Row{name, r.kills[p], string(p)})
		}
	}
	t.Render()
	wrong := r.complaints()
	if len(wrong) == 0 {
		r.tell(out)
		fmt.Fprintf(out, "KEPT: every event took effect once (%.1f s)\n", r.took.Seconds())
		return nil
	}
	fmt.Fprintf(out, "BROKEN: %s (%.1f s)\n", strings.Join(wrong, "; "), r.took.Seconds())
	if r.bare {
		fmt.Fprintln(out, "That is what happens without the middleware: leave -bare away.")
	}
	return errVerdict
}

// tell says in words what the kills did.
func (r *result) tell(out io.Writer) {
	if r.words.Open > 0 {
		fmt.Fprintf(out, "Killed inside a transaction: the work of %d messages was gone, and was done again.\n", r.words.Open)
	}
	if r.words.Committed > 0 {
		fmt.Fprintf(out, "Killed after COMMIT: %d messages came again, and changed nothing.\n", r.words.Committed)
	}
}
