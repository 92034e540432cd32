package pgxstore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

const (
	// nobody is the member of what the store itself queues, and of what is queued before Member was called.
	nobody = -1
	// endTimeout bounds what is done to end a transaction after its caller has gone.
	endTimeout = 5 * time.Second
	// lateGrace is how much later than its deadline a claim is cut off, where the server did not end it.
	lateGrace = 2 * time.Second
	// deadConnections is how often another connection is taken where the pool handed out a dead one, and as often again as
	// connections are idle: after a restart of the server all of them are dead.
	deadConnections = 3
)

// transaction is the store's side of one transaction; Tx is the handler's.
type transaction struct {
	s       *Store
	opts    receipts.TxOptions
	ctx     context.Context //nolint:containedctx // the detached context of Begin: values only
	steps   *receipts.PostgresSteps
	handler Tx
	queue   queue
	life    life
	// deadline is the end of the budget; zero: none.
	deadline time.Time
	// ended is closed when the connection is back in the pool, or closed.
	ended chan struct{}

	// use is held while something happens on the connection. All below is guarded by it.
	use  sync.Mutex
	conn *pgxpool.Conn
	// begun: BEGIN was sent. over: the connection is not ours any more. broken: why only Rollback is left.
	begun, over bool
	broken      error
	// ignored is the error of a statement that a handler ran itself, since which the transaction has failed, and ignoredBy
	// whose it was: where the handler ignored it, it comes back with the next statement.
	ignored   error
	ignoredBy int
}

var (
	_ receipts.Tx[*Tx]     = (*transaction)(nil)
	_ receipts.Attributing = (*transaction)(nil)
)

// connect takes a connection. The deadline's end means that the pool is exhausted, or that nobody answers.
func (t *transaction) connect(ctx context.Context) error {
	conn, err := t.s.pool.Acquire(ctx)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			return &classedError{class: receipts.ClassOutage, what: "waiting for a free connection of the pool", err: err}
		}
		return err
	}
	t.conn = conn
	t.life.hold(conn.Conn().PgConn().Conn())
	return nil
}

// Nonce names the transaction.
func (t *transaction) Nonce() receipts.Nonce { return t.steps.Nonce() }

// Member says whose the statements are that are queued, or run, from now on.
func (t *transaction) Member(n int) {
	t.queue.belongsTo(n)
}

// Raw gives the transaction to a handler.
func (t *transaction) Raw() *Tx {
	t.use.Lock()
	defer t.use.Unlock()
	if t.broken == nil && !t.over && !t.begun {
		ctx, cancel := t.bounded(t.ctx)
		defer cancel()
		if err := t.begin(ctx, nil, nil); err != nil {
			t.broken = t.meaning(err)
		}
	}
	t.steps.Lend()
	return &t.handler
}

// bounded is ctx until the end of the budget.
func (t *transaction) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.deadline.IsZero() {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, t.deadline)
}

// usable refuses what makes no sense any more. It is called with use held.
func (t *transaction) usable() error {
	switch {
	case t.life.isExpired():
		return t.budgetError()
	case t.over:
		return pgx.ErrTxClosed
	case t.broken != nil:
		return fmt.Errorf("only Rollback is left after an earlier error: %w", t.broken)
	default:
		return nil
	}
}

func (t *transaction) budgetError() error {
	return fmt.Errorf("%w: it was open for longer than %v and is rolled back", receipts.ErrBudgetEnded, t.opts.Budget)
}

// Claim inserts receipts, together with BEGIN where the transaction has not begun: one round trip where all of them are fresh,
// else two. A scope is at most receipts.MaxScope bytes, a key 1 to receipts.MaxKey. One that waits for another transaction until
// ctx's deadline keeps its connection; where ctx is cancelled, it is closed.
func (t *transaction) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	t.use.Lock()
	defer t.use.Unlock()
	err := t.usable()
	if err == nil {
		err = ctx.Err()
	}
	var results []receipts.ClaimResult
	if err == nil {
		if results, err = t.claim(ctx, claims); err != nil {
			t.broken = t.meaning(err)
			err = t.broken
		}
	}
	if err != nil {
		return nil, fmt.Errorf("pgxstore: claim of %d identities, first %q in scope %q: %w",
			len(claims), claims[0].Key, claims[0].Scope, err)
	}
	return results, nil
}

