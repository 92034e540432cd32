package receipts_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/contracttest/lossydb"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// checked gives a store whose statements are prepared, as in an application; unchecked ones send text.
func checked(t testing.TB, db *sql.DB) *receipts.SQLite {
	t.Helper()
	s, err := receipts.NewSQLite(db, receipts.SQLiteOptions{AllowUnsafeSync: true})
	must(t, err)
	must(t, s.Migrate(context.Background()))
	mustExec(t, db, counters, "INSERT INTO counters VALUES ('taken', 0)")
	_, err = s.Check(context.Background())
	must(t, err)
	return s
}

func output(key string) []receipts.Output {
	return []receipts.Output{{Scope: "billing", Key: []byte(key), Topic: "out", UUID: "of " + key, At: noon}}
}

func letter(key string) []receipts.DeadLetter {
	return []receipts.DeadLetter{{Scope: "billing", Key: []byte(key), Kind: receipts.KindPermanent, At: noon}}
}

// keys gives n claims, in no particular order.
func keys(n int) []receipts.Claim {
	claims := make([]receipts.Claim, n)
	for i := range claims {
		claims[i] = claim(itoa(i * 1009 % n))
	}
	return claims
}

// A batch in which messages fail: all of theirs is gone, and nothing of the others.
func TestParts(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, open := range map[string]func(testing.TB, *sql.DB) *receipts.SQLite{
			"prepared": checked,
			"as text": func(t testing.TB, db *sql.DB) *receipts.SQLite {
				mustExec(t, db, counters)
				return migrated(t, db)
			},
		} {
			t.Run(name, func(t *testing.T) {
				const n, bad = 301, 5
				db := d.open(t, d.file(t), "synchronous=OFF")
				s := open(t, db)
				process(t, s, "0") // one of them is a replay
				tx := begin(t, s)
				claims := keys(n)
				handled, failed := 0, 0
				for i, r := range claimed(t, tx, claims...) {
					if r.Status != receipts.ClaimFresh {
						continue
					}
					key := string(claims[i].Key)
					must(t, tx.Part(t.Context()))
					increment(t, tx, key)
					stored, err := tx.AddOutputs(t.Context(), output(key))
					must(t, err)
					if want := handled + failed; stored[0].Position != want {
						t.Fatalf("output %d has position %d: positions of undone outputs must not come again", want, stored[0].Position)
					}
					must(t, tx.Divert(t.Context(), letter(key)))
					if i%bad == 0 {
						must(t, tx.Undo(t.Context()))
						must(t, tx.Unclaim(t.Context(), claims[i:i+1]))
						failed++
						continue
					}
					must(t, tx.Keep(t.Context()))
					handled++
				}
				must(t, tx.Commit(t.Context()))
				wantStats(t, s, handled+1, 0, 0)
				stats, err := s.Stats(t.Context())
				must(t, err)
				if stats.Outputs != handled || stats.DeadLetters[receipts.KindPermanent] != handled {
					t.Errorf("%d outputs and %v dead letters of %d messages", stats.Outputs, stats.DeadLetters, handled)
				}
				if sum := count(t, db, "SELECT sum(value) FROM counters"); sum != handled+1 {
					t.Errorf("effects sum up to %d, want %d", sum, handled+1)
				}
				if marked := count(t, db, "SELECT claims FROM penstock_markers ORDER BY claims DESC LIMIT 1"); marked != handled {
					t.Errorf("the marker counts %d claims, want %d", marked, handled)
				}
				if committed, err := s.Resolve(t.Context(), tx.Nonce()); !committed || err != nil {
					t.Errorf("Resolve: %t, %v; want true", committed, err)
				}
				// What was given up is new the next time.
				tx = begin(t, s)
				fresh := 0
				for _, r := range claimed(t, tx, claims...) {
					if r.Status == receipts.ClaimFresh {
						fresh++
					}
				}
				if fresh != failed {
					t.Errorf("%d claims are fresh the next time, want the %d that were given up", fresh, failed)
				}
			})
		}
	})
}

