package faulty

import (
	"context"
	"errors"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// CommitOnRollback plants: what a failed attempt did is committed, as watermill-sql's subscriber does when it is closed
// or its deadline passes.
func CommitOnRollback[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return &rollbackCommits[T]{under: tx} })
}

type rollbackCommits[T any] struct {
	under[T]
	ended bool
}

// Commit remembers that the transaction is over, so that a Rollback after it stays harmless.
func (t *rollbackCommits[T]) Commit(ctx context.Context) error {
	t.ended = true
	return t.under.Commit(ctx)
}

// Rollback commits.
func (t *rollbackCommits[T]) Rollback(ctx context.Context) error {
	if t.ended {
		return t.under.Rollback(ctx)
	}
	t.ended = true
	return t.under.Commit(ctx)
}

// lateness is how late a late rollback is: long for a writer that waits, short enough that everything still gets done.
const lateness = 600 * time.Millisecond

// RollbackLate plants: a transaction that failed stays open for a while, with its locks.
func RollbackLate[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return &rollbackWaits[T]{under: tx} })
}

type rollbackWaits[T any] struct {
	under[T]
	ended bool
}

// Commit remembers that the transaction is over.
func (t *rollbackWaits[T]) Commit(ctx context.Context) error {
	t.ended = true
	return t.under.Commit(ctx)
}

// Rollback puts the rollback off.
func (t *rollbackWaits[T]) Rollback(ctx context.Context) error {
	if !t.ended {
		t.ended = true
		ctx = context.WithoutCancel(ctx)
		time.AfterFunc(lateness, func() { _ = t.under.Rollback(ctx) })
	}
	return nil
}

// CommitForgotten plants: a transaction is rolled back and counts as committed.
func CommitForgotten[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] {
		return commitTx[T]{under: tx, commit: func(ctx context.Context) error {
			_ = tx.Rollback(ctx)
			_ = tx.Commit(ctx) // too late, and kept quiet
			return nil
		}}
	})
}

// CommitErrorIgnored plants: whatever COMMIT answers, the transaction counts as committed.
func CommitErrorIgnored[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] {
		return commitTx[T]{under: tx, commit: func(ctx context.Context) error {
			_ = tx.Commit(ctx)
			return nil
		}}
	})
}

// UnknownIsCommitted plants: an unknown COMMIT is resolved by hoping, not by asking.
func UnknownIsCommitted[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] {
		return commitTx[T]{under: tx, commit: func(ctx context.Context) error {
			err := tx.Commit(ctx)
			if errors.Is(err, receipts.ErrCommitUnknown) {
				return nil
			}
			return err
		}}
	})
}

// commitTx is a transaction with another Commit.
type commitTx[T any] struct {
	under[T]
	commit func(ctx context.Context) error
}

// Commit is the planted one.
func (t commitTx[T]) Commit(ctx context.Context) error { return t.commit(ctx) }
