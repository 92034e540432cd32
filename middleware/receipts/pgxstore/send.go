package pgxstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// The SQLSTATEs that the store decides by, beside those of package receipts.
const (
	failedTransaction = "25P02"
	noTransaction     = "25P01"
	queryCanceled     = "57014"
)

// begin sends BEGIN, the bounds of the transaction and the statements, and reads their answers.
func (t *transaction) begin(ctx context.Context, statements []receipts.Statement, read func(pgx.BatchResults) error) error {
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	bounds := t.steps.Bounds()
	batch.Queue(bounds.SQL, bounds.Args...)
	add(batch, statements)
	t.begun = true
	results := t.conn.SendBatch(ctx, batch)
	t.handler.Tx = results.Tx()
	return finish(results, func(results pgx.BatchResults) error {
		for range 2 {
			if _, err := results.Exec(); err != nil {
				return err
			}
		}
		if read == nil {
			return nil
		}
		return read(results)
	})
}

// send sends statements and reads their answers.
func (t *transaction) send(ctx context.Context, statements []receipts.Statement, read func(pgx.BatchResults) error) error {
	batch := &pgx.Batch{}
	add(batch, statements)
	return finish(t.conn.SendBatch(ctx, batch), read)
}

func add(batch *pgx.Batch, statements []receipts.Statement) {
	for i := range statements {
		batch.Queue(statements[i].SQL, statements[i].Args...)
	}
}

func finish(results pgx.BatchResults, read func(pgx.BatchResults) error) error {
	err := read(results)
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	return err
}

// readQueued reads the answers to queued statements. The first error is attributed to who queued its statement.
func (t *transaction) readQueued(ctx context.Context, queue []queued, results pgx.BatchResults) error {
	for i := range queue {
		if _, err := results.Exec(); err != nil {
			return t.attribute(ctx, queue, i, err)
		}
	}
	return nil
}

// attribute says whose an error is that came in place of the answer to the i-th queued statement.
func (t *transaction) attribute(ctx context.Context, queue []queued, i int, err error) error {
	var server *pgconn.PgError
	var before pgx.ErrPreprocessingBatch
	answered := errors.As(err, &server)
	member := nobody
	switch {
	case answered && server.Code == failedTransaction && t.ignored != nil:
		return t.ignoredError()
	case errors.As(err, &before):
		member = t.unprepared(ctx, queue, before, answered)
	case answered && !t.conn.Conn().IsClosed():
		member = queue[i].member
	}
	if member == nobody {
		return err
	}
	return &receipts.MemberError{Member: member, Err: err}
}

// unprepared finds whose statement the server could not prepare, or has values that pgx cannot send. In the second case pgx has
// closed the connection; another one tells what the values should have been.
func (t *transaction) unprepared(ctx context.Context, queue []queued, failed pgx.ErrPreprocessingBatch, answered bool) int {
	var candidates []queued
	for _, q := range queue {
		if q.sql == failed.SQL() {
			candidates = append(candidates, q)
		}
	}
	switch {
	case len(candidates) == 0, !answered && t.s.Classify(failed) != receipts.ClassOther, ctx.Err() != nil:
		return nobody
	case answered, len(candidates) == 1:
		return candidates[0].member // the text itself is wrong, whoever queued it
	}
	conn, err := t.s.pool.Acquire(ctx)
	if err != nil {
		return nobody
	}
	defer conn.Release()
	description, err := conn.Conn().Prepare(ctx, "", failed.SQL())
	if err != nil {
		return nobody
	}
	var build pgx.ExtendedQueryBuilder
	for _, q := range candidates {
		if build.Build(conn.Conn().TypeMap(), description, q.args) != nil {
			return q.member
		}
	}
	return nobody
}

// ignoredError is what comes of a handler's error that left the transaction failed.
func (t *transaction) ignoredError() error {
	err := fmt.Errorf("%w: %w", receipts.ErrTxEnded, t.ignored)
	if t.ignoredBy == nobody {
		return err
	}
	return &receipts.MemberError{Member: t.ignoredBy, Err: err}
}

// ran is told what came of a statement that a handler ran itself. pgx knows by then in which state the transaction is.
func (t *transaction) ran(err error) {
	if t.broken != nil || t.over {
		return
	}
	conn := t.conn.Conn()
	switch {
	case conn.IsClosed():
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			t.broken = t.of(err) // the end of a statement's context is no outage
		}
	case conn.PgConn().TxStatus() == 'I':
		t.broken = t.of(receipts.ErrTxEnded)
	case conn.PgConn().TxStatus() == 'E':
		if err != nil && t.ignored == nil {
			t.ignored, t.ignoredBy = err, t.queue.current()
		}
	default: // in order, or again after a savepoint
		t.ignored = nil
	}
}

// of is an error of the member whose turn it is.
func (t *transaction) of(err error) error {
	if member := t.queue.current(); member != nobody {
		return &receipts.MemberError{Member: member, Err: err}
	}
	return err
}

// sealError says what an error of the marker means.
func (t *transaction) sealError(err error) error {
	var server *pgconn.PgError
	if errors.As(err, &server) && server.Code == failedTransaction && t.ignored != nil {
		return t.ignoredError()
	}
	return t.steps.SealError(err)
}

// meaning says what a failure of the store's own statements means.
func (t *transaction) meaning(err error) error {
	var server *pgconn.PgError
	switch {
	case t.life.isExpired():
		return t.budgetError()
	case errors.Is(err, receipts.ErrTxEnded), !errors.As(err, &server):
		return err
	case server.Code == failedTransaction && t.ignored != nil:
		return t.ignoredError()
	case server.Code == failedTransaction, server.Code == noTransaction:
		return fmt.Errorf("%w: %w", receipts.ErrTxEnded, err)
	default:
		return err
	}
}
