package receipts_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest/lossydb"
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

// A handler that commits is told so: its own Commit fails, for a reason that is neither contention nor an outage, and nothing
// can be done with the transaction any more.
func TestHandlersCommitFails(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		s := checked(t, d.open(t, d.file(t), "synchronous=OFF"))
		for name, commit := range map[string]func(tx *sql.Tx) error{
			"Commit": (*sql.Tx).Commit,
			"text":   func(tx *sql.Tx) error { _, err := tx.Exec("COMMIT"); return err },
		} {
			tx := begin(t, s)
			claimed(t, tx, claim("a"))
			increment(t, tx, "a")
			if err := commit(tx.Raw()); err == nil || s.Classify(err) != receipts.ClassOther {
				t.Errorf("%s: %v of class %d, want an error of class other", name, err, s.Classify(err))
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

// fullConn is what database/sql uses of a connection, and nothing that is beyond it.
type fullConn interface {
	driver.Conn
	driver.ConnPrepareContext
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.NamedValueChecker
}

// wrapping puts a wrapper around the connections of another connector.
type wrapping struct {
	driver.Connector
	wrap func(fullConn) driver.Conn
}

func (w wrapping) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := w.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return w.wrap(conn.(fullConn)), nil
}

type (
	opaqueConn  struct{ fullConn }
	tracingConn struct{ fullConn }
	deafConn    struct{ fullConn }
)

func (c *tracingConn) Raw() driver.Conn                  { return c.fullConn }
func (c *deafConn) RegisterCommitHook(func() (veto int)) {}

// Behind a wrapper that hides the driver's connection there is no hook: Check says so, and what handlers do is found as ever.
func TestHookBehindWrappers(t *testing.T) {
	wrappers := map[string]struct {
		wrap     func(fullConn) driver.Conn
		prevents bool
	}{
		"opaque":            {func(c fullConn) driver.Conn { return &opaqueConn{c} }, false},
		"gives its inner":   {func(c fullConn) driver.Conn { return &tracingConn{c} }, true},
		"a hook never asks": {func(c fullConn) driver.Conn { return &deafConn{c} }, false},
	}
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, w := range wrappers {
			t.Run(name, func(t *testing.T) {
				inner, err := lossydb.Wrap(d.name, d.dsn(d.file(t), settings()))
				must(t, err)
				db := sql.OpenDB(wrapping{Connector: inner, wrap: w.wrap})
				t.Cleanup(func() { must(t, db.Close()) })
				s := migrated(t, db)
				mustExec(t, db, counters)
				info, err := s.Check(t.Context())
				must(t, err)
				warned := len(info.Warnings) == 1 && strings.Contains(info.Warnings[0], "commit hook")
				if warned == w.prevents {
					t.Errorf("warnings %q", info.Warnings)
				}
				tx := begin(t, s)
				claimed(t, tx, claim("a"))
				increment(t, tx, "a")
				_ = tx.Raw().Commit()
				if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
					t.Errorf("Commit: %v, want ErrTxEnded", err)
				}
				if committed := effect(t, db, "a") == 1; committed == w.prevents {
					t.Errorf("the handler's commit took effect: %t", committed)
				}
			})
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

// lastingConn has a hook as mattn has it, goingConn one as ncruces has it, both over the one of the connection inside.
type (
	lastingConn struct {
		fullConn
		set, removed *int
	}
	goingConn lastingConn
)

func (c *lastingConn) RegisterCommitHook(f func() int) {
	set, _ := receipts.FindHook(c.fullConn)
	if f == nil {
		*c.removed++
		set(nil)
		return
	}
	*c.set++
	set(func() bool { return f() != 0 })
}

func (c *goingConn) CommitHook(f func() bool) {
	var hook func() int
	if f != nil {
		hook = func() int {
			if f() {
				return 0
			}
			return 1
		}
	}
	(*lastingConn)(c).RegisterCommitHook(hook)
}

// A hook is taken away with the end of its transaction, unless its driver would keep it in memory all the same.
func TestHooksAreTakenAway(t *testing.T) {
	var set, removed int
	wrappers := map[string]struct {
		wrap func(fullConn) driver.Conn
		want func(transactions int) (set, removed int)
	}{
		"lasting": {
			func(c fullConn) driver.Conn { return &lastingConn{c, &set, &removed} }, func(int) (int, int) { return 1, 0 },
		},
		"going": {
			func(c fullConn) driver.Conn { return &goingConn{c, &set, &removed} }, func(n int) (int, int) { return n, n },
		},
	}
	d := modernc()
	for name, w := range wrappers {
		t.Run(name, func(t *testing.T) {
			set, removed = 0, 0
			inner, err := lossydb.Wrap(d.name, d.dsn(d.file(t), settings("synchronous=OFF")))
			must(t, err)
			db := sql.OpenDB(wrapping{Connector: inner, wrap: w.wrap})
			db.SetMaxOpenConns(1)
			t.Cleanup(func() { must(t, db.Close()) })
			s := checked(t, db) // one transaction
			for i := range 10 {
				process(t, s, itoa(i))
				process(t, s, itoa(i)) // a replay writes nothing, so that SQLite may not ask
				must(t, begin(t, s).Rollback(t.Context()))
			}
			wantSet, wantRemoved := w.want(31)
			if set != wantSet || removed != wantRemoved {
				t.Errorf("the hook was set %d times and removed %d times, want %d and %d", set, removed, wantSet, wantRemoved)
			}
			tx := begin(t, s)
			claimed(t, tx, claim("a"))
			if err := tx.Raw().Commit(); err == nil {
				t.Error("a handler's Commit succeeded")
			}
		})
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

const killedEnv = "PENSTOCK_KILLED_IN_HANDLER"

// A process that dies right after its handler executed COMMIT: nothing of the batch is durable, or, without the hook, all of
// it is torn, so that nothing is taken for handled.
func TestKilledAfterHandlersCommit(t *testing.T) {
	if spec := os.Getenv(killedEnv); spec != "" {
		dieAfterCommit(t, strings.Split(spec, ","))
	}
	for mode, torn := range map[string]int{"prevented": 0, "found": 3} {
		t.Run(mode, func(t *testing.T) {
			onEachDriver(t, func(t *testing.T, d sqliteDriver) {
				path := d.file(t)
				db := d.open(t, path)
				s := checked(t, db)
				child := exec.Command(os.Args[0], "-test.run=^TestKilledAfterHandlersCommit$") //nolint:gosec // this very binary
				child.Env = append(os.Environ(), killedEnv+"="+strings.Join([]string{d.name, path, mode}, ","))
				out, err := child.CombinedOutput()
				if err == nil || strings.Contains(string(out), "FAIL") || !strings.Contains(string(out), "committed") {
					t.Fatalf("the child did not die in its handler: %v\n%s", err, out)
				}
				wantStats(t, s, 0, 0, torn)
				if got := effect(t, db, "a"); got != torn/3 {
					t.Errorf("the effect is %d, want %d", got, torn/3)
				}
				tx := begin(t, s)
				for i, r := range claimed(t, tx, claim("a"), claim("b"), claim("c")) {
					if torn := r.Status == receipts.ClaimTorn; torn != (mode == "found") {
						t.Errorf("claim %d of the redelivery has status %d", i, r.Status)
					}
				}
			})
		})
	}
}

func dieAfterCommit(t *testing.T, spec []string) {
	name, path, mode := spec[0], spec[1], spec[2]
	d := modernc()
	if name != d.name {
		d = mattn()
	}
	s, err := receipts.NewSQLite(d.open(t, path), receipts.SQLiteOptions{LeaveCommitHook: mode == "found"})
	must(t, err)
	tx, err := s.Begin(t.Context(), receipts.TxOptions{})
	must(t, err)
	claimed(t, tx, claim("a"), claim("b"), claim("c"))
	must(t, tx.Part(t.Context()))
	increment(t, tx, "a")
	_, _ = tx.Raw().Exec("COMMIT")
	_, _ = os.Stdout.WriteString("committed\n")
	self, err := os.FindProcess(os.Getpid())
	must(t, err)
	must(t, self.Kill())
	select {}
}
