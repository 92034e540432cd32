package receipts_test

import (
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// setHook sets a hook of the application on the only connection of a handle, the way the application would.
func setHook(t *testing.T, db *sql.DB, hook func() bool) {
	t.Helper()
	db.SetMaxOpenConns(1)
	conn, err := db.Conn(t.Context())
	must(t, err)
	must(t, conn.Raw(func(driverConn any) error {
		set, _ := receipts.FindHook(driverConn)
		set(hook)
		return nil
	}))
	must(t, conn.Close())
}

// A handler that commits is told so: its own Commit fails, for a reason of its own class, and nothing can be done with the
// transaction any more.
func TestHandlersCommitFails(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := checked(t, db)
		for name, commit := range map[string]func(tx *sql.Tx) error{
			"Commit": (*sql.Tx).Commit,
			"text":   func(tx *sql.Tx) error { _, err := tx.Exec("COMMIT"); return err },
		} {
			tx := begin(t, s)
			claimed(t, tx, claim("a"))
			increment(t, tx, "a")
			err := commit(tx.Raw())
			if err == nil || s.Classify(fmt.Errorf("the handler: %w", err)) != receipts.ClassEnded {
				t.Errorf("%s: %v of class %d, want an error of class ended", name, err, s.Classify(err))
			}
			left, newErr := receipts.NewSQLite(db, receipts.SQLiteOptions{LeaveCommitHook: true})
			must(t, newErr)
			if left.Classify(err) != receipts.ClassOther {
				t.Errorf("%s: %v of a hook that is not the store's has class %d, want other", name, err, left.Classify(err))
			}
			if _, err := tx.Raw().Exec(incrementSQL, "a"); err == nil {
				t.Errorf("%s: a statement after the end succeeded", name)
			}
			if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
				t.Errorf("%s: then the store's Commit: %v, want ErrTxEnded", name, err)
			}
		}
	})
}

// The hook concerns the store's own open transaction, and nothing else: neither what uses its connection afterwards, however
// it ended, nor what other connections commit meanwhile.
func TestHookIsForTheTransactionOnly(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := checked(t, db)
		ends := map[string]func(tx receipts.Tx[*sql.Tx]){
			"Commit":   func(tx receipts.Tx[*sql.Tx]) { must(t, tx.Commit(t.Context())) },
			"Rollback": func(tx receipts.Tx[*sql.Tx]) { must(t, tx.Rollback(t.Context())) },
			"refused": func(tx receipts.Tx[*sql.Tx]) {
				_ = tx.Raw().Commit()
				must(t, tx.Rollback(t.Context()))
			},
			"ended by the handler": func(tx receipts.Tx[*sql.Tx]) {
				must(t, tx.Raw().Rollback())
				_ = tx.Commit(t.Context())
			},
			"budget": func(tx receipts.Tx[*sql.Tx]) {
				waitFor(t, "the budget to end", func() bool { return db.Stats().InUse == 0 })
			},
		}
		for name, end := range ends {
			t.Run(name, func(t *testing.T) {
				db.SetMaxOpenConns(1)
				tx := begin(t, s, 200*time.Millisecond)
				claimed(t, tx, claim(name))
				increment(t, tx, "handler")
				end(tx)
				mustExec(t, db, "INSERT INTO counters VALUES ('application "+name+"', 1)")
				process(t, s, "next of "+name)
				other, err := db.Begin()
				must(t, err)
				_, err = other.Exec("UPDATE counters SET value = 2 WHERE name = ?", "application "+name)
				must(t, err)
				must(t, other.Commit())
				if got := effect(t, db, "application "+name); got != 2 {
					t.Errorf("what the application wrote is %d, want 2", got)
				}
			})
		}
		t.Run("meanwhile", func(t *testing.T) {
			db.SetMaxOpenConns(3)
			tx := begin(t, s)
			claimed(t, tx, claim("open"))
			conn, err := db.Conn(t.Context())
			must(t, err)
			for _, q := range []string{"CREATE TEMP TABLE mine (x)", "INSERT INTO mine VALUES (1)"} { // needs no lock of the file
				if _, err := conn.ExecContext(t.Context(), q); err != nil {
					t.Errorf("%s, while a transaction of the store is open on another connection: %v", q, err)
				}
			}
			must(t, conn.Close())
			must(t, tx.Commit(t.Context()))
		})
	})
}

