package receipts_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// TestPostgresBounds: what the server is told about a transaction, and what it keeps of its own settings.
func TestPostgresBounds(t *testing.T) {
	t.Parallel()
	at := servers.Postgres(t)
	settings := []string{"statement_timeout", "idle_in_transaction_session_timeout", "lock_timeout"}
	for name, c := range map[string]struct {
		url    func(string) string
		budget time.Duration
		want   []string
	}{
		"budget":    {budget: 7 * time.Second, want: []string{"7s", "8s", "0"}},
		"none":      {want: []string{"0", "0", "0"}},
		"stricter":  {url: parameter("statement_timeout", "5s"), budget: 7 * time.Second, want: []string{"5s", "8s", "0"}},
		"looser":    {url: parameter("statement_timeout", "1h"), budget: 1500 * time.Millisecond, want: []string{"1500ms", "2500ms", "0"}},
		"own locks": {url: parameter("lock_timeout", "3s"), budget: time.Minute, want: []string{"1min", "61s", "3s"}},
		"own, none": {url: parameter("statement_timeout", "5s"), want: []string{"5s", "0", "0"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, client := range pgClients() {
				db := openPg(t, at, client, pgOptions{url: c.url})
				must(t, db.store.Migrate(t.Context()))
				tx := db.tx(t, receipts.TxOptions{Budget: c.budget, ClaimWait: 100 * time.Millisecond})
				claimsOf(t, tx, name+client)
				for i, setting := range settings {
					n, err := tx.number(t.Context(), `SELECT CASE WHEN current_setting($1::text) = $2::text THEN 1 ELSE 0 END`, setting, c.want[i])
					must(t, err)
					if n != 1 {
						t.Errorf("%s: %s is not %s", client, setting, c.want[i])
					}
				}
				must(t, tx.Commit(t.Context()))
			}
		})
	}
}

// TestPostgresBudgetEndsARunningStatement: the locks are free soon after the budget, although the handler's statement would
// run on and its context never ends.
func TestPostgresBudgetEndsARunningStatement(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		tx := db.tx(t, receipts.TxOptions{Budget: time.Second})
		claimsOf(t, tx, "a")
		must(t, tx.exec(t.Context(), `SET LOCAL statement_timeout = 0`)) // or the server would end it at the same time
		begun := time.Now()
		if err := tx.exec(context.Background(), "SELECT pg_sleep(60)"); err == nil {
			t.Error("the statement ran to its end")
		}
		wantIs(t, tx.Commit(t.Context()), receipts.ErrBudgetEnded)
		if took := time.Since(begun); took > 30*time.Second {
			t.Errorf("it took %v", took)
		}
		if r := claimsOf(t, db.tx(t), "a")[0]; r.Status != receipts.ClaimFresh {
			t.Errorf("claim: %+v", r)
		}
		db.wantStats(t, 0, 0, 0)
	})
}

// TestPostgresServerEndsAnIdleTransaction whose process stands still: here it is one whose budget nobody else watches.
func TestPostgresServerEndsAnIdleTransaction(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		tx := db.claimed(t, "a")
		must(t, tx.exec(t.Context(), `SET LOCAL idle_in_transaction_session_timeout = 50`))
		pid := backend(t, tx)
		eventually(t, "the session is gone", func() bool {
			return db.count(t, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid) == 0
		})
		if err := tx.Commit(t.Context()); err == nil {
			t.Error("committed")
		}
		db.wantStats(t, 0, 0, 0)
		db.wantUsable(t, "after")
	})
}

// TestPostgresRestart: connections that died in the pool are replaced, and nobody notices.
func TestPostgresRestart(t *testing.T) {
	t.Parallel()
	server := privatePg(t, nil)
	var dbs []*pgDB
	for _, client := range pgClients() {
		db := newPgDB(t, server.TestDatabase(t), client, pgOptions{})
		db.wantUsable(t, "before")
		dbs = append(dbs, db)
	}
	for _, kill := range []bool{false, true} {
		if kill {
			must(t, server.Kill())
			for _, db := range dbs {
				_, err := processed(t, db, "while it is down")
				db.wantClass(t, err, receipts.ClassOutage)
			}
			must(t, server.Start(t.Context()))
		} else {
			must(t, server.Restart(t.Context()))
		}
		for _, db := range dbs {
			if _, err := processed(t, db, fmt.Sprint("again ", kill)); err != nil {
				t.Errorf("%s: %v", db.client, err)
			}
			must(t, db.store.MarkSent(t.Context(), []receipts.OutputRef{{}}, noon))
		}
	}
}

// processed brings one message through.
func processed(t testing.TB, db *pgDB, key string) (receipts.ClaimResult, error) {
	t.Helper()
	tx, err := db.begin(t.Context(), receipts.TxOptions{Budget: time.Minute})
	if err != nil {
		return receipts.ClaimResult{}, err
	}
	results, err := tx.Claim(t.Context(), claimList(key))
	if err != nil {
		return receipts.ClaimResult{}, errors.Join(err, tx.Rollback(t.Context()))
	}
	return results[0], tx.Commit(t.Context())
}

// TestPostgresFrozen: a server that does not answer holds nobody for longer than his context.
func TestPostgresFrozen(t *testing.T) {
	t.Parallel()
	for _, client := range pgClients() {
		t.Run(client, func(t *testing.T) {
			t.Parallel()
			server := privatePg(t, nil)
			db := newPgDB(t, server.TestDatabase(t), client, pgOptions{})
			open := db.claimed(t, "open")
			add(t, open, "open")
			toCommit := db.claimed(t, "commit")
			add(t, toCommit, "commit")
			fresh := db.tx(t)
			must(t, server.Freeze())
			for name, f := range map[string]func(ctx context.Context) error{
				"begin and claim": func(ctx context.Context) error {
					tx, err := db.begin(ctx, receipts.TxOptions{Budget: time.Minute})
					if err == nil {
						_, err = tx.Claim(ctx, claimList("never"))
						go func() { _ = tx.Rollback(context.Background()) }()
					}
					return err
				},
				"claim":    func(ctx context.Context) error { _, err := fresh.Claim(ctx, claimList("fresh")); return err },
				"commit":   toCommit.Commit,
				"rollback": open.Rollback,
				"stats":    func(ctx context.Context) error { _, err := db.store.Stats(ctx); return err },
			} {
				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
				start := time.Now()
				done := make(chan error, 1)
				go func() { done <- f(ctx) }()
				select {
				case err := <-done:
					if err == nil && name != "rollback" {
						t.Errorf("%s: no error", name)
					}
					t.Logf("%s after %v: %v", name, time.Since(start).Round(10*time.Millisecond), err)
				case <-time.After(15 * time.Second):
					t.Errorf("%s does not return", name)
				}
				cancel()
			}
			must(t, server.Thaw())
			eventually(t, "it works again", func() bool { _, err := processed(t, db, "after"); return err == nil })
			eventually(t, "the claims are decided", func() bool {
				stats, err := db.store.Stats(t.Context())
				return err == nil && stats.Torn == 0 && slices.Contains([]int{1, 2}, stats.Done)
			})
		})
	}
}
