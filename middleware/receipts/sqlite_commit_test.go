package receipts_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest/lossydb"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestLostCommit(t *testing.T) {
	cases := map[string]struct {
		fault     func(c *lossydb.Connector) *lossydb.Fault
		committed bool
	}{
		"answer lost, bad connection": {
			func(c *lossydb.Connector) *lossydb.Fault { return c.LoseCommitAnswer(1, nil) }, true,
		},
		"answer lost, no code": {
			func(c *lossydb.Connector) *lossydb.Fault { return c.LoseCommitAnswer(1, lossydb.ErrNoCode) }, true,
		},
		"never arrives, bad connection": {
			func(c *lossydb.Connector) *lossydb.Fault { return c.DropCommit(1, nil) }, false,
		},
		"never arrives, no code": {
			func(c *lossydb.Connector) *lossydb.Fault { return c.DropCommit(1, lossydb.ErrNoCode) }, false,
		},
	}
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				connector, db := d.lossy(t, d.file(t), "synchronous=OFF")
				s := migrated(t, db)
				mustExec(t, db, counters)
				tx := begin(t, s)
				claimed(t, tx, claim("a"), claim("b"))
				increment(t, tx, "a")
				fault := c.fault(connector)
				err := tx.Commit(t.Context())
				if fault.Fired() != 1 {
					t.Fatalf("the fault fired %d times, want once", fault.Fired())
				}
				if !errors.Is(err, receipts.ErrCommitUnknown) {
					t.Fatalf("Commit: %v, want ErrCommitUnknown", err)
				}
				if open := db.Stats().OpenConnections; open != 0 {
					t.Errorf("%d connections are open, want none: the one with the unknown outcome must be closed", open)
				}
				committed, err := s.Resolve(t.Context(), tx.Nonce())
				must(t, err)
				if committed != c.committed {
					t.Errorf("Resolve: %t, want %t", committed, c.committed)
				}
				must(t, tx.Rollback(t.Context()))
				want := 0
				if c.committed {
					want = 1
				}
				wantStats(t, s, 2*want, 0, 0)
				if effect(t, db, "a") != want {
					t.Errorf("the effect is %d, want %d", effect(t, db, "a"), want)
				}
				// The redelivery ends at one effect either way.
				process(t, s, "a")
				if effect(t, db, "a") != 1 {
					t.Errorf("the effect after the redelivery is %d, want 1", effect(t, db, "a"))
				}
			})
		}
	})
}

func TestCommitErrorKeepsItsCause(t *testing.T) {
	d := modernc()
	connector, db := d.lossy(t, d.file(t), "synchronous=OFF")
	s := migrated(t, db)
	cause := errors.New("the peer is gone")
	connector.LoseCommitAnswer(1, cause)
	tx := begin(t, s)
	claimed(t, tx, claim("a"))
	if err := tx.Commit(t.Context()); !errors.Is(err, cause) || !errors.Is(err, receipts.ErrCommitUnknown) {
		t.Errorf("Commit: %v, want both ErrCommitUnknown and its cause", err)
	}
}

// Errors of COMMIT that prove that nothing was committed: the transaction is rolled back, its error keeps its class, and
// the connection is clean.
func TestRefusedCommit(t *testing.T) {
	cases := map[string]struct {
		changes []string
		prepare func(t *testing.T, d sqliteDriver, path string, db *sql.DB)
		handler func(t *testing.T, tx *sql.Tx)
		class   receipts.Class
	}{
		"a reader in rollback-journal mode": {
			changes: []string{"journal_mode=DELETE", "busy_timeout=50"},
			prepare: func(t *testing.T, d sqliteDriver, path string, _ *sql.DB) {
				reader := d.open(t, path, "txlock=deferred", "journal_mode=DELETE")
				tx, err := reader.Begin()
				must(t, err)
				t.Cleanup(func() { _ = tx.Rollback() })
				var n int
				must(t, tx.QueryRow("SELECT count(*) FROM counters").Scan(&n)) // keeps a SHARED lock
			},
			class: receipts.ClassContention,
		},
		"a deferred constraint": {
			changes: []string{"foreign_keys=1"},
			handler: func(t *testing.T, tx *sql.Tx) {
				_, err := tx.Exec("INSERT INTO child VALUES (1)")
				must(t, err)
			},
			class: receipts.ClassOther,
		},
	}
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				path := d.file(t)
				db := d.open(t, path, append(c.changes, "synchronous=OFF")...)
				db.SetMaxOpenConns(1)
				s := migrated(t, db)
				mustExec(t, db, counters, "CREATE TABLE parent (id INTEGER PRIMARY KEY)",
					"CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
				if c.prepare != nil {
					c.prepare(t, d, path, db)
				}
				tx := begin(t, s)
				claimed(t, tx, claim("a"))
				increment(t, tx, "a")
				if c.handler != nil {
					c.handler(t, tx.Raw())
				}
				err := tx.Commit(t.Context())
				if err == nil || errors.Is(err, receipts.ErrCommitUnknown) || s.Classify(err) != c.class {
					t.Fatalf("Commit: %v of class %d, want a known failure of class %d", err, s.Classify(err), c.class)
				}
				if db.Stats().OpenConnections != 1 {
					t.Error("the connection was thrown away although its state is known")
				}
				wantFreeLock(t, db)
				wantStats(t, s, 0, 0, 0)
			})
		}
	})
}