func (t *transaction) claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	late, stop := lateContext(ctx)
	defer stop()
	most := deadConnections + int(t.s.pool.Stat().IdleConns())
	for attempt := 1; ; attempt++ {
		call, inserts, err := t.steps.Claim(claims, lockWait(ctx, t.opts.ClaimWait))
		if err != nil {
			return nil, err
		}
		first := !t.begun
		read := func(results pgx.BatchResults) error {
			for n := range inserts {
				if err := call.Inserted(n, results.QueryRow().Scan); err != nil {
					return err
				}
			}
			return nil
		}
		if first {
			err = t.begin(late, inserts, read)
		} else {
			err = t.send(late, inserts, read)
		}
		if err == nil {
			results, err := t.look(late, call)
			if err != nil {
				return nil, t.waited(ctx, err)
			}
			return results, nil
		}
		if !first || attempt >= most || !t.conn.Conn().IsClosed() || ctx.Err() != nil {
			return nil, t.waited(ctx, err)
		}
		// The pool's connection was dead, and what was sent on it has gone with it.
		t.begun = false
		t.life.release()
		t.conn.Release()
		t.conn = nil
		if err := t.connect(ctx); err != nil {
			return nil, err
		}
	}
}

// look reads the receipts of claims that were not all fresh.
func (t *transaction) look(ctx context.Context, call *receipts.PostgresClaims) ([]receipts.ClaimResult, error) {
	looks := call.Looks()
	if len(looks) == 0 {
		return call.Results()
	}
	numbers, statements := make([]int, 0, len(looks)), make([]receipts.Statement, 0, len(looks))
	for n, statement := range looks {
		numbers, statements = append(numbers, n), append(statements, statement)
	}
	err := t.send(ctx, statements, func(results pgx.BatchResults) error {
		for _, n := range numbers {
			rows, err := results.Query()
			if err != nil {
				return err
			}
			for rows.Next() {
				if err := call.Found(n, rows.Scan); err != nil {
					rows.Close()
					return err
				}
			}
			if err := rows.Err(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return call.Results()
}

// waited says what it means that a claim was cut off. By the server, or by whoever cancelled it, it waited for others: it does
// nothing else for long. A server that says nothing until the deadline, although the wait for others was to end before, does
// not work.
func (t *transaction) waited(ctx context.Context, err error) error {
	var server *pgconn.PgError
	answered := errors.As(err, &server)
	switch {
	case t.life.isExpired(), ctx.Err() == nil && (!answered || server.Code != queryCanceled):
		return err
	case !answered && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &classedError{class: receipts.ClassOutage, what: "waiting for the server's answer to a claim", err: err}
	default:
		return &classedError{class: receipts.ClassContention, what: "waiting for other transactions", err: err}
	}
}

// lockWait is how long the server lets a claim wait for a lock: not until the context's deadline, so that the server says it,
// which leaves the connection in order.
func lockWait(ctx context.Context, wait time.Duration) time.Duration {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		return wait
	}
	left := max(time.Until(deadline)*9/10, time.Millisecond)
	if wait == 0 || left < wait {
		return left
	}
	return wait
}

// lateContext is ctx with a later deadline, for a statement that the server ends before.
func lateContext(ctx context.Context) (late context.Context, stop func()) {
	if ctx.Done() == nil {
		return ctx, func() {}
	}
	var cancel context.CancelFunc
	if deadline, bounded := ctx.Deadline(); bounded {
		late, cancel = context.WithDeadline(context.WithoutCancel(ctx), deadline.Add(lateGrace))
	} else {
		late, cancel = context.WithCancel(context.WithoutCancel(ctx))
	}
	unwatch := context.AfterFunc(ctx, func() {
		if ctx.Err() == context.Canceled {
			cancel()
		}
	})
	return late, func() { unwatch(); cancel() }
}

// Unclaim deletes fresh receipts. What is queued is sent before.
func (t *transaction) Unclaim(ctx context.Context, claims []receipts.Claim) error {
	if len(claims) == 0 {
		return nil
	}
	t.use.Lock()
	defer t.use.Unlock()
	err := t.ready(ctx)
	if err == nil {
		statements := t.steps.Unclaim(claims)
		err = t.send(ctx, statements, func(results pgx.BatchResults) error {
			for range statements {
				tag, err := results.Exec()
				if err != nil {
					return err
				}
				t.steps.Unclaimed(tag.RowsAffected())
			}
			return nil
		})
		if err != nil {
			t.broken = t.meaning(err)
			err = t.broken
		}
	}
	if err != nil {
		return fmt.Errorf("pgxstore: giving up %d claims, first %q in scope %q: %w", len(claims), claims[0].Key, claims[0].Scope, err)
	}
	return nil
}

// errNoParts: the store's Info.Parts is false.
var errNoParts = errors.New("pgxstore: a message's part cannot be undone alone: Info.Parts is false")

// Part is refused: Info.Parts is false.
func (t *transaction) Part(context.Context) error { return errNoParts }

// Keep is refused: Info.Parts is false.
func (t *transaction) Keep(context.Context) error { return errNoParts }

// Undo is refused: Info.Parts is false.
func (t *transaction) Undo(context.Context) error { return errNoParts }

// AddOutputs queues the statement that stores outputs. Their payloads are not retained.
func (t *transaction) AddOutputs(ctx context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	if len(outputs) == 0 {
		return nil, nil
	}
	t.use.Lock()
	defer t.use.Unlock()
	err := t.usable()
	if err == nil {
		err = ctx.Err()
	}
	var stored []receipts.Output
	if err == nil {
		var statement receipts.Statement
		if stored, statement, err = t.steps.Outputs(outputs); err == nil {
			t.queue.push(statement.SQL, statement.Args)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("pgxstore: storing %d outputs, first %s to topic %q: %w", len(outputs), outputs[0].UUID, outputs[0].Topic, err)
	}
	return stored, nil
}

// Divert queues the statement that stores dead letters. A reason is cut at 1,024 bytes.
func (t *transaction) Divert(ctx context.Context, letters []receipts.DeadLetter) error {
	if len(letters) == 0 {
		return nil
	}
	t.use.Lock()
	defer t.use.Unlock()
	err := t.usable()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		var statement receipts.Statement
		if statement, err = t.steps.Divert(letters); err == nil {
			t.queue.pushOf(nobody, statement.SQL, statement.Args)
		}
	}
	if err != nil {
		return fmt.Errorf("pgxstore: storing %d dead letters, first %q in scope %q: %w", len(letters), letters[0].Key, letters[0].Scope, err)
	}
	return nil
}

// ready begins the transaction where nobody did, and sends what is queued.
func (t *transaction) ready(ctx context.Context) error {
	if err := t.usable(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if !t.begun {
		if err := t.begin(ctx, nil, nil); err != nil {
			t.broken = t.meaning(err)
			return t.broken
		}
	}
	return t.flush(ctx)
}

// flush sends what is queued and waits for the answers.
func (t *transaction) flush(ctx context.Context) error {
	queued := t.queue.take()
	if len(queued) == 0 {
		return nil
	}
	batch := &pgx.Batch{}
	for i := range queued {
		batch.Queue(queued[i].sql, queued[i].args...)
	}
	results := t.conn.SendBatch(ctx, batch)
	err := t.readQueued(ctx, queued, results)
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		t.broken = t.meaning(err)
		return t.broken
	}
	return nil
}
