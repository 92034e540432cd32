package idempotency

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// batchHandler is what HandleBatch is given.
type batchHandler[T any] func(ctx context.Context, tx T, msgs []*message.Message) error

// errTogether is why a batch handler "failed" that did not return.
var errTogether = errors.New("the batch handler called runtime.Goexit")

// runTogether gives several messages to a batch handler in one call, in a goroutine of its own: one that stands still must
// not keep the lane. It tells whether the transaction can go on to its commit.
func (b *batch[T]) runTogether(run []*pending[T]) bool {
	if b.anyGone(run) {
		return false
	}
	call := &batchCall[T]{handler: b.q.batch, tx: b.tx.Raw(), shadows: make([]*message.Message, len(run))}
	for i, p := range run {
		b.prepare(p)
		p.carrier.asked.Store(true)
		call.shadows[i] = p.shadow
	}
	ctx, own, cancel := b.contextOf(run)
	defer cancel()
	began := time.Now()
	over, err := call.run(ctx)
	b.took, b.ran = time.Since(began), len(run)
	own.end()
	for _, p := range run {
		p.carrier.end()
		if over {
			p.handling.Load().expire()
		}
	}
	switch fault := own.spoiled(); {
	case err == nil && fault != nil:
		err = fmt.Errorf("%w: %w", ErrTxFailed, fault)
	case over:
		err = fmt.Errorf("the TxBudget of %v is over: %w", b.m.cfg.TxBudget, context.DeadlineExceeded)
	}
	if err != nil {
		b.failedTogether(err)
		return false
	}
	return b.keepTogether(run)
}

// anyGone decides about messages that went away while they waited; the others then run without them.
func (b *batch[T]) anyGone(run []*pending[T]) bool {
	found := false
	for _, p := range run {
		if err := p.ctx.Err(); err != nil {
			p.v = returned(err)
		} else if p.behind() {
			p.v = returnedAndHeld(errBehind)
		}
		if p.decided() {
			p.ticket.stumbled()
			found = true
		}
	}
	if found {
		b.rest(again(0, nil))
	}
	return found
}

// contextOf is the context of a batch handler: the first message's values, the transaction for TxFrom, and the budget. It
// does not end with one of the messages.
func (b *batch[T]) contextOf(run []*pending[T]) (context.Context, *carrier, context.CancelFunc) {
	first := run[0]
	c := &carrier{owner: b.m, store: b.m.store, parent: carrierIn(first.ctx), tx: b.tx.Raw(), together: true}
	ctx := context.WithValue(context.WithoutCancel(first.ctx), carrierKey{}, c)
	ctx, cancel := context.WithDeadline(ctx, b.begun.Add(b.m.cfg.TxBudget))
	return ctx, c, cancel
}

// batchCall is one call of a batch handler.
type batchCall[T any] struct {
	handler batchHandler[T]
	tx      T
	shadows []*message.Message
}

// run calls the handler and returns its error, or what it did instead of returning one. over: the context ended before.
func (c *batchCall[T]) run(ctx context.Context) (over bool, err error) {
	answer := make(chan error, 1)
	go func() {
		err := errTogether
		defer func() {
			if value := recover(); value != nil {
				err = fmt.Errorf("the batch handler panicked: %v\n%s", value, debug.Stack())
			}
			answer <- err
		}()
		err = c.handler(ctx, c.tx, c.shadows)
	}()
	select {
	case err := <-answer:
		return false, err
	case <-ctx.Done():
		return true, nil
	}
}

// failedTogether is the failure of a batch handler: whose, is not known. The messages run again in halves, and only one that
// fails alone is charged. With PerBatch they all go back, and the next batch is a smaller one.
func (b *batch[T]) failedTogether(err error) {
	v := b.m.classify(err, failed)
	switch {
	case v.kind == kindContention || v.kind == kindOutage:
		b.rest(v)
	case b.m.cfg.Atomicity == PerBatch:
		b.shrink = true
		b.rest(returnedAndHeld(fmt.Errorf("%w: %w", errBatch, err)))
	default:
		b.rest(again(len(b.members)/2, err))
	}
}

// keepTogether stores the outputs of all messages. Whatever stands against one of them undoes all.
func (b *batch[T]) keepTogether(run []*pending[T]) bool {
	for _, p := range run {
		v := b.judge(p)
		switch v.kind {
		case kindNone:
			p.kept = true
			continue
		case kindReturned:
			p.v = v
			b.rest(again(0, v.err))
		default:
			b.failedTogether(v.err)
		}
		return false
	}
	return true
}
