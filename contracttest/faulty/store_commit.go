package faulty

import (
	"context"
	"errors"
	"sync"

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

// RollbackForgotten plants: a transaction that failed stays open until the store is asked for the next one.
func RollbackForgotten[T any](s receipts.Store[T]) receipts.Store[T] {
	f := &forgetful[T]{}
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		f.remember(ctx)
		tx, err := s.Begin(ctx, opts)
		if err != nil {
			return nil, err
		}
		return &rollbackWaits[T]{under: tx, later: f}, nil
	}}
}

// forgetful holds transactions whose rollback was put off.
type forgetful[T any] struct {
	mu   sync.Mutex
	open []receipts.Tx[T]
}

func (f *forgetful[T]) forget(tx receipts.Tx[T]) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open = append(f.open, tx)
}

func (f *forgetful[T]) remember(ctx context.Context) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, tx := range f.open {
		_ = tx.Rollback(ctx)
	}
	f.open = nil
}

type rollbackWaits[T any] struct {
	under[T]
	later *forgetful[T]
	ended bool
}

// Commit remembers that the transaction is over.
func (t *rollbackWaits[T]) Commit(ctx context.Context) error {
	t.ended = true
	return t.under.Commit(ctx)
}

// Rollback puts the rollback off.
func (t *rollbackWaits[T]) Rollback(context.Context) error {
	if !t.ended {
		t.ended = true
		t.later.forget(t.under)
	}
	return nil
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
