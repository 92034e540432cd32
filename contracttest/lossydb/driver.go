package lossydb

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"sync"
	"sync/atomic"
)

// Connector is a driver.Connector over another one, with a script of faults. It is safe for concurrent use; faults may be
// added and stopped at any time.
type Connector struct {
	inner driver.Connector

	mu     sync.Mutex
	faults []*Fault
	delays []*Fault
	outage *Fault
}

var _ driver.Connector = (*Connector)(nil)

// New wraps a connector. It has no faults until they are scripted.
func New(inner driver.Connector) *Connector { return &Connector{inner: inner} }

// Wrap wraps the driver that is registered with database/sql under a name, opening dsn. It does not connect.
func Wrap(name, dsn string) (*Connector, error) {
	db, err := sql.Open(name, dsn)
	if err != nil {
		return nil, fmt.Errorf("lossydb: driver %q: %w", name, err)
	}
	d := db.Driver()
	_ = db.Close() // it has opened nothing
	if dc, ok := d.(driver.DriverContext); ok {
		inner, err := dc.OpenConnector(dsn)
		if err != nil {
			return nil, fmt.Errorf("lossydb: driver %q: %w", name, err)
		}
		return New(inner), nil
	}
	return New(dsnConnector{driver: d, dsn: dsn}), nil
}

// DB opens a handle over the connector, which the caller closes.
func (c *Connector) DB() *sql.DB { return sql.OpenDB(c) }

// Connect opens a connection of the inner driver.
func (c *Connector) Connect(ctx context.Context) (driver.Conn, error) {
	if f, err := c.meet(ctx, OpConnect, ""); f != nil || err != nil {
		return nil, failure(f, err)
	}
	inner, err := c.inner.Connect(ctx)
	if err != nil {
		return nil, err
	}
	wrapped := &conn{c: c, inner: inner}
	// database/sql keeps a connection after a cancelled transaction only where it can do both, so a wrapper that always
	// could would change what it does with the inner driver.
	resetter, canReset := inner.(driver.SessionResetter)
	validator, canValidate := inner.(driver.Validator)
	if canReset && canValidate {
		return &sessionConn{conn: wrapped, resetter: resetter, validator: validator}, nil
	}
	return wrapped, nil
}

// Driver gives the inner driver.
func (c *Connector) Driver() driver.Driver { return c.inner.Driver() }

type dsnConnector struct {
	driver driver.Driver
	dsn    string
}

func (d dsnConnector) Connect(context.Context) (driver.Conn, error) { return d.driver.Open(d.dsn) }
func (d dsnConnector) Driver() driver.Driver                        { return d.driver }

// failure gives what the caller of a faulty operation sees.
func failure(f *Fault, err error) error {
	if err != nil {
		return err
	}
	return f.err
}

type conn struct {
	c     *Connector
	inner driver.Conn
	dead  atomic.Bool
}

var (
	_ driver.ConnPrepareContext = (*conn)(nil)
	_ driver.ConnBeginTx        = (*conn)(nil)
	_ driver.ExecerContext      = (*conn)(nil)
	_ driver.QueryerContext     = (*conn)(nil)
	_ driver.NamedValueChecker  = (*conn)(nil)
	_ driver.Pinger             = (*conn)(nil)
	_ driver.SessionResetter    = (*sessionConn)(nil)
	_ driver.Validator          = (*sessionConn)(nil)
)

// meet is the connector's, for a connection that may be dead or may be killed.
func (n *conn) meet(ctx context.Context, op Op, query string) error {
	if n.dead.Load() {
		return driver.ErrBadConn
	}
	f, err := n.c.meet(ctx, op, query)
	if f == nil {
		return err
	}
	if f.kill {
		n.dead.Store(true)
	}
	return f.err
}

func (n *conn) Close() error { return n.inner.Close() }

// Raw gives the inner connection, as tracing wrappers do: what a driver can do beyond database/sql is reached that way.
func (n *conn) Raw() driver.Conn { return n.inner }

// Prepare is never called: there is PrepareContext.
func (n *conn) Prepare(query string) (driver.Stmt, error) {
	return n.PrepareContext(context.Background(), query)
}

func (n *conn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	if n.dead.Load() {
		return nil, driver.ErrBadConn
	}
	var inner driver.Stmt
	var err error
	if p, ok := n.inner.(driver.ConnPrepareContext); ok {
		inner, err = p.PrepareContext(ctx, query)
	} else {
		inner, err = n.inner.Prepare(query)
	}
	if err != nil {
		return nil, err
	}
	return &stmt{conn: n, inner: inner, query: query}, nil
}

func (n *conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	e, ok := n.inner.(driver.ExecerContext)
	if !ok {
		return nil, driver.ErrSkip
	}
	if err := n.meet(ctx, OpStatement, query); err != nil {
		return nil, err
	}
	return e.ExecContext(ctx, query, args)
}