func TestUnclaim(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := checked(t, db)
		process(t, s, "theirs")

		t.Run("claimed again", func(t *testing.T) {
			tx := begin(t, s)
			claimed(t, tx, claim("a"), claim("b"), claim("c"))
			must(t, tx.Unclaim(t.Context(), []receipts.Claim{claim("b"), claim("theirs"), claim("nobody's")}))
			again := claimed(t, tx, claim("b"), claim("a"), claim("theirs"))
			want := []receipts.ClaimStatus{receipts.ClaimFresh, receipts.ClaimHeld, receipts.ClaimHeld}
			for i, r := range again {
				if r.Status != want[i] {
					t.Errorf("claim %d has status %d after b was given up, want %d", i, r.Status, want[i])
				}
			}
			if again[1].Receipt.Nonce != tx.Nonce() || again[2].Receipt.Nonce == tx.Nonce() {
				t.Error("the held receipts have the wrong nonces")
			}
			must(t, tx.Unclaim(t.Context(), []receipts.Claim{claim("a"), claim("b")}))
			claimed(t, tx, claim("a"))
			must(t, tx.Commit(t.Context()))
			wantStats(t, s, 3, 0, 0) // theirs, a and c
		})
		t.Run("all given up", func(t *testing.T) {
			tx := begin(t, s)
			claims := keys(300)
			claimed(t, tx, claims...)
			must(t, tx.Divert(t.Context(), letter("kept")))
			must(t, tx.Unclaim(t.Context(), claims))
			must(t, tx.Commit(t.Context()))
			if committed, err := s.Resolve(t.Context(), tx.Nonce()); committed || err != nil {
				t.Errorf("Resolve: %t, %v; want false: there is no marker", committed, err)
			}
			wantStats(t, s, 3, 0, 0)
			if n := count(t, db, "SELECT count(*) FROM penstock_dead_letters"); n != 1 {
				t.Errorf("%d dead letters, want the one of that transaction", n)
			}
		})
		t.Run("none", func(t *testing.T) {
			tx := begin(t, s)
			must(t, tx.Unclaim(t.Context(), nil))
			must(t, tx.Commit(t.Context()))
		})
		t.Run("other scope", func(t *testing.T) {
			tx := begin(t, s)
			claimed(t, tx, claim("d"))
			other := claim("d")
			other.Scope = "shipping"
			must(t, tx.Unclaim(t.Context(), []receipts.Claim{other}))
			must(t, tx.Commit(t.Context()))
			wantStats(t, s, 4, 0, 0)
		})
	})
}

// The marker asks for a receipt of each call of Claim: a handler that goes back to before one of them, or deletes what it
// inserted, is found, in a batch of any size.
func TestMarkerAsksForEachClaim(t *testing.T) {
	d := modernc()
	db := d.open(t, d.file(t), "synchronous=OFF")
	s := checked(t, db)
	for _, n := range []int{2, 3, 255, 256, 257, 700} {
		claims := keys(n)
		for i := range claims {
			claims[i].Scope = itoa(n) + "/" + itoa(i%3)
		}
		calls := [][]receipts.Claim{claims[:n/2], claims[n/2:]}
		for gone := range calls {
			tx := begin(t, s)
			for _, call := range calls {
				claimed(t, tx, call...)
			}
			for _, c := range calls[gone] {
				_, err := tx.Raw().Exec("DELETE FROM penstock_receipts WHERE identity_key = ?", c.Key)
				must(t, err)
			}
			if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
				t.Errorf("%d claims, those of call %d deleted: Commit gives %v, want ErrTxEnded", n, gone+1, err)
			}
		}
		tx := begin(t, s)
		for _, call := range calls {
			claimed(t, tx, call...)
		}
		must(t, tx.Commit(t.Context()))
		if marked := count(t, db, "SELECT claims FROM penstock_markers WHERE nonce = ?", nonceBytes(tx)); marked != n {
			t.Errorf("the marker counts %d claims, want %d", marked, n)
		}
	}
}

func nonceBytes(tx receipts.Tx[*sql.Tx]) []byte {
	n := tx.Nonce()
	return n[:]
}

