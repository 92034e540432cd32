package receipts

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"time"
)

const defaultPrefix = "penstock_"

// sqlHandle is a store's handle of a database, with what is the same in every dialect. A dialect's store embeds it.
type sqlHandle struct {
	db *sql.DB
	// open, where it is set, makes a handle for one call, and what closes it; there is no db then.
	open   func() (db *sql.DB, done func() error)
	prefix string
	lists  listQueries
	schema schemaQueries
	// remote: a server may not answer, and not every client hears of a context then.
	remote bool
	// classify is the store's own Classify.
	classify func(error) Class
	// budgets are those of its open transactions.
	budgets *budgets
}

// named writes the store's prefix into a statement that names tables by the default one.
func named(prefix, query string) string { return strings.ReplaceAll(query, defaultPrefix, prefix) }

// tablePrefix validates a table prefix, which is pasted into SQL text.
func tablePrefix(prefix string) (string, error) {
	if prefix == "" {
		return defaultPrefix, nil
	}
	valid := regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,47}$`)
	if !valid.MatchString(prefix) {
		return "", fmt.Errorf("receipts: table prefix %q: use 1 to 48 letters, digits and underscores, not starting with a digit",
			prefix)
	}
	return prefix, nil
}

// borrow takes a connection for one call of the store. giveBack is called once, after the last use.
func (h *sqlHandle) borrow(ctx context.Context) (conn *sql.Conn, giveBack func(), err error) {
	if h.open == nil {
		if conn, err = h.conn(ctx); err != nil {
			return nil, nil, err
		}
		return conn, func() { _ = conn.Close() }, nil
	}
	db, done := h.open()
	own := sqlHandle{db: db, classify: h.classify}
	if conn, err = own.conn(ctx); err != nil {
		_ = done()
		return nil, nil, err
	}
	return conn, func() { _ = conn.Close(); _ = done() }, nil
}

// conn takes a connection out of the pool. A deadline that passes meanwhile means that the pool is exhausted, or that the
// database cannot be opened: an outage, which the context's error alone would not tell. So is whatever else keeps a connection
// from being opened: clients have errors without a code for that.
func (h *sqlHandle) conn(ctx context.Context) (*sql.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	conn, err := h.db.Conn(ctx)
	switch {
	case err == nil:
		return conn, nil
	case errors.Is(err, context.DeadlineExceeded):
		return nil, &classedError{class: ClassOutage, what: "waiting for a free connection of the pool", err: err}
	case ctx.Err() == nil && h.classify(err) == ClassOther:
		return nil, &classedError{class: ClassOutage, what: "opening a connection", err: err}
	default:
		return nil, err
	}
}

// deadConnections is how often a call takes another connection when the pool handed out a dead one, and as often again as
// connections are idle then: after a restart of the server all of them are dead. database/sql does the same for statements
// outside a transaction, but not for those on a connection that was taken out of the pool.
const deadConnections = 3

func (h *sqlHandle) again(f func() error) error {
	most := deadConnections
	for attempt := 1; ; attempt++ {
		err := f()
		if !errors.Is(err, driver.ErrBadConn) {
			return err
		}
		if attempt == 1 && h.db != nil {
			most += h.db.Stats().Idle
		}
		if attempt >= most {
			return err
		}
	}
}

// storeError is the error of a statement of the store itself, so that what the network says in it is about the database.
type storeError struct{ err error }

func (e *storeError) Error() string { return e.err.Error() }

func (e *storeError) Unwrap() error { return e.err }

// ofStore marks an error of the store's own statement.
func ofStore(err error) error {
	if err == nil {
		return nil
	}
	return &storeError{err}
}

// read runs f, which only reads, with a connection of its own. f may run more than once.
func (h *sqlHandle) read(ctx context.Context, f func(conn *sql.Conn) error) error {
	return h.again(func() error {
		return ofStore(h.attend(ctx, 0, func() error {
			conn, giveBack, err := h.borrow(ctx)
			if err != nil {
				return err
			}
			defer giveBack()
			return f(conn)
		}))
	})
}

// insist calls f again while another connection holds a lock, until ctx ends. Then the lock is what it reports, not the
// context alone.
func (h *sqlHandle) insist(ctx context.Context, f func() error) error {
	var contention error
	for {
		err := f()
		if err != nil && ctx.Err() != nil && contention != nil {
			return fmt.Errorf("%w: %w", ctx.Err(), contention)
		}
		if err == nil || h.classify(err) != ClassContention || ctx.Err() != nil {
			return err
		}
		contention = err
		timer := time.NewTimer(5*time.Millisecond + rand.N(20*time.Millisecond))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

// await runs begin, which may block in the driver and hear nothing of a context (SQLite's busy_timeout; a server that does not
// answer), and returns by ctx all the same, with the context's own error. Unless it returns nil, abandon is called exactly once, after begin returned. The context
// that begin gets lives until stop is called: database/sql rolls a transaction back when its context ends.
func await(ctx context.Context, begin func(ctx context.Context) error, abandon func()) (stop func(), err error) {
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	if ctx.Done() == nil {
		if err := begin(inner); err != nil {
			cancel()
			abandon()
			return nil, err
		}
		return cancel, nil
	}
	result := make(chan error, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		result <- begin(inner)
	}()
	select {
	case err := <-result:
		if err != nil {
			cancel()
			abandon()
			return nil, err
		}
		return cancel, nil
	case <-ctx.Done():
		cancel() // a driver that listens gives up at once, the others when begin has returned
		go func() {
			<-ended
			abandon()
		}()
		return nil, ctx.Err()
	}
}

// clientGrace is how long a client may take to hear that a context has ended.
const clientGrace = 500 * time.Millisecond

// attend runs f, which sends statements with ctx, and returns by ctx, some time later than that (late, and a grace), even where
// the client is deaf to it, as lib/pq is while the server does not answer. f then goes on until its connection breaks.
func (h *sqlHandle) attend(ctx context.Context, late time.Duration, f func() error) error {
	if !h.remote || ctx.Done() == nil {
		return f()
	}
	answer := make(chan error, 1)
	go func() { answer <- f() }()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
	}
	timer := time.NewTimer(late + clientGrace)
	defer timer.Stop()
	select {
	case err := <-answer:
		return err
	case <-timer.C:
		return &classedError{class: ClassOutage, what: "waiting for the server's answer", err: ctx.Err()}
	}
}

// discard closes a connection for good instead of giving it back to the pool.
func discard(conn *sql.Conn) {
	_ = conn.Raw(func(any) error { return driver.ErrBadConn })
}
