package faulty

import (
	"context"
	"slices"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// UndoKeeps plants: the work of a message that failed stays, as where nobody set a savepoint.
func UndoKeeps[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return undoKeeps[T]{tx} })
}

type undoKeeps[T any] struct{ under[T] }

// Undo keeps.
func (t undoKeeps[T]) Undo(ctx context.Context) error { return t.Keep(ctx) }

// UndoTakesNeighbours plants: with the work of a message that failed goes that of those before it, but their receipts stay.
func UndoTakesNeighbours[T any](s receipts.Store[T]) receipts.Store[T] {
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		tx, err := s.Begin(ctx, opts)
		if err != nil {
			return nil, err
		}
		return &undoesAll[T]{again: again[T]{under: tx, begin: func(ctx context.Context) (receipts.Tx[T], error) {
			return s.Begin(ctx, opts)
		}}}, nil
	}}
}

// again is a transaction in whose place another one can be put, with the same receipts.
type again[T any] struct {
	under[T]
	begin func(ctx context.Context) (receipts.Tx[T], error)
	fresh []receipts.Claim
}

// Claim claims and remembers what is fresh.
func (t *again[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.under.Claim(ctx, claims)
	for i, r := range results {
		if r.Status == receipts.ClaimFresh {
			t.fresh = append(t.fresh, claims[i])
		}
	}
	return results, err
}

// Unclaim forgets what is given up.
func (t *again[T]) Unclaim(ctx context.Context, claims []receipts.Claim) error {
	t.fresh = slices.DeleteFunc(t.fresh, func(f receipts.Claim) bool {
		return slices.ContainsFunc(claims, func(c receipts.Claim) bool { return c.Scope == f.Scope && string(c.Key) == string(f.Key) })
	})
	return t.under.Unclaim(ctx, claims)
}

// replace ends the transaction with end and goes on in another one.
func (t *again[T]) replace(ctx context.Context, end func(context.Context) error) error {
	if err := end(ctx); err != nil {
		return err
	}
	next, err := t.begin(ctx)
	if err != nil {
		return err
	}
	t.under = next
	return nil
}

type undoesAll[T any] struct{ again[T] }

// Undo rolls everything back and claims again.
func (t *undoesAll[T]) Undo(ctx context.Context) error {
	if err := t.replace(ctx, t.Rollback); err != nil || len(t.fresh) == 0 {
		return err
	}
	_, err := t.under.Claim(ctx, t.fresh)
	return err
}

// KeepCommits plants: the work of each message is committed when its handler returns, with the receipts of all.
func KeepCommits[T any](s receipts.Store[T]) receipts.Store[T] {
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		tx, err := s.Begin(ctx, opts)
		if err != nil {
			return nil, err
		}
		return &keepCommits[T]{again[T]{under: tx, begin: func(ctx context.Context) (receipts.Tx[T], error) {
			return s.Begin(ctx, opts)
		}}}, nil
	}}
}

type keepCommits[T any] struct{ again[T] }

// Keep commits and goes on in another transaction.
func (t *keepCommits[T]) Keep(ctx context.Context) error {
	if err := t.under.Keep(ctx); err != nil {
		return err
	}
	return t.replace(ctx, t.Commit)
}

// UnclaimForgotten plants: the receipt of a message that failed is committed with those of the others.
func UnclaimForgotten[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return unclaimsNothing[T]{tx} })
}

type unclaimsNothing[T any] struct{ under[T] }

// Unclaim forgets.
func (unclaimsNothing[T]) Unclaim(context.Context, []receipts.Claim) error { return nil }

// UnclaimTakesNeighbours plants: with the receipt of a message that failed go those of the others.
func UnclaimTakesNeighbours[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return &unclaimsAll[T]{again[T]{under: tx}} })
}

type unclaimsAll[T any] struct{ again[T] }

// Unclaim gives up everything.
func (t *unclaimsAll[T]) Unclaim(ctx context.Context, _ []receipts.Claim) error {
	return t.under.Unclaim(ctx, t.fresh)
}

// ManyHeldAsFresh plants: a statement that claims several reports all of them as inserted.
func ManyHeldAsFresh[T any](s receipts.Store[T]) receipts.Store[T] {
	return manyStore(s, func(results []receipts.ClaimResult) {
		for i := range results {
			if results[i].Status == receipts.ClaimHeld {
				results[i] = receipts.ClaimResult{Status: receipts.ClaimFresh}
			}
		}
	})
}

// AnswersOutOfOrder plants: the answers to several claims come in another order than the claims.
func AnswersOutOfOrder[T any](s receipts.Store[T]) receipts.Store[T] {
	return manyStore(s, slices.Reverse[[]receipts.ClaimResult])
}

// manyStore changes the answers to several claims.
func manyStore[T any](s receipts.Store[T], change func([]receipts.ClaimResult)) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return manyTx[T]{tx, change} })
}

type manyTx[T any] struct {
	under[T]
	change func([]receipts.ClaimResult)
}

// Claim claims with the planted change.
func (t manyTx[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.under.Claim(ctx, claims)
	if len(results) > 1 {
		t.change(results)
	}
	return results, err
}

// ClaimWaitIgnored plants: a claim that another transaction holds is waited for without end.
func ClaimWaitIgnored[T any](s receipts.Store[T]) receipts.Store[T] {
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		opts.ClaimWait = 0
		return s.Begin(ctx, opts)
	}}
}

// ContentionUnseen plants: another transaction that was in the way counts as the message's own failure.
func ContentionUnseen[T any](s receipts.Store[T]) receipts.Store[T] { return uncontended[T]{s} }

type uncontended[T any] struct{ receipts.Store[T] }

// Classify calls contention something else.
func (s uncontended[T]) Classify(err error) receipts.Class {
	if class := s.Store.Classify(err); class != receipts.ClassContention {
		return class
	}
	return receipts.ClassOther
}