// What a handler may do inside a part, and what becomes of it when the part is undone.
func TestPartsAreTheHandlersOwn(t *testing.T) {
	exec := func(statements ...string) func(tx *sql.Tx) error {
		return func(tx *sql.Tx) error {
			for _, s := range statements {
				if _, err := tx.Exec(s); err != nil {
					return err
				}
			}
			return nil
		}
	}
	handlers := map[string]func(tx *sql.Tx) error{
		"nothing": exec(),
		// The names that the store's savepoints begin with.
		"a savepoint called part":         exec("SAVEPOINT penstock_part", "UPDATE counters SET value = 7 WHERE name = 'taken'"),
		"a savepoint called part, ended":  exec("SAVEPOINT penstock_part", "UPDATE counters SET value = 7 WHERE name = 'taken'", "RELEASE penstock_part"),
		"a savepoint called guard, twice": exec("SAVEPOINT penstock_guard", "SAVEPOINT penstock_guard", "RELEASE penstock_guard"),
		"own savepoint rolled back": exec("SAVEPOINT mine", "UPDATE counters SET value = 7", "ROLLBACK TO mine",
			"RELEASE mine"),
		"own savepoint rolled back and left open": exec("SAVEPOINT mine", "UPDATE counters SET value = 7", "ROLLBACK TO mine"),
		"a table": exec("CREATE TABLE made (x)", "INSERT INTO made VALUES (1)", "DROP TABLE made"),
		"reading rows left open": func(tx *sql.Tx) error {
			rows, err := tx.Query("SELECT name FROM counters") //nolint:rowserrcheck,sqlclosecheck // the point of the test
			if err == nil {
				rows.Next()
			}
			return err
		},
		"a prepared statement": func(tx *sql.Tx) error {
			stmt, err := tx.Prepare("UPDATE counters SET value = value WHERE name = ?")
			if err != nil {
				return err
			}
			_, err = stmt.Exec("taken")
			return err
		},
	}
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, handler := range handlers {
			t.Run(name, func(t *testing.T) {
				db := d.open(t, d.file(t), "synchronous=OFF")
				s := checked(t, db)
				tx := begin(t, s)
				claimed(t, tx, claim("kept"), claim("undone"), claim("after"))
				for _, key := range []string{"kept", "undone", "after"} {
					must(t, tx.Part(t.Context()))
					increment(t, tx, key)
					if key != "after" {
						must(t, handler(tx.Raw()))
					}
					if key != "undone" {
						must(t, tx.Keep(t.Context()))
						continue
					}
					_, err := tx.Raw().Exec("UPDATE counters SET value = 100")
					must(t, err)
					must(t, tx.Undo(t.Context()))
					must(t, tx.Unclaim(t.Context(), []receipts.Claim{claim("undone")}))
				}
				must(t, tx.Commit(t.Context()))
				wantStats(t, s, 2, 0, 0)
				if a, b, c := effect(t, db, "kept"), effect(t, db, "undone"), effect(t, db, "after"); a != 1 || b != 0 || c != 1 {
					t.Errorf("effects %d, %d and %d, want 1, 0 and 1", a, b, c)
				}
				wantFreeLock(t, db)
			})
		}
	})
}

// Rows of a writing statement that are left open keep SQLite from ending the part. It is that handler's failure: neither
// contention, nor the end of the transaction.
func TestOpenWritingRowsInPart(t *testing.T) {
	ends := map[string]func(tx receipts.Tx[*sql.Tx], ctx context.Context) error{
		"Keep": receipts.Tx[*sql.Tx].Keep, "Undo": receipts.Tx[*sql.Tx].Undo,
	}
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, end := range ends {
			t.Run(name, func(t *testing.T) {
				db := d.open(t, d.file(t), "synchronous=OFF")
				s := checked(t, db)
				tx := begin(t, s)
				claimed(t, tx, claim("a"), claim("b"))
				must(t, tx.Part(t.Context()))
				//nolint:rowserrcheck,sqlclosecheck // the point of the test
				rows, err := tx.Raw().Query("INSERT INTO counters VALUES ('a', 1), ('b', 1), ('c', 1) RETURNING name")
				must(t, err)
				rows.Next()
				if err = end(tx, t.Context()); err == nil {
					t.Skip("the driver runs a writing statement to its end: capability of its own")
				}
				if s.Classify(err) != receipts.ClassOther || errors.Is(err, receipts.ErrTxEnded) || !strings.Contains(err.Error(), "close its rows") {
					t.Errorf("%s: %v of class %d, want the handler's own failure, with the remedy", name, err, s.Classify(err))
				}
				if err := tx.Commit(t.Context()); err == nil {
					t.Error("Commit after a part could not be ended returned nil")
				}
				wantStats(t, s, 0, 0, 0)
				wantFreeLock(t, db)
			})
		}
	})
}

