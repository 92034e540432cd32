package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/penstock-mq/penstock/contracttest/stage"
)

// result is what was expected and what is in the database. Nothing in it comes from the middleware but counts, which the
// consumers reported, and which the verdict does not use.
type result struct {
	want expectation

	applied   int   // rows in the application's own table of transfers
	twice     int   // identities with more than one of them
	missing   int   // identities without
	foreign   int   // rows that are not what was sent
	drifted   int   // accounts whose balance is not what it must be
	balance   int64 // of all accounts, in cents
	opened    int64 // what they had at the beginning
	receipts  int
	commits   int
	torn      int
	diverted  int
	deadlocks int

	sent       int
	processes  int
	accounts   int
	deliveries int
	counts     counts
	kills      map[stage.Point]int
	words      stage.LastWords // of those killed
	planned    int
	bare       bool
	took       time.Duration
}

// database is what a *sql.DB and a *sql.Tx have in common.
type database interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// inspect reads the database with plain SQL, after its last user has gone.
func inspect(ctx context.Context, db database, want expectation) (*result, error) {
	r := &result{want: want}
	if err := r.readTransfers(ctx, db); err != nil {
		return nil, fmt.Errorf("check the transfers: %w", err)
	}
	if err := r.readBalances(ctx, db); err != nil {
		return nil, fmt.Errorf("check the balances: %w", err)
	}
	if err := r.readCounts(ctx, db); err != nil {
		return nil, fmt.Errorf("check the database: %w", err)
	}
	return r, nil
}

// readTransfers compares every one with what was sent under its identity.
func (r *result) readTransfers(ctx context.Context, db database) error {
	rows, err := db.QueryContext(ctx, `SELECT id, debit, credit, cents FROM transfers`)
	if err != nil {
		return err
	}
	defer rows.Close()
	found := map[string]int{}
	for rows.Next() {
		var id string
		var t transfer
		if err := rows.Scan(&id, &t.Debit, &t.Credit, &t.Cents); err != nil {
			return err
		}
		r.applied++
		if found[id]++; found[id] == 2 {
			r.twice++
		}
		if r.want.transfers[id] != t {
			r.foreign++
		}
	}
	for id := range r.want.transfers {
		if found[id] == 0 {
			r.missing++
		}
	}
	return rows.Err()
}

// readBalances compares every account with what its transfers come to.
func (r *result) readBalances(ctx context.Context, db database) error {
	rows, err := db.QueryContext(ctx, `SELECT id, balance FROM accounts`)
	if err != nil {
		return err
	}
	defer rows.Close()
	found := 0
	for rows.Next() {
		var account int32
		var balance int64
		if err := rows.Scan(&account, &balance); err != nil {
			return err
		}
		found++
		r.balance += balance
		if want, ok := r.want.balances[account]; !ok || want != balance {
			r.drifted++
		}
	}
	r.opened = int64(len(r.want.balances)) * opening
	r.drifted += max(0, len(r.want.balances)-found)
	return rows.Err()
}

func (r *result) readCounts(ctx context.Context, db database) error {
	if err := awaitAlone(ctx, db); err != nil {
		return err
	}
	for _, c := range []struct {
		into  *int
		query string
	}{
		{&r.receipts, `
			SELECT count(*) FROM penstock_receipts r JOIN penstock_markers m ON m.nonce = r.nonce WHERE r.state = 1`},
		{&r.commits, `SELECT count(*) FROM penstock_markers WHERE claims > 0`},
		{&r.torn, `SELECT count(*) FROM penstock_receipts WHERE nonce NOT IN (SELECT nonce FROM penstock_markers)`},
		{&r.diverted, `SELECT count(*) FROM penstock_dead_letters`},
		{&r.deadlocks, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`},
	} {
		if err := db.QueryRowContext(ctx, c.query).Scan(c.into); err != nil {
			return err
		}
	}
	return nil
}

// awaitAlone waits until the sessions of the consumers have ended, killed ones too: a server is sure to have counted the
// deadlocks of a session only then.
func awaitAlone(ctx context.Context, db database) error {
	const patience, pause = 10 * time.Second, 5 * time.Millisecond
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(pause) {
		var others int
		if err := db.QueryRowContext(ctx, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND pid <> pg_backend_pid() AND backend_type = 'client backend'`).Scan(&others); err != nil || others == 0 {
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
	check(r.balance != r.opened, "the accounts hold %s instead of %s", money(r.balance), money(r.opened))
	check(r.drifted > 0, "%d accounts have another balance than their transfers come to", r.drifted)
	check(r.twice > 0, "%d transfers were applied more than once", r.twice)
	check(r.missing > 0, "%d transfers are lost", r.missing)
	check(r.foreign > 0, "%d transfers are not what was sent", r.foreign)
	check(r.receipts != r.applied, "%d receipts for %d applied transfers", r.receipts, r.applied)
	check(r.torn > 0, "%d receipts are torn", r.torn)
	check(r.diverted > 0, "%d messages were diverted", r.diverted)
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
	distinct := len(r.want.transfers)
	t.AppendRows([]table.Row{
		{"sent", r.sent, fmt.Sprintf("messages: %d transfers, %d duplicates", distinct, r.sent-distinct)},
		{"delivered", r.deliveries, fmt.Sprintf("attempts, to %d processes at a time", r.processes)},
		{"applied", r.applied, "rows in the application's table of transfers"},
		{"receipts", r.receipts, "committed with their transfer"},
		{"replays", r.counts.Replayed, "recognised as done, changed nothing"},
		{"commits", r.commits, "transactions: what is in flight shares one"},
		{"deadlocks", r.deadlocks, fmt.Sprintf("that PostgreSQL had to break: %.1f %% of the commits", r.share())},
		{"contention", r.counts.Contention, "transactions that ran again, because of another process"},
		{"failed", r.counts.Failed, "handler runs that were charged to a message"},
		{"diverted", r.diverted, "dead letters"},
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
		fmt.Fprintf(out, "KEPT: every transfer was applied once, and the %d accounts hold %s, as before (%.1f s)\n",
			r.accounts, money(r.balance), r.took.Seconds())
		return nil
	}
	fmt.Fprintf(out, "BROKEN: %s (%.1f s)\n", strings.Join(wrong, "; "), r.took.Seconds())
	if r.bare {
		fmt.Fprintln(out, "That is what happens without the middleware: leave -bare away.")
	}
	return errVerdict
}

// share is that of the deadlocks, in per cent of the commits.
func (r *result) share() float64 { return 100 * float64(r.deadlocks) / float64(max(r.commits, 1)) }

// tell says in words what the kills did.
func (r *result) tell(out io.Writer) {
	if r.words.Open > 0 {
		fmt.Fprintf(out, "Killed inside a transaction: the work of %d messages was gone, and was done again.\n", r.words.Open)
	}
	if r.words.Committed > 0 {
		fmt.Fprintf(out, "Killed after COMMIT: %d messages came again, and changed nothing.\n", r.words.Committed)
	}
}

// money writes cents as an amount.
func money(cents int64) string {
	sign := ""
	if cents < 0 {
		sign, cents = "-", -cents
	}
	return fmt.Sprintf("%s%d.%02d", sign, cents/100, cents%100)
}
