package receipts

import (
	"context"
	"crypto/rand"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"
	"time"
)

// sqlServer is the store on a database server, with many writers: what PostgreSQL and the MySQL family share. A dialect's
// store embeds it.
type sqlServer struct {
	sqlHandle
	dialect serverDialect
	// isolation is what BeginTx is asked for; LevelDefault where ready has seen to it.
	isolation sql.IsolationLevel
	// begin is the statement of a transaction of the store itself.
	begin string
	lost  lostCommits
	// part is the name of the savepoints around a message's part. It is drawn for each store: a handler that used the same for
	// one of its own would make Undo go back to that one.
	part string
}

// serverDialect is what the shared part asks a dialect.
type serverDialect interface {
	// flow makes the statements of one transaction.
	flow(t *sqlTx, opts TxOptions) sqlFlow
	// notCommitted tells whether an error of COMMIT proves that nothing was committed.
	notCommitted(err error) bool
	// hasEnded tells whether an error of a statement means that the transaction which Begin started is not open any more.
	hasEnded(err error) bool
	// kill ends a session of the server, if it is still in the transaction it was in. ctx is bounded.
	kill(ctx context.Context, session session) error
}

// sqlFlow is what a dialect does inside one transaction. Its errors are the database's, without words around them.
type sqlFlow interface {
	// ready makes the session ready, before BEGIN. Where it fails the connection is closed.
	ready(ctx context.Context) error
	// open sets the transaction's bounds, right after BEGIN.
	open(ctx context.Context) error
	claim(ctx context.Context, claims []Claim) ([]ClaimResult, error)
	unclaim(ctx context.Context, claims []Claim) error
	// lend is called before a handler gets the transaction.
	lend() error
	// keep and undo give the statements that end a part, and whether the savepoint of the next one is set then.
	keep() (statements []string, next bool)
	undo() (statements []string, next bool)
	// addOutputs stores outputs, whose nonce and position are set.
	addOutputs(ctx context.Context, outputs []Output) error
	divert(ctx context.Context, letters []DeadLetter) error
	// seal proves that the transaction is the one that Begin started, with all its fresh receipts, and writes their marker.
	seal(ctx context.Context) error
	// clean makes the connection as it was before open, after the transaction's end. An error closes the connection.
	clean(ctx context.Context) error
	// session is where the transaction runs, as far as it is known.
	session() session
}

// session names a server's session and the transaction it is in. The zero value is unknown.
type session struct {
	id, started int64
}

// lostCommits remembers in which sessions the transactions were whose COMMIT got no answer, until somebody asks.
type lostCommits struct {
	mu       sync.Mutex
	sessions map[Nonce]session
}

// lostMost bounds what is remembered of transactions that nobody asks for.
const lostMost = 1024

func (l *lostCommits) add(n Nonce, s session) {
	if s == (session{}) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sessions == nil {
		l.sessions = map[Nonce]session{}
	}
	if len(l.sessions) >= lostMost {
		for n := range l.sessions {
			delete(l.sessions, n)
			break
		}
	}
	l.sessions[n] = s
}

func (l *lostCommits) get(n Nonce) (s session, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s, known = l.sessions[n]
	return s, known
}

func (l *lostCommits) forget(n Nonce) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.sessions, n)
}

// newServer makes the shared part. handle.classify is set by the caller.
func newServer(handle sqlHandle, dialect serverDialect, isolation sql.IsolationLevel, begin string) sqlServer {
	handle.remote = true
	return sqlServer{sqlHandle: handle, dialect: dialect, isolation: isolation, begin: begin, part: "penstock_part_" + rand.Text()}
}

const (
	// endTimeout bounds what is done to end a transaction after its caller has gone: a rollback, the look whether a connection
	// is clean, the end of a session.
	endTimeout = 5 * time.Second
	// stuckAfter is how long the rollback at the end of a budget may wait for a handler's statement, before the session is ended.
	stuckAfter = 100 * time.Millisecond
)

