package receipts_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// endings are the ways in which a handler ends the transaction it was lent. An error of the statement itself is swallowed,
// as a careless handler does.
func endings() map[string]struct {
	end  func(tx *sql.Tx)
	torn int // receipts that were committed without a marker
	// effect is what the handler's own commit made durable
	effect int
} {
	text := func(statements ...string) func(tx *sql.Tx) {
		return func(tx *sql.Tx) {
			for _, s := range statements {
				_, _ = tx.Exec(s)
			}
		}
	}
	type ending = struct {
		end    func(tx *sql.Tx)
		torn   int
		effect int
	}
	return map[string]ending{
		"Commit":                {func(tx *sql.Tx) { _ = tx.Commit() }, 1, 1},
		"Rollback":              {func(tx *sql.Tx) { _ = tx.Rollback() }, 0, 0},
		"COMMIT as text":        {text("COMMIT"), 1, 1},
		"ROLLBACK as text":      {text("ROLLBACK"), 0, 0},
		"COMMIT; BEGIN":         {text("COMMIT; BEGIN IMMEDIATE"), 1, 1},
		"ROLLBACK then BEGIN":   {text("ROLLBACK", "BEGIN IMMEDIATE"), 0, 0},
		"COMMIT, BEGIN, effect": {text("COMMIT", "BEGIN", "UPDATE counters SET value = 100"), 1, 1},
		"COMMIT then Commit":    {func(tx *sql.Tx) { _, _ = tx.Exec("COMMIT"); _ = tx.Commit() }, 1, 1},
		"END and own savepoint": {text("END", "SAVEPOINT mine"), 1, 1},
		"OR ROLLBACK":           {text("INSERT OR ROLLBACK INTO counters VALUES ('taken', 1)"), 0, 0},
		"ROLLBACK and own savepoint": {text("ROLLBACK", "SAVEPOINT mine",
			"UPDATE counters SET value = 100"), 0, 0},
		"interrupted write": {func(tx *sql.Tx) {
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			_, _ = tx.ExecContext(ctx, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000000)
				INSERT INTO counters SELECT 'n' || i, 1 FROM n`)
		}, 0, 0},
	}
}

func TestHandlerEndsTransaction(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, c := range endings() {
			t.Run(name, func(t *testing.T) {
				db := d.open(t, d.file(t), "synchronous=OFF")
				db.SetMaxOpenConns(1) // the next user of the pool gets the very connection
				s := migrated(t, db)
				mustExec(t, db, counters, "INSERT INTO counters VALUES ('taken', 0)")
				tx := begin(t, s)
				claimed(t, tx, claim("a"))
				increment(t, tx, "a")
				c.end(tx.Raw())
				if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
					t.Fatalf("Commit after the handler ended the transaction: %v, want ErrTxEnded", err)
				}
				must(t, tx.Rollback(t.Context()))
				wantFreeLock(t, db)
				wantStats(t, s, 0, 0, c.torn)
				if got := effect(t, db, "a"); got != c.effect {
					t.Errorf("the effect is %d, want %d", got, c.effect)
				}
				if committed, err := s.Resolve(t.Context(), tx.Nonce()); err != nil || committed {
					t.Errorf("Resolve: %t, %v; want false", committed, err)
				}
				want := receipts.ClaimFresh
				if c.torn > 0 {
					want = receipts.ClaimTorn
				}
				if result, _ := process(t, s, "a"); result.Status != want {
					t.Errorf("the redelivery's claim is %d, want %d", result.Status, want)
				}
			})
		}
	})
}

// What the store writes after a handler ended the transaction would be committed at once.
func TestStoreDoesNotWriteOutsideTheTransaction(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, c := range endings() {
			t.Run(name, func(t *testing.T) {
				db := d.open(t, d.file(t), "synchronous=OFF")
				s := migrated(t, db)
				mustExec(t, db, counters, "INSERT INTO counters VALUES ('taken', 0)")
				tx := begin(t, s)
				claimed(t, tx, claim("a"))
				increment(t, tx, "a")
				c.end(tx.Raw())
				_, outErr := tx.AddOutputs(t.Context(), []receipts.Output{{Scope: "billing", Key: []byte("a"), Topic: "out"}})
				divertErr := tx.Divert(t.Context(), []receipts.DeadLetter{{Scope: "billing", Kind: receipts.KindRefused}})
				_, claimErr := tx.Claim(t.Context(), []receipts.Claim{claim("b")})
				_ = tx.Rollback(t.Context())
				for what, err := range map[string]error{"AddOutputs": outErr, "Divert": divertErr, "Claim": claimErr} {
					if err != nil && !errors.Is(err, receipts.ErrTxEnded) {
						t.Errorf("%s: %v, want nil or ErrTxEnded", what, err)
					}
				}
				stats, err := s.Stats(t.Context())
				must(t, err)
				if stats.Outputs != 0 || len(stats.DeadLetters) != 0 || stats.Torn != c.torn {
					t.Errorf("the store wrote outside its transaction: %+v", stats)
				}
				wantFreeLock(t, db)
			})
		}
	})
}

// A handler may use savepoints of its own and may have statements cancelled, as long as the transaction lives.
func TestHandlerKeepsTransaction(t *testing.T) {
	handlers := map[string]func(tx *sql.Tx) error{
		"own savepoint left open": func(tx *sql.Tx) error { _, err := tx.Exec("SAVEPOINT mine"); return err },
		"own savepoint rolled back": func(tx *sql.Tx) error {
			_, err := tx.Exec("SAVEPOINT mine; UPDATE counters SET value = 7; ROLLBACK TO mine; RELEASE mine")
			return err
		},
		"swallowed constraint": func(tx *sql.Tx) error {
			if _, err := tx.Exec("INSERT INTO counters VALUES ('taken', 1)"); err == nil {
				return errors.New("the constraint did not hold")
			}
			return nil
		},
		"cancelled before": func(tx *sql.Tx) error {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			if _, err := tx.ExecContext(ctx, "UPDATE counters SET value = 7"); err == nil {
				return errors.New("a cancelled statement ran")
			}
			return nil
		},
		"cancelled read": func(tx *sql.Tx) error {
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			var n int
			err := tx.QueryRowContext(ctx, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000000)
				SELECT count(*) FROM n`).Scan(&n)
			if err == nil {
				return errors.New("the read was not cancelled")
			}
			return nil
		},
		"rows left open": func(tx *sql.Tx) error {
			rows, err := tx.Query("SELECT name FROM counters") //nolint:rowserrcheck,sqlclosecheck // the point of the test
			if err == nil {
				rows.Next()
			}
			return err
		},
	}
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, handler := range handlers {
			t.Run(name, func(t *testing.T) {
				db := d.open(t, d.file(t), "synchronous=OFF")
				s := migrated(t, db)
				mustExec(t, db, counters, "INSERT INTO counters VALUES ('taken', 0)")
				tx := begin(t, s)
				claimed(t, tx, claim("a"))
				increment(t, tx, "a")
				must(t, handler(tx.Raw()))
				must(t, tx.Commit(t.Context()))
				wantStats(t, s, 1, 0, 0)
				if effect(t, db, "a") != 1 || effect(t, db, "taken") != 0 {
					t.Errorf("effects %d and %d, want 1 and 0", effect(t, db, "a"), effect(t, db, "taken"))
				}
				wantFreeLock(t, db)
			})
		}
	})
}