// A leftover of a handler, a goroutine that uses the transaction between two parts say, cannot commit either.
func TestHookBetweenParts(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, statements := range map[string][]string{
			"COMMIT":                  {"COMMIT"},
			"COMMIT, BEGIN":           {"COMMIT", "BEGIN"},
			"ROLLBACK and autocommit": {"ROLLBACK", "UPDATE counters SET value = 100 WHERE name = 'taken'"},
		} {
			for _, then := range []string{"Part", "Unclaim", "AddOutputs", "Commit"} {
				t.Run(name+", "+then, func(t *testing.T) {
					db := d.open(t, d.file(t), "synchronous=OFF")
					s := checked(t, db)
					tx := begin(t, s)
					claimed(t, tx, claim("a"), claim("b"))
					raw := tx.Raw()
					must(t, tx.Part(t.Context()))
					increment(t, tx, "a")
					must(t, tx.Keep(t.Context()))
					for _, q := range statements {
						_, _ = raw.Exec(q)
					}
					var err error
					switch then {
					case "Part":
						if err = tx.Part(t.Context()); err == nil {
							err = tx.Keep(t.Context())
						}
					case "Unclaim":
						err = tx.Unclaim(t.Context(), []receipts.Claim{claim("b")})
					case "AddOutputs":
						_, err = tx.AddOutputs(t.Context(), output("a"))
					}
					if then != "Commit" && !errors.Is(err, receipts.ErrTxEnded) {
						t.Errorf("%s: %v, want ErrTxEnded", then, err)
					}
					if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
						t.Errorf("Commit: %v, want ErrTxEnded", err)
					}
					wantStats(t, s, 0, 0, 0)
					if a, taken := effect(t, db, "a"), effect(t, db, "taken"); a+taken != 0 {
						t.Errorf("effects %d and %d, want none", a, taken)
					}
					wantFreeLock(t, db)
				})
			}
		}
	})
}

func TestLeaveCommitHook(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		must(t, storeOn(t, db).Migrate(t.Context()))
		mustExec(t, db, counters)
		calls := 0
		setHook(t, db, func() bool { calls++; return false })
		s, err := receipts.NewSQLite(db, receipts.SQLiteOptions{LeaveCommitHook: true})
		must(t, err)
		info, err := s.Check(t.Context())
		must(t, err)
		if len(info.Warnings) != 1 || !strings.Contains(info.Warnings[0], "LeaveCommitHook") {
			t.Errorf("warnings %q, want one that names LeaveCommitHook", info.Warnings)
		}
		calls = 0
		process(t, s, "a")
		mustExec(t, db, "INSERT INTO counters VALUES ('b', 1)")
		if calls != 2 {
			t.Errorf("the application's hook was called %d times for 2 commits", calls)
		}
	})
}

// An application that sets a hook of its own after the store did: the next transaction of the store sets its own again, at
// the latest the one after that.
func TestHookIsSetAgain(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		db.SetMaxOpenConns(1)
		s := checked(t, db)
		process(t, s, "first")
		calls := 0
		setHook(t, db, func() bool { calls++; return false })
		process(t, s, "second")
		process(t, s, "third")
		calls = 0
		tx := begin(t, s)
		claimed(t, tx, claim("a"))
		increment(t, tx, "a")
		if err := tx.Raw().Commit(); err == nil {
			t.Error("a handler's Commit succeeded although the store had two transactions to set its hook")
		}
		must(t, tx.Rollback(t.Context()))
		wantStats(t, s, 3, 0, 0)
		if calls != 0 {
			t.Errorf("the application's hook was called %d times", calls)
		}
	})
}

