package receipts

import (
	"database/sql"
	"database/sql/driver"
	"reflect"
	"sync"
	"sync/atomic"
)

// commitHook answers SQLite's commit hook on one connection: while a transaction of the store is open there, it turns every
// COMMIT that the store did not ask for into a rollback. SQLite asks before anything is durable, also about a statement
// outside any transaction. Source: https://www.sqlite.org/c3ref/commit_hook.html
type commitHook struct {
	armed  atomic.Bool
	vetoed atomic.Bool
	asked  atomic.Bool
	// set puts it on its connection, remove takes it away; nil where it stays.
	set, remove func()
}

// veto is called by SQLite, on the goroutine that commits and with the connection locked.
func (h *commitHook) veto() bool {
	h.asked.Store(true)
	if !h.armed.Load() {
		return false
	}
	h.vetoed.Store(true)
	return true
}

// commitHooks remembers the hook of each connection; nil: its driver has no way to set one. To find the way takes longer than to
// set it, and some drivers keep every hook that they were ever given until the connection is closed: there it stays, and lets
// everything pass between the store's transactions.
type commitHooks struct {
	mu sync.Mutex
	on map[any]*commitHook
}

// arm sets the hook on a connection, until disarm; nil where its driver has none that can be reached.
func (s *SQLite) arm(conn *sql.Conn) (h *commitHook) {
	if s.leaveHook {
		return nil
	}
	_ = conn.Raw(func(driverConn any) error {
		if h = s.hooks.of(driverConn, s.db); h != nil && h.set != nil {
			h.set()
		}
		return nil
	})
	if h != nil {
		h.asked.Store(false)
		h.vetoed.Store(false)
		h.armed.Store(true)
	}
	return h
}

// of gives the hook of a connection. Those of connections that were closed are forgotten from time to time, together with the
// others, which then get a new one.
func (c *commitHooks) of(driverConn any, db *sql.DB) *commitHook {
	c.mu.Lock()
	defer c.mu.Unlock()
	if reflect.TypeOf(driverConn).Kind() != reflect.Pointer { // it may be no key, and then only what is inside is the same again
		d := findHookSetter(driverConn)
		if !d.lasting {
			return newCommitHook(d)
		}
		driverConn = d.conn
	}
	if h, known := c.on[driverConn]; known {
		return h
	}
	if c.on == nil || len(c.on) > 8+2*db.Stats().OpenConnections {
		c.on = map[any]*commitHook{}
	}
	h := newCommitHook(findHookSetter(driverConn))
	c.on[driverConn] = h
	return h
}

// newCommitHook makes a hook, and sets it where it is to stay.
func newCommitHook(d hookSetter) *commitHook {
	if d.set == nil {
		return nil
	}
	h := &commitHook{}
	if d.lasting {
		d.set(h.veto)
		return h
	}
	h.set, h.remove = func() { d.set(h.veto) }, func() { d.set(nil) }
	return h
}

// forget makes the next transaction set a hook again, because somebody else set another one over it.
func (c *commitHooks) forget(h *commitHook) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn, on := range c.on {
		if on == h {
			delete(c.on, conn)
		}
	}
}

// let lets commits pass from here on. Like all that follow it is safe on nil.
func (h *commitHook) let() {
	if h != nil {
		h.armed.Store(false)
	}
}

// refused tells whether a commit was turned into a rollback.
func (h *commitHook) refused() bool { return h != nil && h.vetoed.Load() }

// missed tells whether something was committed and SQLite did not ask.
func (h *commitHook) missed() bool { return h != nil && !h.asked.Load() }

// disarm ends what arm began, once nobody can use the transaction any more.
func (h *commitHook) disarm(conn *sql.Conn) {
	h.let()
	if h != nil && h.remove != nil {
		_ = conn.Raw(func(any) error { h.remove(); return nil }) // a closed connection has no hook any more
	}
}

// hookSetter is a driver's way to set the commit hook of one of its connections.
type hookSetter struct {
	// set sets the hook, or removes it where it is nil. nil: there is no way.
	set func(veto func() bool)
	// lasting: each function that was ever set stays in memory until conn is closed.
	lasting bool
	conn    any
}

// findHookSetter finds the way without importing any driver, also behind wrappers that give their inner connection.
func findHookSetter(conn any) hookSetter {
	const wrappers = 4
	for range wrappers {
		switch c := conn.(type) {
		case nil:
			return hookSetter{}
		case interface{ RegisterCommitHook(f func() int) }: // github.com/mattn/go-sqlite3
			if !reflect.TypeOf(c).Comparable() {
				return hookSetter{}
			}
			return hookSetter{conn: c, lasting: true, set: func(veto func() bool) {
				if veto == nil {
					c.RegisterCommitHook(nil)
					return
				}
				c.RegisterCommitHook(func() int { return boolInt(veto()) })
			}}
		case interface{ CommitHook(f func() bool) }: // github.com/ncruces/go-sqlite3, where true lets it pass
			return hookSetter{conn: c, set: func(veto func() bool) {
				if veto == nil {
					c.CommitHook(nil)
					return
				}
				c.CommitHook(func() bool { return !veto() })
			}}
		}
		if set := hookSetterByShape(conn); set != nil {
			return hookSetter{conn: conn, set: set}
		}
		wrapper, ok := conn.(interface{ Raw() driver.Conn }) // as tracing wrappers have it, otelsql for one
		if !ok {
			return hookSetter{}
		}
		conn = wrapper.Raw()
	}
	return hookSetter{}
}

// hookSetterByShape knows modernc.org/sqlite, whose method takes a named type: RegisterCommitHook(f func() int32).
func hookSetterByShape(conn any) func(veto func() bool) {
	method := reflect.ValueOf(conn).MethodByName("RegisterCommitHook")
	if !method.IsValid() || method.Type().NumIn() != 1 || method.Type().NumOut() != 0 {
		return nil
	}
	f := method.Type().In(0)
	if !reflect.TypeFor[func() int32]().ConvertibleTo(f) {
		return nil
	}
	return func(veto func() bool) {
		if veto == nil {
			method.Call([]reflect.Value{reflect.Zero(f)})
			return
		}
		method.Call([]reflect.Value{reflect.ValueOf(func() int32 {
			return int32(boolInt(veto())) //nolint:gosec // 0 or 1
		}).Convert(f)})
	}
}
