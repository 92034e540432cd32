package pgxstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// Commit sends what is queued, the marker and COMMIT in one round trip. Where something before COMMIT fails the server skips
// the rest, so nothing is committed; a statement of one message fails as a *receipts.MemberError. Once ctx ends after that was
// sent, the outcome is unknown.
func (t *transaction) Commit(ctx context.Context) error {
	if !t.life.take() {
		return t.alreadyEnded(ctx)
	}
	t.use.Lock()
	defer t.use.Unlock()
	err := t.broken
	if err == nil {
		err = t.commit(ctx)
	}
	t.giveBack()
	if err != nil {
		return fmt.Errorf("pgxstore: transaction %s: %w", t.Nonce(), err)
	}
	return nil
}

// alreadyEnded answers a Commit that came too late.
func (t *transaction) alreadyEnded(ctx context.Context) error {
	if !t.life.isExpired() {
		return fmt.Errorf("pgxstore: transaction %s: commit after commit or rollback: %w", t.Nonce(), pgx.ErrTxClosed)
	}
	select {
	case <-t.ended:
	case <-ctx.Done():
	}
	return fmt.Errorf("pgxstore: transaction %s: %w", t.Nonce(), t.budgetError())
}

func (t *transaction) commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !t.begun {
		if t.queue.empty() {
			return nil // nothing was ever sent
		}
		if err := t.begin(ctx, nil, nil); err != nil {
			return t.meaning(err)
		}
	}
	if t.conn.Conn().IsClosed() {
		return &classedError{class: receipts.ClassOutage, what: "the connection is lost", err: pgconn.ErrConnClosed}
	}
	if err := t.closedRows(); err != nil {
		return err
	}
	queued := t.queue.take()
	batch := &pgx.Batch{}
	for i := range queued {
		batch.Queue(queued[i].sql, queued[i].args...)
	}
	seal, sealed := t.steps.Seal()
	if sealed {
		batch.Queue(seal.SQL, seal.Args...)
	}
	batch.Queue("commit")
	return t.read(ctx, queued, sealed, t.conn.SendBatch(ctx, batch))
}

// read reads the answers of the last round trip. Only what the server said, or what was never sent, is known not to be
// committed.
func (t *transaction) read(ctx context.Context, queued []queued, sealed bool, results pgx.BatchResults) error {
	var tag pgconn.CommandTag
	err := t.readQueued(ctx, queued, results)
	if err == nil && sealed {
		if _, err = results.Exec(); err != nil && known(err) {
			err = t.sealError(err)
		}
	}
	beforeCommit := err != nil
	if err == nil {
		tag, err = results.Exec()
	}
	if closeErr := results.Close(); err == nil && closeErr != nil {
		err = closeErr
	}
	switch {
	case err == nil && tag.String() == "COMMIT":
		return nil
	case err == nil:
		return fmt.Errorf("%w: COMMIT was answered with %s", receipts.ErrTxEnded, tag)
	case beforeCommit && known(err), t.s.CommitRefused(err):
		return err
	default:
		t.s.CommitUnanswered(t.steps)
		return fmt.Errorf("COMMIT: %w: %w", receipts.ErrCommitUnknown, err)
	}
}

// known tells whether an error proves that what was sent behind its statement was not executed: the server said it, or the
// client did before it sent anything. pgconn.SafeToRetry is no proof: pgx says it of a COMMIT whose answer was cut off, too.
func known(err error) bool {
	var server *pgconn.PgError
	var before pgx.ErrPreprocessingBatch
	return errors.As(err, &server) || errors.As(err, &before) || errors.Is(err, receipts.ErrTxEnded)
}

// closedRows refuses a commit while the rows of a handler are still open: pgx would call the connection busy.
func (t *transaction) closedRows() error {
	if t.conn.Conn().PgConn().IsBusy() {
		return errors.New("the rows of a query of the handler are still open: close them before returning")
	}
	return nil
}

// Rollback undoes the transaction and gives its connection back. Where a statement of the handler runs for longer than ctx it
// is cut off, with the connection. An error that is an outage for Classify says that the connection was lost, which no earlier call has said.
func (t *transaction) Rollback(ctx context.Context) error {
	var lost error
	if t.life.take() {
		result := make(chan error, 1)
		if t.use.TryLock() {
			result <- t.rollback()
		} else {
			go func() { t.use.Lock(); result <- t.rollback() }()
		}
		select {
		case lost = <-result:
		case <-ctx.Done():
			t.life.sever()
		}
	}
	select {
	case <-t.ended:
		return lost
	case <-ctx.Done():
		return fmt.Errorf("pgxstore: rollback of transaction %s waits for a statement: %w", t.Nonce(), ctx.Err())
	}
}

// rollback is called with use held, and releases it.
func (t *transaction) rollback() error {
	defer t.use.Unlock()
	lost := t.begun && t.broken == nil && t.conn.Conn().IsClosed()
	t.giveBack()
	if !lost {
		return nil
	}
	return fmt.Errorf("pgxstore: rollback of transaction %s: %w", t.Nonce(),
		&classedError{class: receipts.ClassOutage, what: "the connection is lost", err: pgconn.ErrConnClosed})
}

// outlive is the end of the budget. It ends the transaction although the handler still runs, and cuts off a statement of it.
func (t *transaction) outlive() {
	if !t.life.expire() {
		return
	}
	if !t.use.TryLock() {
		t.life.sever()
		t.use.Lock()
	}
	_ = t.rollback()
}

// giveBack rolls back what is open and gives the connection back, or closes it. It is called once, with use held. One on which
// the database did not work is closed: the next one may reach it where it works again, while a session that began on a
// read-only server, say, stays read-only.
func (t *transaction) giveBack() {
	t.over = true
	defer close(t.ended)
	if t.conn == nil {
		return
	}
	conn := t.conn.Conn()
	unfit := t.life.release() || t.broken != nil && t.s.Classify(t.broken) == receipts.ClassOutage
	if pg := conn.PgConn(); !conn.IsClosed() && (unfit || pg.IsBusy() || pg.TxStatus() != 'I') {
		ctx, cancel := context.WithTimeout(t.ctx, endTimeout)
		defer cancel()
		clean := false
		if !unfit && !pg.IsBusy() {
			_, err := conn.Exec(ctx, "rollback")
			clean = err == nil
		}
		if !clean {
			_ = conn.Close(ctx)
		}
	}
	t.conn.Release()
}
