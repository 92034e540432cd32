package handlertest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// spy is the case's store, watched: it fails a COMMIT on request, ends a transaction under the handler's hands, and tells
// how each transaction ended.
type spy[T any] struct {
	receipts.Store[T]
	commit func() error                         // nil: forward; else: roll back and answer this
	ended  func(ctx context.Context, how ended) // called when a transaction is over, before its lane goes on

	mu   sync.Mutex
	open *spyTx[T] // the youngest transaction
}

// ended is how a transaction ended. One that committed without a fresh receipt has kept no attempt: whatever ran in it
// was undone alone, while the rest went on.
type ended struct {
	committed bool
	outputs   []string // the topics of the outputs it stored and kept
	err       error    // of COMMIT
}

// Begin watches the transaction.
func (s *spy[T]) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
	inner, err := s.Store.Begin(ctx, opts)
	if err != nil {
		return nil, err
	}
	tx := &spyTx[T]{under: inner, s: s, fresh: map[string]struct{}{}}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = tx
	return tx, nil
}

// kill rolls the open transaction back while the handler believes in it: each of its statements fails from then on.
func (s *spy[T]) kill(ctx context.Context) error {
	s.mu.Lock()
	tx := s.open
	s.mu.Unlock()
	tx.over = true // whatever comes is not the handler's doing
	return tx.under.Rollback(ctx)
}

// under is the transaction below. The name keeps the embedded one apart from methods.
type under[T any] interface{ receipts.Tx[T] }

// spyTx is used by one goroutine at a time, as every transaction is.
type spyTx[T any] struct {
	under[T]
	s       *spy[T]
	over    bool
	fresh   map[string]struct{} // the receipts it claimed and did not give up, by scope and key
	outputs []string
	before  int // how many outputs there were when the part began
}

func receiptName(c receipts.Claim) string { return fmt.Sprintf("%q %q", c.Scope, c.Key) }

// Claim remembers what is fresh.
func (t *spyTx[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.under.Claim(ctx, claims)
	for i, r := range results {
		if r.Status == receipts.ClaimFresh {
			t.fresh[receiptName(claims[i])] = struct{}{}
		}
	}
	return results, err
}

// Unclaim forgets it.
func (t *spyTx[T]) Unclaim(ctx context.Context, claims []receipts.Claim) error {
	err := t.under.Unclaim(ctx, claims)
	if err == nil {
		for _, c := range claims {
			delete(t.fresh, receiptName(c))
		}
	}
	return err
}

// Part remembers where the part begins.
func (t *spyTx[T]) Part(ctx context.Context) error {
	t.before = len(t.outputs)
	return t.under.Part(ctx)
}

// Undo forgets the outputs of the part. Keep has nothing to add to what is remembered.
func (t *spyTx[T]) Undo(ctx context.Context) error {
	err := t.under.Undo(ctx)
	if err == nil {
		t.outputs = t.outputs[:t.before]
	}
	return err
}

// AddOutputs remembers where the outputs go.
func (t *spyTx[T]) AddOutputs(ctx context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	stored, err := t.under.AddOutputs(ctx, outputs)
	for _, o := range stored {
		t.outputs = append(t.outputs, o.Topic)
	}
	return stored, err
}

// Commit commits, or does what the scenario wants instead, where an attempt is at stake.
func (t *spyTx[T]) Commit(ctx context.Context) error {
	if t.s.commit != nil && !t.over && len(t.fresh) > 0 {
		if err := t.s.commit(); err != nil {
			return errors.Join(err, t.Rollback(ctx))
		}
	}
	err := t.under.Commit(ctx)
	t.end(ctx, ended{committed: err == nil && len(t.fresh) > 0, outputs: t.outputs, err: err})
	return err
}

// Rollback rolls back.
func (t *spyTx[T]) Rollback(ctx context.Context) error {
	err := t.under.Rollback(ctx)
	t.end(ctx, ended{})
	return err
}

func (t *spyTx[T]) end(ctx context.Context, how ended) {
	if t.over {
		return
	}
	t.over = true
	t.s.ended(context.WithoutCancel(ctx), how)
}