// Begin starts a transaction at READ COMMITTED, with its bounds set on the server, too. It returns by ctx even where the
// server does not answer; the connection is closed then. Waiting for a connection, or for an answer, until the deadline is an
// outage for Classify.
func (s *sqlServer) Begin(ctx context.Context, opts TxOptions) (Tx[*sql.Tx], error) {
	if opts.Budget < 0 || opts.ClaimWait < 0 {
		return nil, fmt.Errorf("receipts: begin: negative budget %v or claim wait %v", opts.Budget, opts.ClaimWait)
	}
	var t *sqlTx
	err := s.again(func() (err error) {
		t, err = s.beginOnce(ctx, opts)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("receipts: begin: %w", err)
	}
	return t, nil
}

func (s *sqlServer) beginOnce(ctx context.Context, opts TxOptions) (*sqlTx, error) {
	t := &sqlTx{
		s: s, ctx: context.WithoutCancel(ctx),
		txLife: txLife{nonce: NewNonce(), budget: opts.Budget, budgets: s.budgets, ended: make(chan struct{})},
	}
	t.flow = s.dialect.flow(t, opts)
	stop, err := await(ctx, func(inner context.Context) (err error) {
		if t.conn, err = s.conn(ctx); err != nil {
			return err
		}
		if err = t.flow.ready(inner); err != nil {
			return err
		}
		if t.tx, err = t.conn.BeginTx(inner, &sql.TxOptions{Isolation: s.isolation}); err != nil {
			return err
		}
		return t.flow.open(inner)
	}, t.abandon)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
			err = &classedError{class: ClassOutage, what: "waiting for a connection, or for the answer to BEGIN", err: err}
		}
		return nil, ofStore(err) // t belongs to the goroutine that abandons it
	}
	t.stop = stop
	t.start(t.outlive)
	return t, nil
}

// write runs f in a short transaction of the store itself. f may run more than once, even after a COMMIT whose answer was
// lost, so doing it twice must be the same.
func (s *sqlServer) write(ctx context.Context, f func(ctx context.Context, conn *sql.Conn) error) error {
	return s.again(func() error { return ofStore(s.writeOnce(ctx, f)) })
}

func (s *sqlServer) writeOnce(ctx context.Context, f func(ctx context.Context, conn *sql.Conn) error) error {
	return s.attend(ctx, 0, func() error {
		conn, giveBack, err := s.borrow(ctx)
		if err != nil {
			return err
		}
		defer giveBack()
		return s.writeOn(ctx, conn, f)
	})
}

func (s *sqlServer) writeOn(ctx context.Context, conn *sql.Conn, f func(ctx context.Context, conn *sql.Conn) error) error {
	if _, err := conn.ExecContext(ctx, s.begin); err != nil {
		discard(conn) // it may have begun
		return err
	}
	if err := f(ctx, conn); err != nil {
		detached, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		if _, rollbackErr := conn.ExecContext(detached, "ROLLBACK"); rollbackErr != nil || s.classify(err) == ClassOutage {
			discard(conn) // see sqlTx.unfit
		}
		return err
	}
	if _, err := conn.ExecContext(ctx, "COMMIT"); err != nil {
		discard(conn)
		return fmt.Errorf("COMMIT: %w", err)
	}
	return nil
}

// endLost ends the session of a transaction whose COMMIT got no answer, where it is known and still in it. Not having the
// right to do that is no error: the fence then waits for the session's own end.
func (s *sqlServer) endLost(ctx context.Context, nonce Nonce) {
	lost, known := s.lost.get(nonce)
	if !known {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	_ = s.dialect.kill(ctx, lost)
}

// outcome asks fence, which tries to write a marker of its own in a transaction that waits for the old one, until it gets an
// answer or ctx ends.
func (s *sqlServer) outcome(ctx context.Context, nonce Nonce, fence func(ctx context.Context, conn *sql.Conn) (committed bool, err error)) (committed bool, err error) {
	s.endLost(ctx, nonce)
	err = s.insist(ctx, func() error {
		return s.write(ctx, func(ctx context.Context, conn *sql.Conn) (err error) {
			committed, err = fence(ctx, conn)
			return err
		})
	})
	if err != nil {
		return false, fmt.Errorf("receipts: resolving transaction %s: %w", nonce, err)
	}
	s.lost.forget(nonce)
	return committed, nil
}

// badConn tells whether an error says that the connection is gone.
func badConn(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone)
}