// An error that made SQLite roll everything back is not survived by ignoring it, whether the handler returns it or not.
func TestPartsWithoutTransaction(t *testing.T) {
	losses := map[string]func(t *testing.T, tx *sql.Tx){
		"interrupted write": func(_ *testing.T, tx *sql.Tx) { interruptWrite(tx) },
		"disk full": func(t *testing.T, tx *sql.Tx) {
			var pages int
			must(t, tx.QueryRow("PRAGMA page_count").Scan(&pages))
			must(t, tx.QueryRow("PRAGMA max_page_count = "+itoa(pages+2)).Scan(&pages))
			var err error
			for err == nil {
				_, err = tx.Exec("INSERT INTO counters VALUES (hex(randomblob(400)), 1)")
			}
		},
		"ROLLBACK": func(t *testing.T, tx *sql.Tx) {
			_, err := tx.Exec("ROLLBACK")
			must(t, err)
		},
		"Rollback": func(t *testing.T, tx *sql.Tx) { must(t, tx.Rollback()) },
	}
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, lose := range losses {
			for _, end := range []string{"Keep", "Undo"} {
				t.Run(name+", "+end, func(t *testing.T) {
					db := d.open(t, d.file(t), "synchronous=OFF")
					db.SetMaxOpenConns(1) // max_page_count belongs to the connection
					s := checked(t, db)
					tx := begin(t, s)
					claimed(t, tx, claim("a"), claim("b"))
					raw := tx.Raw() // once for all parts
					must(t, tx.Part(t.Context()))
					_, err := raw.Exec(incrementSQL, "a")
					must(t, err)
					must(t, tx.Keep(t.Context()))
					must(t, tx.Part(t.Context()))
					_, err = raw.Exec(incrementSQL, "b")
					must(t, err)
					lose(t, raw)
					if _, err := tx.AddOutputs(t.Context(), output("b")); !errors.Is(err, receipts.ErrTxEnded) {
						t.Errorf("AddOutputs: %v, want ErrTxEnded", err)
					}
					if end == "Undo" {
						err = tx.Undo(t.Context())
					} else {
						err = tx.Keep(t.Context())
					}
					if !errors.Is(err, receipts.ErrTxEnded) {
						t.Fatalf("%s: %v, want ErrTxEnded", end, err)
					}
					wantOnlyRollback(t, tx)
					wantStats(t, s, 0, 0, 0)
					if n := count(t, db, "SELECT count(*) FROM penstock_outputs"); n != 0 {
						t.Errorf("%d outputs of a transaction that has ended", n)
					}
					if a, b := effect(t, db, "a"), effect(t, db, "b"); a+b != 0 {
						t.Errorf("effects %d and %d without receipts", a, b)
					}
					wantFreeLock(t, db)
				})
			}
		}
	})
}

// A part that could not be ended, for whatever reason, is neither kept nor undone for certain: nothing may be committed.
func TestPartCannotBeEnded(t *testing.T) {
	for _, match := range []string{"SAVEPOINT", "ROLLBACK TO", "RELEASE"} {
		t.Run(match, func(t *testing.T) {
			onEachDriver(t, func(t *testing.T, d sqliteDriver) {
				connector, db := d.lossy(t, d.file(t), "synchronous=OFF")
				s := migrated(t, db)
				mustExec(t, db, counters)
				tx := begin(t, s)
				claimed(t, tx, claim("a"))
				fault := connector.FailStatement(match, 1, lossydb.ErrNoCode)
				err := tx.Part(t.Context())
				if err == nil {
					increment(t, tx, "a")
					err = tx.Undo(t.Context())
				}
				if !errors.Is(err, lossydb.ErrNoCode) || fault.Fired() != 1 {
					t.Fatalf("%v after the fault fired %d times", err, fault.Fired())
				}
				wantOnlyRollback(t, tx)
				wantStats(t, s, 0, 0, 0)
				if effect(t, db, "a") != 0 {
					t.Error("an undone effect is there")
				}
				wantFreeLock(t, db)
			})
		})
	}
}

// Parts follow each other, they do not pile up inside each other, nor inside the guard: SQLite's work for one would grow with
// their number, and what it keeps for them goes to disk.
func TestPartsLeaveNoSavepoint(t *testing.T) {
	d := modernc()
	s := checked(t, d.open(t, d.file(t), "synchronous=OFF"))
	for name, end := range map[string]func(tx receipts.Tx[*sql.Tx], ctx context.Context) error{
		"Keep": receipts.Tx[*sql.Tx].Keep, "Undo": receipts.Tx[*sql.Tx].Undo,
	} {
		tx := begin(t, s)
		raw := tx.Raw()
		must(t, tx.Part(t.Context()))
		if _, err := raw.Exec(s.FlowQueries()["seal"]); err == nil {
			t.Error("the guard is still there inside a part")
		}
		increment(t, tx, "a")
		must(t, end(tx, t.Context()))
		if _, err := tx.Raw().Exec(s.FlowQueries()["keep"]); err == nil {
			t.Errorf("the savepoint of a part is still there after %s", name)
		}
		must(t, tx.Commit(t.Context()))
	}
}

// wantOnlyRollback checks that a transaction whose part could not be ended does nothing any more.
func wantOnlyRollback(t *testing.T, tx receipts.Tx[*sql.Tx]) {
	t.Helper()
	_, claimErr := tx.Claim(t.Context(), []receipts.Claim{claim("later")})
	for what, err := range map[string]error{
		"Part": tx.Part(t.Context()), "Keep": tx.Keep(t.Context()), "Undo": tx.Undo(t.Context()), "Claim": claimErr,
		"Unclaim": tx.Unclaim(t.Context(), []receipts.Claim{claim("a")}), "Commit": tx.Commit(t.Context()),
	} {
		if err == nil {
			t.Errorf("%s after a part could not be ended returned nil", what)
		}
	}
	must(t, tx.Rollback(t.Context()))
}
