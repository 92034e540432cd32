package faulty

import (
	"context"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// DivertForgotten plants: a dead letter is accepted and not stored.
func DivertForgotten[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return divertsNothing[T]{tx} })
}

type divertsNothing[T any] struct{ under[T] }

// Divert forgets.
func (divertsNothing[T]) Divert(context.Context, []receipts.DeadLetter) error { return nil }

// OutputsForgotten plants: outputs are numbered and not stored.
func OutputsForgotten[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return storesNoOutputs[T]{tx} })
}

type storesNoOutputs[T any] struct{ under[T] }

// AddOutputs numbers the outputs and forgets them.
func (t storesNoOutputs[T]) AddOutputs(_ context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	for i := range outputs {
		outputs[i].OutputRef = receipts.OutputRef{Nonce: t.Nonce(), Position: i}
	}
	return outputs, nil
}

// SentMarkForgotten plants: outputs are never marked as sent.
func SentMarkForgotten[T any](s receipts.Store[T]) receipts.Store[T] { return neverSent[T]{s} }

type neverSent[T any] struct{ receipts.Store[T] }

// MarkSent marks nothing.
func (neverSent[T]) MarkSent(context.Context, []receipts.OutputRef, time.Time) error { return nil }

// OutputsBeforeCommit plants: publish is called with each output when it is stored, not when it is durable. It is not one
// of [StoreFaults], because it needs a publisher.
func OutputsBeforeCommit[T any](s receipts.Store[T], publish func(receipts.Output) error) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return publishesEarly[T]{tx, publish} })
}

type publishesEarly[T any] struct {
	under[T]
	publish func(receipts.Output) error
}

// AddOutputs stores and publishes at once.
func (t publishesEarly[T]) AddOutputs(ctx context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	stored, err := t.under.AddOutputs(ctx, outputs)
	if err != nil {
		return nil, err
	}
	for _, o := range stored {
		if err := t.publish(o); err != nil {
			return nil, err
		}
	}
	return stored, nil
}
