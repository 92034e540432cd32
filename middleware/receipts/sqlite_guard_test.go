package receipts_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// ending is a way in which a handler ends the transaction it was lent. An error of the statement itself is swallowed, as a
// careless handler does. What it leaves behind where nothing prevents it: receipts without a marker, its effect, and the
// value that it gave to the counter taken after that end.
type ending struct {
	end                 func(tx *sql.Tx)
	torn, effect, taken int
}

func endings() map[string]ending {
	text := func(statements ...string) func(tx *sql.Tx) {
		return func(tx *sql.Tx) {
			for _, s := range statements {
				_, _ = tx.Exec(s)
			}
		}
	}
	const later = "UPDATE counters SET value = 100 WHERE name = 'taken'"
	full := func(tx *sql.Tx) {
		var pages int
		_ = tx.QueryRow("PRAGMA page_count").Scan(&pages)
		_ = tx.QueryRow("PRAGMA max_page_count = " + itoa(pages+2)).Scan(&pages)
		var err error
		for err == nil {
			_, err = tx.Exec("INSERT INTO counters VALUES (hex(randomblob(400)), 1)")
		}
		_ = tx.QueryRow("PRAGMA max_page_count = 1000000").Scan(&pages)
	}
	return map[string]ending{
		"Commit":                {func(tx *sql.Tx) { _ = tx.Commit() }, 1, 1, 0},
		"Rollback":              {func(tx *sql.Tx) { _ = tx.Rollback() }, 0, 0, 0},
		"COMMIT as text":        {text("COMMIT"), 1, 1, 0},
		"ROLLBACK as text":      {text("ROLLBACK"), 0, 0, 0},
		"COMMIT; BEGIN":         {text("COMMIT; BEGIN IMMEDIATE"), 1, 1, 0},
		"ROLLBACK then BEGIN":   {text("ROLLBACK", "BEGIN IMMEDIATE"), 0, 0, 0},
		"COMMIT, BEGIN, effect": {text("COMMIT", "BEGIN", later), 1, 1, 0},
		"COMMIT then Commit":    {func(tx *sql.Tx) { _, _ = tx.Exec("COMMIT"); _ = tx.Commit() }, 1, 1, 0},
		"END and own savepoint": {text("END", "SAVEPOINT mine"), 1, 1, 0},
		"OR ROLLBACK":           {text("INSERT OR ROLLBACK INTO counters VALUES ('taken', 1)"), 0, 0, 0},
		"interrupted write":     {interruptWrite, 0, 0, 0},
		"full":                  {full, 0, 0, 0},

		"ROLLBACK and own savepoint":         {text("ROLLBACK", "SAVEPOINT mine", later), 0, 0, 0},
		"ROLLBACK and a savepoint to commit": {text("ROLLBACK", "SAVEPOINT mine", later, "RELEASE mine"), 0, 0, 100},
		"ROLLBACK and autocommit":            {text("ROLLBACK", later), 0, 0, 100},
		"COMMIT and autocommit":              {text("COMMIT", later), 1, 1, 100},
		"ROLLBACK, BEGIN, COMMIT":            {text("ROLLBACK", "BEGIN", later, "COMMIT"), 0, 0, 100},
		"OR ROLLBACK and autocommit":         {text("INSERT OR ROLLBACK INTO counters VALUES ('taken', 1)", later), 0, 0, 100},
		"interrupted write and autocommit":   {func(tx *sql.Tx) { interruptWrite(tx); text(later)(tx) }, 0, 0, 100},
		"full and autocommit":                {func(tx *sql.Tx) { full(tx); text(later)(tx) }, 0, 0, 100},
	}
}

