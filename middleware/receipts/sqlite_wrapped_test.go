package receipts_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/contracttest/lossydb"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

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
