package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// errVerdict: the run went through, and something is wrong.
var errVerdict = errors.New("the promise was not kept")

// result is what is in the database, and what the consumers said of themselves.
type result struct {
	distinct, sent int

	effects, identities, foreign int // rows, different ones, and those that were never sent
	receipts, torn, diverted     int

	deliveries                   int
	handled, replayed            uint64
	failed, returned, contention uint64
	transactions, largest        uint64
	errors                       int
	first                        string // of the errors
	idle                         int    // processes that handled nothing
	took                         time.Duration
}

// inspect reads the database with plain SQL.
func (c *crowd) inspect(ctx context.Context, db *sql.DB, distinct int) (*result, error) {
	r := &result{distinct: distinct, sent: len(c.sent), took: c.took}
	r.deliveries, _, _ = c.tally.Counts()
	for _, m := range c.members {
		r.add(m.said)
	}
	last := fmt.Sprintf("m-%07d", distinct-1) // ids are as long as each other
	for _, q := range []struct {
		into  *int
		query string
	}{
		{&r.effects, `SELECT count(*) FROM effects`},
		{&r.identities, `SELECT count(DISTINCT id) FROM effects`},
		{&r.foreign, `SELECT count(*) FROM effects WHERE id < 'm-0000000' OR id > '` + last + `'`},
		{&r.receipts, `SELECT count(*) FROM penstock_receipts r JOIN penstock_markers m ON m.nonce = r.nonce WHERE r.state = 1`},
		{&r.torn, `SELECT count(*) FROM penstock_receipts WHERE nonce NOT IN (SELECT nonce FROM penstock_markers)`},
		{&r.diverted, `SELECT count(*) FROM penstock_dead_letters`},
	} {
		if err := db.QueryRowContext(ctx, q.query).Scan(q.into); err != nil {
			return nil, fmt.Errorf("check the database: %w", err)
		}
	}
	return r, nil
}

// add takes in what one consumer said at its end.
func (r *result) add(said news) {
	if r.errors += said.Errors; r.first == "" {
		r.first = said.First
	}
	report := said.Report
	if report == nil {
		r.idle++
		return
	}
	if report.Handled == 0 {
		r.idle++
	}
	r.handled += report.Handled
	r.replayed += report.Replayed
	r.failed += report.Failed
	r.returned += report.Returned
	r.contention += report.Contention
	r.transactions += report.Batches.Transactions
	r.largest = max(r.largest, report.Batches.Largest)
}

// complaints says what is wrong.
func (r *result) complaints() []string {
	var found []string
	check := func(wrong bool, format string, args ...any) {
		if wrong {
			found = append(found, fmt.Sprintf(format, args...))
		}
	}
	check(r.effects != r.distinct, "%d effects for %d identities", r.effects, r.distinct)
	check(r.identities != r.distinct, "%d identities with an effect instead of %d", r.identities, r.distinct)
	check(r.foreign > 0, "%d effects of what was never sent", r.foreign)
	check(r.receipts != r.effects, "%d receipts for %d effects", r.receipts, r.effects)
	check(r.torn > 0, "%d receipts are torn", r.torn)
	check(r.diverted > 0, "%d messages were diverted", r.diverted)
	check(r.handled != uint64(r.distinct), "%d messages were handled instead of %d", r.handled, r.distinct)
	check(r.failed > 0, "%d handler runs were charged to a message", r.failed)
	check(r.errors > 0, "%d errors surfaced, the first: %s", r.errors, r.first)
	check(r.idle > 0, "%d processes handled nothing: that was no crowd", r.idle)
	return found
}

// print writes the figures and the verdict; its error wraps errVerdict where something is wrong.
func (r *result) print(out io.Writer, p plan, version string) error {
	say(out, "%s on %s, %d processes: %d messages in %.1f s, %.0f a second\n", p.store, version, p.processes,
		r.sent, r.took.Seconds(), float64(r.sent)/r.took.Seconds())
	say(out, "  %d distinct, %d effects, %d receipts, %d replays, %d diverted, %d torn\n",
		r.distinct, r.effects, r.receipts, r.replayed, r.diverted, r.torn)
	say(out, "  %d deliveries, %d went back, %d failed, %d errors; %d transactions, the largest of %d, %d met contention\n",
		r.deliveries, r.returned, r.failed, r.errors, r.transactions, r.largest, r.contention)
	if wrong := r.complaints(); len(wrong) > 0 {
		say(out, "BROKEN: %s\n", strings.Join(wrong, "; "))
		return errVerdict
	}
	say(out, "KEPT: each took effect once, and nobody saw an error\n")
	return nil
}