// interruptWrite has a write cut off in its middle by the end of its context, after which SQLite has rolled back. On a busy
// machine the context may end before the write began, which changes nothing: then once more.
func interruptWrite(tx *sql.Tx) {
	for timeout := 100 * time.Millisecond; ; timeout *= 2 {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		_, _ = tx.ExecContext(ctx, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000000)
			INSERT INTO counters SELECT 'n' || i, 1 FROM n`)
		cancel()
		if _, err := tx.Exec("BEGIN"); err == nil { // it succeeds outside a transaction only
			_, _ = tx.Exec("ROLLBACK")
			return
		}
	}
}

// onEachEnding runs a test for each ending, on each driver, with the commit hook and without. Without it the ending is
// found only, and leaves behind what it says; with it, nothing.
func onEachEnding(t *testing.T, f func(t *testing.T, db *sql.DB, s *receipts.SQLite, e ending)) {
	t.Helper()
	for mode, leave := range map[string]bool{"prevented": false, "found": true} {
		t.Run(mode, func(t *testing.T) {
			onEachDriver(t, func(t *testing.T, d sqliteDriver) {
				for name, e := range endings() {
					t.Run(name, func(t *testing.T) {
						db := d.open(t, d.file(t), "synchronous=OFF")
						db.SetMaxOpenConns(1) // the next user of the pool gets the very connection
						s, err := receipts.NewSQLite(db, receipts.SQLiteOptions{LeaveCommitHook: leave})
						must(t, err)
						must(t, s.Migrate(t.Context()))
						mustExec(t, db, counters, "INSERT INTO counters VALUES ('taken', 0)")
						if !leave {
							e.torn, e.effect, e.taken = 0, 0, 0
						}
						f(t, db, s, e)
					})
				}
			})
		})
	}
}

func TestHandlerEndsTransaction(t *testing.T) {
	onEachEnding(t, func(t *testing.T, db *sql.DB, s *receipts.SQLite, e ending) {
		tx := begin(t, s)
		claimed(t, tx, claim("a"))
		increment(t, tx, "a")
		e.end(tx.Raw())
		if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
			t.Fatalf("Commit after the handler ended the transaction: %v, want ErrTxEnded", err)
		}
		must(t, tx.Rollback(t.Context()))
		wantFreeLock(t, db)
		wantStats(t, s, 0, 0, e.torn)
		if a, taken := effect(t, db, "a"), effect(t, db, "taken"); a != e.effect || taken != e.taken {
			t.Errorf("the effect is %d, and %d what was written later, want %d and %d", a, taken, e.effect, e.taken)
		}
		if committed, err := s.Resolve(t.Context(), tx.Nonce()); err != nil || committed {
			t.Errorf("Resolve: %t, %v; want false", committed, err)
		}
		want := receipts.ClaimFresh
		if e.torn > 0 {
			want = receipts.ClaimTorn
		}
		if result, _ := process(t, s, "a"); result.Status != want {
			t.Errorf("the redelivery's claim is %d, want %d", result.Status, want)
		}
		if got := effect(t, db, "a"); got != 1 {
			t.Errorf("the effect after the redelivery is %d, want 1", got)
		}
	})
}

// The same in the middle of a batch: whoever ends the transaction ends it for its neighbours too, who must not be left with
// an effect and no receipt, nor the other way round.
func TestHandlerEndsBatch(t *testing.T) {
	onEachEnding(t, func(t *testing.T, db *sql.DB, s *receipts.SQLite, e ending) {
		tx := begin(t, s)
		claims := []receipts.Claim{claim("a"), claim("b"), claim("c")}
		claimed(t, tx, claims...)
		raw := tx.Raw()
		must(t, tx.Part(t.Context()))
		increment(t, tx, "a")
		must(t, tx.Keep(t.Context()))
		must(t, tx.Part(t.Context()))
		increment(t, tx, "b")
		e.end(raw)
		for what, err := range map[string]error{"Keep": tx.Keep(t.Context()), "Commit": tx.Commit(t.Context())} {
			if !errors.Is(err, receipts.ErrTxEnded) {
				t.Errorf("%s: %v, want ErrTxEnded", what, err)
			}
		}
		wantFreeLock(t, db)
		wantStats(t, s, 0, 0, 3*e.torn)
		if a, b, taken := effect(t, db, "a"), effect(t, db, "b"), effect(t, db, "taken"); a != e.effect || b != e.effect || taken != e.taken {
			t.Errorf("effects %d, %d and %d later, want %d, %d and %d", a, b, taken, e.effect, e.effect, e.taken)
		}
		tx = begin(t, s)
		for i, r := range claimed(t, tx, claims...) {
			if fresh := r.Status == receipts.ClaimFresh; fresh != (e.torn == 0) {
				t.Errorf("claim %d has status %d afterwards", i, r.Status)
			}
		}
	})
}

// What the store writes after a handler ended the transaction would be committed at once.
func TestStoreDoesNotWriteOutsideTheTransaction(t *testing.T) {
	onEachEnding(t, func(t *testing.T, db *sql.DB, s *receipts.SQLite, e ending) {
		tx := begin(t, s)
		claimed(t, tx, claim("a"))
		increment(t, tx, "a")
		e.end(tx.Raw())
		_, outErr := tx.AddOutputs(t.Context(), output("a"))
		divertErr := tx.Divert(t.Context(), letter("a"))
		_, claimErr := tx.Claim(t.Context(), []receipts.Claim{claim("b")})
		_ = tx.Rollback(t.Context())
		for what, err := range map[string]error{"AddOutputs": outErr, "Divert": divertErr, "Claim": claimErr} {
			if err != nil && !errors.Is(err, receipts.ErrTxEnded) {
				t.Errorf("%s: %v, want nil or ErrTxEnded", what, err)
			}
		}
		stats, err := s.Stats(t.Context())
		must(t, err)
		if stats.Outputs != 0 || len(stats.DeadLetters) != 0 || stats.Torn != e.torn {
			t.Errorf("the store wrote outside its transaction: %+v", stats)
		}
		wantFreeLock(t, db)
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

// The marker is conditional on the receipts: a handler that deletes them gets nothing committed.
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
				_, err := tx.Raw().Exec("DELETE FROM penstock_receipts")
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