// Rows of a writing statement that a handler leaves open keep SQLite from committing. That is the handler's failure, the
// same each time, not contention.
func TestOpenWritingRows(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		mustExec(t, db, counters)
		tx := begin(t, s)
		claimed(t, tx, claim("a"))
		//nolint:rowserrcheck,sqlclosecheck // the point of the test
		rows, err := tx.Raw().Query("INSERT INTO counters VALUES ('a', 1), ('b', 1), ('c', 1) RETURNING name")
		must(t, err)
		rows.Next()
		err = tx.Commit(t.Context())
		if err != nil && s.Classify(err) != receipts.ClassOther {
			t.Errorf("%v has class %d, want other", err, s.Classify(err))
		}
		want := 1
		if err != nil {
			want = 0
		}
		wantStats(t, s, want, 0, 0)
		if effect(t, db, "a") != want {
			t.Errorf("receipt and effect differ: effect %d after %v", effect(t, db, "a"), err)
		}
		wantFreeLock(t, db)
	})
}

// The marker is conditional on the receipts: a handler that deletes one gets nothing committed.
func TestHandlerRemovesReceipts(t *testing.T) {
	for name, keys := range map[string][]string{"one claim": {"a"}, "many claims": {"a", "b", "c"}} {
		t.Run(name, func(t *testing.T) {
			onEachDriver(t, func(t *testing.T, d sqliteDriver) {
				db := d.open(t, d.file(t), "synchronous=OFF")
				s := migrated(t, db)
				mustExec(t, db, counters)
				var claims []receipts.Claim
				for _, k := range keys {
					claims = append(claims, claim(k))
				}
				tx := begin(t, s)
				claimed(t, tx, claims...)
				increment(t, tx, "a")
				_, err := tx.Raw().Exec("DELETE FROM penstock_receipts WHERE identity_key = ?", []byte("a"))
				must(t, err)
				if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
					t.Fatalf("Commit: %v, want ErrTxEnded", err)
				}
				wantStats(t, s, 0, 0, 0)
				if effect(t, db, "a") != 0 {
					t.Error("an effect without its receipt")
				}
			})
		})
	}
}