// A driver that leaves the transaction open when COMMIT failed, as SQLite does and database/sql does not expect: the
// connection must not go back to the pool that way.
func TestCommitLeavesTransactionOpen(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		connector, db := d.lossy(t, d.file(t), "synchronous=OFF")
		db.SetMaxOpenConns(1)
		busy := errors.New("busy")
		s, err := receipts.NewSQLite(db, receipts.SQLiteOptions{ErrorCode: func(err error) (int, bool) {
			return 5, err == busy //nolint:errorlint // exactly this error is asked for
		}})
		must(t, err)
		must(t, storeOn(t, db).Migrate(t.Context()))
		mustExec(t, db, counters)
		tx := begin(t, s)
		claimed(t, tx, claim("a"))
		increment(t, tx, "a")
		fault := connector.RefuseCommit(1, busy)
		err = tx.Commit(t.Context())
		if s.Classify(err) != receipts.ClassContention || errors.Is(err, receipts.ErrCommitUnknown) || fault.Fired() != 1 {
			t.Fatalf("Commit: %v, fired %d times", err, fault.Fired())
		}
		wantFreeLock(t, db)
		wantStats(t, s, 0, 0, 0)
		if effect(t, db, "a") != 0 {
			t.Error("an effect without its receipt")
		}
	})
}

// A full disk may show at any statement; whichever it is, it is an outage and nothing is committed.
func TestDiskFull(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		db.SetMaxOpenConns(1) // max_page_count belongs to the connection
		s := migrated(t, db)
		mustExec(t, db, counters, "CREATE TABLE filler (x BLOB)")
		pages := count(t, db, "PRAGMA page_count")
		count(t, db, "PRAGMA max_page_count = "+itoa(pages+3))
		var failed error
		n := 0
		for ; n < 2000 && failed == nil; n++ {
			failed = func() error {
				tx, err := s.Begin(t.Context(), receipts.TxOptions{})
				if err != nil {
					return err
				}
				defer func() { _ = tx.Rollback(context.Background()) }()
				if _, err := tx.Claim(t.Context(), []receipts.Claim{claim("key " + itoa(n))}); err != nil {
					return err
				}
				if _, err := tx.Raw().Exec(incrementSQL, "a"); err != nil {
					return err
				}
				return tx.Commit(t.Context())
			}()
		}
		if s.Classify(failed) != receipts.ClassOutage {
			t.Fatalf("after %d messages: %v of class %d, want an outage", n, failed, s.Classify(failed))
		}
		if got := effect(t, db, "a"); got != n-1 {
			t.Errorf("the effect is %d after %d commits", got, n-1)
		}
		wantStats(t, s, n-1, 0, 0)
		count(t, db, "PRAGMA max_page_count = 1000000")
		process(t, s, "key "+itoa(n-1))
		wantStats(t, s, n, 0, 0)
	})
}

func TestReadOnlyFile(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		writer := d.open(t, path, "journal_mode=DELETE")
		migrated(t, writer)
		s := storeOn(t, d.open(t, path, "mode=ro", "journal_mode="))
		if _, err := s.Check(t.Context()); s.Classify(err) != receipts.ClassOutage {
			t.Errorf("Check: %v of class %d, want an outage", err, s.Classify(err))
		}
		tx, err := s.Begin(t.Context(), receipts.TxOptions{})
		if err == nil {
			_, err = tx.Claim(t.Context(), []receipts.Claim{claim("a")})
			_ = tx.Rollback(t.Context())
		}
		if s.Classify(err) != receipts.ClassOutage {
			t.Errorf("writing: %v of class %d, want an outage", err, s.Classify(err))
		}
		if err := s.MarkSent(t.Context(), []receipts.OutputRef{{}}, noon); s.Classify(err) != receipts.ClassOutage {
			t.Errorf("MarkSent: %v of class %d, want an outage", err, s.Classify(err))
		}
		if _, err := s.Stats(t.Context()); err != nil {
			t.Errorf("reading a read-only database: %v", err)
		}
	})
}

