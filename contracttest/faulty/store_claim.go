package faulty

import (
	"bytes"
	"context"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// MarkBeforeWork plants: the receipt commits in a transaction of its own before the handler's work, as Watermill's
// Deduplicator marks its key.
func MarkBeforeWork[T any](s receipts.Store[T]) receipts.Store[T] {
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		tx, err := s.Begin(ctx, opts)
		if err != nil {
			return nil, err
		}
		return &markedBefore[T]{under: tx, again: func(ctx context.Context) (receipts.Tx[T], error) { return s.Begin(ctx, opts) }}, nil
	}}
}

type markedBefore[T any] struct {
	under[T]
	again func(ctx context.Context) (receipts.Tx[T], error)
}

// Claim commits what it claimed and goes on in another transaction.
func (t *markedBefore[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.under.Claim(ctx, claims)
	if err != nil {
		return nil, err
	}
	if err := t.Commit(ctx); err != nil {
		return nil, err
	}
	next, err := t.again(ctx)
	if err != nil {
		return nil, err
	}
	t.under = next
	return results, nil
}

// MarkAfterWork plants: the receipt commits in a transaction of its own after the one with the effect.
func MarkAfterWork[T any](s receipts.Store[T]) receipts.Store[T] {
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		tx, err := s.Begin(ctx, opts)
		if err != nil {
			return nil, err
		}
		return &markedAfter[T]{under: tx, again: func(ctx context.Context) (receipts.Tx[T], error) { return s.Begin(ctx, opts) }}, nil
	}}
}

type markedAfter[T any] struct {
	under[T]
	again  func(ctx context.Context) (receipts.Tx[T], error)
	claims []receipts.Claim
}

// Claim looks, gives the claim up again and keeps it for later.
func (t *markedAfter[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.under.Claim(ctx, claims)
	if err != nil || len(claims) == 0 || results[0].Status != receipts.ClaimFresh {
		return results, err
	}
	if err := t.Rollback(ctx); err != nil {
		return nil, err
	}
	next, err := t.again(ctx)
	if err != nil {
		return nil, err
	}
	t.under, t.claims = next, claims
	return results, nil
}

// Commit commits the effect and only then the receipt.
func (t *markedAfter[T]) Commit(ctx context.Context) error {
	if err := t.under.Commit(ctx); err != nil || t.claims == nil {
		return err
	}
	mark, err := t.again(ctx)
	if err != nil {
		return err
	}
	if _, err := mark.Claim(ctx, t.claims); err != nil {
		return mark.Rollback(ctx)
	}
	return mark.Commit(ctx)
}

// HeldAsFresh plants: a claim that meets a receipt is reported as fresh, as where a conflict of the insert is swallowed.
func HeldAsFresh[T any](s receipts.Store[T]) receipts.Store[T] {
	return claimStore(s, nil, func(_ receipts.Claim, r *receipts.ClaimResult) {
		if r.Status == receipts.ClaimHeld {
			*r = receipts.ClaimResult{Status: receipts.ClaimFresh}
		}
	})
}

// TornAsHeld plants: the marker is not looked at.
func TornAsHeld[T any](s receipts.Store[T]) receipts.Store[T] {
	return claimStore(s, nil, func(_ receipts.Claim, r *receipts.ClaimResult) {
		if r.Status == receipts.ClaimTorn {
			r.Status = receipts.ClaimHeld
		}
	})
}

// FingerprintIgnored plants: the payload is not compared.
func FingerprintIgnored[T any](s receipts.Store[T]) receipts.Store[T] {
	return claimStore(s, nil, func(c receipts.Claim, r *receipts.ClaimResult) { r.Receipt.Fingerprint = c.Fingerprint })
}

// KeysFolded plants: keys are compared without case and without trailing blanks, as MySQL's default collations do.
func KeysFolded[T any](s receipts.Store[T]) receipts.Store[T] {
	return claimStore(s, func(c *receipts.Claim) { c.Key = bytes.TrimRight(bytes.ToLower(c.Key), " ") }, nil)
}

// ScopeIgnored plants: a receipt counts for every consumer.
func ScopeIgnored[T any](s receipts.Store[T]) receipts.Store[T] {
	return claimStore(s, func(c *receipts.Claim) { c.Scope = "everyone" }, nil)
}

// claimStore changes claims on their way in and results on their way out; nil changes nothing.
func claimStore[T any](s receipts.Store[T], in func(*receipts.Claim), out func(receipts.Claim, *receipts.ClaimResult)) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return claimTx[T]{under: tx, in: in, out: out} })
}

type claimTx[T any] struct {
	under[T]
	in  func(*receipts.Claim)
	out func(receipts.Claim, *receipts.ClaimResult)
}

// Claim claims with the planted change.
func (t claimTx[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	asked := append([]receipts.Claim(nil), claims...)
	for i := range asked {
		if t.in != nil {
			t.in(&asked[i])
		}
	}
	results, err := t.under.Claim(ctx, asked)
	for i := range results {
		if t.out != nil {
			t.out(asked[i], &results[i])
		}
	}
	return results, err
}