// The shapes of the drivers' connections.
type (
	mattnConn   struct{ hooks []func() int }
	ncrucesConn struct{ hook func() bool }
	namedHook   func() int32
	moderncConn struct{ hook namedHook }
	plainConn   struct{}
	oddConn     struct{}
	wrappedConn struct {
		driver.Conn
		inner driver.Conn
	}
	valueConn struct{ hooks []func() int }
)

func (c *mattnConn) RegisterCommitHook(f func() int)     { c.hooks = append(c.hooks, f) }
func (c valueConn) RegisterCommitHook(func() int)        {}
func (c *ncrucesConn) CommitHook(f func() (ok bool))     { c.hook = f }
func (c *moderncConn) RegisterCommitHook(f namedHook)    { c.hook = f }
func (c *oddConn) RegisterCommitHook(string) error       { return nil }
func (c *wrappedConn) Raw() driver.Conn                  { return c.inner }
func (c *plainConn) Prepare(string) (driver.Stmt, error) { return nil, driver.ErrSkip }
func (c *plainConn) Close() error                        { return nil }
func (c *plainConn) Begin() (driver.Tx, error)           { return nil, driver.ErrSkip }

func TestFindHook(t *testing.T) {
	for name, veto := range map[string]bool{"veto": true, "pass": false} {
		t.Run(name, func(t *testing.T) {
			hook := func() bool { return veto }
			m := &mattnConn{}
			set, lasting := receipts.FindHook(m)
			set(hook)
			if !lasting || len(m.hooks) != 1 || (m.hooks[0]() != 0) != veto {
				t.Errorf("func() int: lasting %t, %d hooks", lasting, len(m.hooks))
			}
			if set(nil); len(m.hooks) != 2 || m.hooks[1] != nil {
				t.Error("func() int: nil does not remove the hook")
			}
			n := &ncrucesConn{}
			set, lasting = receipts.FindHook(n)
			if set(hook); lasting || n.hook() == veto { // true means: go on
				t.Errorf("func() bool: lasting %t", lasting)
			}
			if set(nil); n.hook != nil {
				t.Error("func() bool: nil does not remove the hook")
			}
			c := &moderncConn{}
			set, lasting = receipts.FindHook(c)
			if set(hook); lasting || (c.hook() != 0) != veto {
				t.Errorf("func() int32: lasting %t", lasting)
			}
			if set(nil); c.hook != nil {
				t.Error("func() int32: nil does not remove the hook")
			}
		})
	}
	loop := &wrappedConn{}
	loop.inner = loop
	for name, conn := range map[string]any{
		"nil": nil, "none": &plainConn{}, "another method of that name": &oddConn{}, "a wrapper around nothing": &wrappedConn{},
		"a wrapper around one without": &wrappedConn{inner: &plainConn{}}, "a wrapper around itself": loop,
		"one that is no key": valueConn{hooks: []func() int{nil}},
	} {
		if set, _ := receipts.FindHook(conn); set != nil {
			t.Errorf("%s: a way to set a hook was found", name)
		}
	}
}

// A driver that keeps every hook gets one for each connection, and connections that were closed are not kept in memory.
func TestLastingHooksAreFew(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := checked(t, db)
		for i := range 100 {
			process(t, s, itoa(i))
			if i%2 == 0 {
				db.SetMaxIdleConns(-1) // closes the connection
				db.SetMaxIdleConns(2)
			}
		}
		if n := s.LastingHooks(); n > 12 {
			t.Errorf("%d hooks are remembered for %d connections", n, db.Stats().OpenConnections)
		}
		tx := begin(t, s)
		claimed(t, tx, claim("a"))
		if err := tx.Raw().Commit(); err == nil {
			t.Error("the hook is gone")
		}
	})
}