// A database that is gone and comes back: everything fails as an outage and works again afterwards, also where the pool
// holds the connections that died.
func TestOutage(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		connector, db := d.lossy(t, d.file(t))
		s := migrated(t, db)
		mustExec(t, db, counters)
		_, err := s.Check(t.Context())
		must(t, err)
		open := begin(t, s)
		claimed(t, open, claim("a"))
		fault := connector.Outage(nil)
		if err := open.Commit(t.Context()); err == nil || s.Classify(err) != receipts.ClassOutage {
			t.Errorf("Commit: %v, want an outage", err)
		}
		_, beginErr := s.Begin(t.Context(), receipts.TxOptions{})
		_, resolveErr := s.Resolve(t.Context(), open.Nonce())
		_, statsErr := s.Stats(t.Context())
		for what, err := range map[string]error{
			"Begin": beginErr, "Resolve": resolveErr, "Stats": statsErr,
			"MarkSent": s.MarkSent(t.Context(), []receipts.OutputRef{{}}, noon), "Migrate": s.Migrate(t.Context()),
		} {
			if s.Classify(err) != receipts.ClassOutage {
				t.Errorf("%s: %v of class %d, want an outage", what, err, s.Classify(err))
			}
		}
		if fault.Fired() < 5 {
			t.Errorf("the outage was met %d times only", fault.Fired())
		}
		connector.Back()
		process(t, s, "a")
		wantStats(t, s, 1, 0, 0)
		if committed, err := s.Resolve(t.Context(), open.Nonce()); committed || err != nil {
			t.Errorf("Resolve after the outage: %t, %v; want false", committed, err)
		}
	})
}

// The faults of single statements leave a clean pool and nothing half done.
func TestFailingStatements(t *testing.T) {
	for _, match := range []string{"SAVEPOINT", "INTO penstock_receipts", "INSERT INTO counters", "RELEASE", "penstock_markers"} {
		for name, cause := range map[string]error{"bad connection": nil, "no code": lossydb.ErrNoCode} {
			t.Run(match+", "+name, func(t *testing.T) {
				onEachDriver(t, func(t *testing.T, d sqliteDriver) {
					connector, db := d.lossy(t, d.file(t), "synchronous=OFF")
					s := migrated(t, db)
					mustExec(t, db, counters)
					fault := connector.FailStatement(match, 0, cause)
					err := func() error {
						tx, err := s.Begin(t.Context(), receipts.TxOptions{})
						if err != nil {
							return err
						}
						defer func() { must(t, tx.Rollback(context.Background())) }()
						if _, err := tx.Claim(t.Context(), []receipts.Claim{claim("a")}); err != nil {
							return err
						}
						if _, err := tx.Raw().Exec(incrementSQL, "a"); err != nil {
							return err
						}
						return tx.Commit(t.Context())
					}()
					fault.Stop()
					if err == nil || fault.Fired() == 0 {
						t.Fatalf("error %v after the fault fired %d times", err, fault.Fired())
					}
					if errors.Is(err, receipts.ErrCommitUnknown) {
						t.Errorf("%v, although COMMIT was not sent", err)
					}
					if cause == nil && s.Classify(err) != receipts.ClassOutage {
						t.Errorf("%v has class %d, want an outage", err, s.Classify(err))
					}
					wantFreeLock(t, db)
					wantStats(t, s, 0, 0, 0)
					if effect(t, db, "a") != 0 {
						t.Error("an effect without its receipt")
					}
				})
			})
		}
	}
}

// One dead connection in the pool is not worth an error.
func TestBeginTakesAnotherConnection(t *testing.T) {
	d := modernc()
	connector, db := d.lossy(t, d.file(t), "synchronous=OFF")
	s := migrated(t, db)
	mustExec(t, db, counters)
	fault := connector.FailBegin(2, driver.ErrBadConn)
	process(t, s, "a")
	if fault.Fired() != 2 {
		t.Errorf("the fault fired %d times, want 2", fault.Fired())
	}
	fault = connector.FailBegin(1, lossydb.ErrNoCode)
	if _, err := s.Begin(t.Context(), receipts.TxOptions{}); !errors.Is(err, lossydb.ErrNoCode) || fault.Fired() != 1 {
		t.Errorf("Begin: %v, want the error of the driver, once", err)
	}
}

// Resolve must not answer while an old session may still be inside its COMMIT.
func TestResolveWaitsForTheWriter(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		db := d.open(t, path)
		s := migrated(t, db)
		tx := begin(t, s)
		claimed(t, tx, claim("a"))
		other := storeOn(t, d.open(t, path, "busy_timeout=10"))
		ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
		defer cancel()
		if committed, err := other.Resolve(ctx, tx.Nonce()); err == nil {
			t.Fatalf("Resolve answered %t while the writer was open", committed)
		}
		answer := make(chan bool, 1)
		go func() {
			committed, err := other.Resolve(context.Background(), tx.Nonce())
			answer <- committed && err == nil
		}()
		must(t, tx.Commit(t.Context()))
		if !<-answer {
			t.Error("Resolve did not see the commit it waited for")
		}
	})
}