func (n *conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	q, ok := n.inner.(driver.QueryerContext)
	if !ok {
		return nil, driver.ErrSkip
	}
	if err := n.meet(ctx, OpStatement, query); err != nil {
		return nil, err
	}
	return q.QueryContext(ctx, query, args)
}

func (n *conn) CheckNamedValue(v *driver.NamedValue) error {
	if c, ok := n.inner.(driver.NamedValueChecker); ok {
		return c.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

func (n *conn) Ping(ctx context.Context) error {
	if n.dead.Load() {
		return driver.ErrBadConn
	}
	if p, ok := n.inner.(driver.Pinger); ok {
		return p.Ping(ctx)
	}
	return nil
}

// Begin is never called: there is BeginTx.
func (n *conn) Begin() (driver.Tx, error) { return n.BeginTx(context.Background(), driver.TxOptions{}) }

func (n *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if err := n.meet(ctx, OpBegin, ""); err != nil {
		return nil, err
	}
	var inner driver.Tx
	var err error
	if b, ok := n.inner.(driver.ConnBeginTx); ok {
		inner, err = b.BeginTx(ctx, opts)
	} else {
		inner, err = n.inner.Begin() //nolint:staticcheck // all that such a driver has
	}
	if err != nil {
		return nil, err
	}
	return &tx{conn: n, inner: inner}, nil
}

// sessionConn is a conn over one that can reset and validate itself.
type sessionConn struct {
	*conn
	resetter  driver.SessionResetter
	validator driver.Validator
}

func (n *sessionConn) ResetSession(ctx context.Context) error {
	if n.dead.Load() {
		return driver.ErrBadConn
	}
	return n.resetter.ResetSession(ctx)
}

func (n *sessionConn) IsValid() bool { return !n.dead.Load() && n.validator.IsValid() }

type tx struct {
	conn  *conn
	inner driver.Tx
}

func (t *tx) Commit() error {
	if t.conn.dead.Load() {
		_ = t.inner.Rollback()
		return driver.ErrBadConn
	}
	f, err := t.conn.c.meet(context.Background(), OpCommit, "")
	switch {
	case f == nil && err == nil:
		return t.inner.Commit()
	case f != nil && f.leave:
		return f.err
	case f != nil && f.after:
		// The answer is lost, whatever it was.
		_ = t.inner.Commit()
	default:
		_ = t.inner.Rollback()
	}
	t.conn.dead.Store(true)
	return failure(f, err)
}

// Rollback reaches the inner driver even on a dead connection: a server, too, rolls back when a session is gone.
func (t *tx) Rollback() error {
	err := t.inner.Rollback()
	if t.conn.dead.Load() {
		return driver.ErrBadConn
	}
	return err
}

type stmt struct {
	conn  *conn
	inner driver.Stmt
	query string
}

var (
	_ driver.StmtExecContext   = (*stmt)(nil)
	_ driver.StmtQueryContext  = (*stmt)(nil)
	_ driver.NamedValueChecker = (*stmt)(nil)
)

func (s *stmt) Close() error  { return s.inner.Close() }
func (s *stmt) NumInput() int { return s.inner.NumInput() }

// Exec is never called: there is ExecContext.
func (s *stmt) Exec(args []driver.Value) (driver.Result, error) {
	return s.ExecContext(context.Background(), named(args))
}

// Query is never called: there is QueryContext.
func (s *stmt) Query(args []driver.Value) (driver.Rows, error) {
	return s.QueryContext(context.Background(), named(args))
}

func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	if err := s.conn.meet(ctx, OpStatement, s.query); err != nil {
		return nil, err
	}
	if e, ok := s.inner.(driver.StmtExecContext); ok {
		return e.ExecContext(ctx, args)
	}
	return s.inner.Exec(values(args)) //nolint:staticcheck // all that such a driver has
}

func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if err := s.conn.meet(ctx, OpStatement, s.query); err != nil {
		return nil, err
	}
	if q, ok := s.inner.(driver.StmtQueryContext); ok {
		return q.QueryContext(ctx, args)
	}
	return s.inner.Query(values(args)) //nolint:staticcheck // all that such a driver has
}

func (s *stmt) CheckNamedValue(v *driver.NamedValue) error {
	if c, ok := s.inner.(driver.NamedValueChecker); ok {
		return c.CheckNamedValue(v)
	}
	if c, ok := s.inner.(driver.ColumnConverter); ok { //nolint:staticcheck // older drivers have it
		value, err := c.ColumnConverter(v.Ordinal - 1).ConvertValue(v.Value)
		v.Value = value
		return err
	}
	return s.conn.CheckNamedValue(v)
}

func named(args []driver.Value) []driver.NamedValue {
	out := make([]driver.NamedValue, len(args))
	for i, v := range args {
		out[i] = driver.NamedValue{Ordinal: i + 1, Value: v}
	}
	return out
}

func values(args []driver.NamedValue) []driver.Value {
	out := make([]driver.Value, len(args))
	for i, v := range args {
		out[i] = v.Value
	}
	return out
}
