package pgxstore

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrOwned is what Commit and Rollback of a [Tx] answer: the store ends the transaction, with the receipt.
var ErrOwned = errors.New("pgxstore: the transaction is the store's: a handler returns nil to commit it, or an error to roll it back")

// Tx is the transaction as a handler has it. It is used by one goroutine at a time, like any pgx.Tx, and not after the handler
// returned.
//
// What is queued is sent before any statement that the handler runs itself, so the order of the calls is the order of the
// statements. Only what goes through Conn, or LargeObjects, passes by the queue.
type Tx struct {
	pgx.Tx

	t *transaction
}

var _ pgx.Tx = (*Tx)(nil)

// Queue sends a statement later, with others: with the next statement that needs an answer, or with COMMIT. Its error, if it has
// one, then makes this message fail, as if the handler had returned it; other messages are not harmed. The arguments must not be
// changed any more. It blocks for nothing and costs no round trip. Once the transaction cannot be committed any more it does
// nothing: see Err.
func (x *Tx) Queue(sql string, args ...any) {
	x.t.queue.push(sql, args)
}

// Err is nil while the transaction is open and in order, as far as that is known without asking the server. It is
// receipts.ErrBudgetEnded once the budget has ended it.
func (x *Tx) Err() error {
	x.t.use.Lock()
	defer x.t.use.Unlock()
	return x.t.usable()
}

// Conn gives the connection, for what is not a statement, such as its type map.
func (x *Tx) Conn() *pgx.Conn { return x.Tx.Conn() }

// Commit is refused: ErrOwned.
func (x *Tx) Commit(context.Context) error { return ErrOwned }

// Rollback is refused: ErrOwned.
func (x *Tx) Rollback(context.Context) error { return ErrOwned }

// Exec sends what is queued, then the statement, and waits for its answer.
func (x *Tx) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	err = x.run(ctx, func() error {
		tag, err = x.Tx.Exec(ctx, sql, args...)
		return err
	})
	return tag, err
}

// Query sends what is queued, then the statement. Its rows have to be closed before the handler returns.
func (x *Tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return x.t.query(ctx, func() (pgx.Rows, error) { return x.Tx.Query(ctx, sql, args...) })
}

// QueryRow is Query for one row.
func (x *Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := x.Query(ctx, sql, args...)
	return row{rows: rows, err: err}
}

// SendBatch sends what is queued, then the batch. Its results have to be closed before the handler returns.
func (x *Tx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return x.t.sendBatch(ctx, x.Tx, b)
}

// CopyFrom sends what is queued, then copies.
func (x *Tx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, source pgx.CopyFromSource) (n int64, err error) {
	err = x.run(ctx, func() error {
		n, err = x.Tx.CopyFrom(ctx, table, columns, source)
		return err
	})
	return n, err
}

// Prepare prepares a statement on the connection, where it stays.
func (x *Tx) Prepare(ctx context.Context, name, sql string) (description *pgconn.StatementDescription, err error) {
	err = x.run(ctx, func() error {
		description, err = x.Tx.Prepare(ctx, name, sql)
		return err
	})
	return description, err
}

// Begin sends what is queued and sets a savepoint. What is given is ended by the handler.
func (x *Tx) Begin(ctx context.Context) (inner pgx.Tx, err error) {
	err = x.run(ctx, func() error {
		inner, err = x.Tx.Begin(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &nested{Tx: inner, t: x.t}, nil
}

// run does what a handler asked for, after what is queued.
func (x *Tx) run(ctx context.Context, f func() error) error { return x.t.run(ctx, f) }

func (t *transaction) run(ctx context.Context, f func() error) error {
	t.use.Lock()
	defer t.use.Unlock()
	if err := t.ready(ctx); err != nil {
		return err
	}
	err := f()
	t.ran(err)
	return err
}

// nested is a savepoint of a handler. It keeps the order with what is queued, too.
type nested struct {
	pgx.Tx

	t *transaction
}

// Begin sets a savepoint inside the savepoint.
func (n *nested) Begin(ctx context.Context) (inner pgx.Tx, err error) {
	err = n.t.run(ctx, func() error {
		inner, err = n.Tx.Begin(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &nested{Tx: inner, t: n.t}, nil
}

// Commit releases the savepoint.
func (n *nested) Commit(ctx context.Context) error {
	return n.t.run(ctx, func() error { return n.Tx.Commit(ctx) })
}

// Rollback goes back to the savepoint, from which on the transaction is in order again.
func (n *nested) Rollback(ctx context.Context) error {
	return n.t.run(ctx, func() error { return n.Tx.Rollback(ctx) })
}

// Exec is Tx.Exec.
func (n *nested) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	err = n.t.run(ctx, func() error {
		tag, err = n.Tx.Exec(ctx, sql, args...)
		return err
	})
	return tag, err
}

// Query is Tx.Query.
func (n *nested) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return n.t.query(ctx, func() (pgx.Rows, error) { return n.Tx.Query(ctx, sql, args...) })
}

// QueryRow is Tx.QueryRow.
func (n *nested) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := n.Query(ctx, sql, args...)
	return row{rows: rows, err: err}
}

// SendBatch is Tx.SendBatch.
func (n *nested) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return n.t.sendBatch(ctx, n.Tx, b)
}

// CopyFrom is Tx.CopyFrom.
func (n *nested) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, source pgx.CopyFromSource) (rows int64, err error) {
	err = n.t.run(ctx, func() error {
		rows, err = n.Tx.CopyFrom(ctx, table, columns, source)
		return err
	})
	return rows, err
}
