package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// running is an open transaction and the lane it runs in.
type running[T any] struct {
	tx    receipts.Tx[T]
	begun time.Time
	lane  *lane
	ended bool // Commit was called, whatever it answered
}

// run calls the handler with the transaction, stores its outputs and commits.
func (m *Middleware[T]) run(p *pending[T], r *running[T], h message.HandlerFunc) verdict {
	c := &carrier{owner: m, store: m.store, parent: carrierIn(p.ctx), tx: r.tx.Raw(), scope: p.scope, key: p.key, route: p.route}
	defer c.end()
	ctx, cancel := context.WithDeadline(context.WithValue(p.ctx, carrierKey{}, c), r.begun.Add(m.cfg.TxBudget))
	defer cancel() // after the transaction's end, so that nothing of it is cut
	shadow := shadowOf(ctx, p.msg)

	produced, err := m.withinBudget(r, shadow, h)
	c.end()
	if err == nil {
		err = m.objection(p, c, shadow, r.begun)
	}
	if err != nil {
		return m.handlerFailed(p, err, r.begun)
	}
	outputs, err := m.copyOutputs(p, append(produced, c.take()...))
	if err != nil {
		return m.handlerFailed(p, err, r.begun)
	}
	return m.commitWithOutputs(p, r, outputs)
}

// withinBudget runs the handler. The store ends a transaction whose budget is over; a handler that does not notice, or
// stands still, then keeps its own goroutine, but no longer the lane.
func (m *Middleware[T]) withinBudget(r *running[T], shadow *message.Message, h message.HandlerFunc) ([]*message.Message, error) {
	timer := time.AfterFunc(m.cfg.TxBudget-time.Since(r.begun), r.lane.release)
	defer timer.Stop()
	return h(shadow)
}

// innermost wraps the handler itself, inside Config.Inside: it stops what would run it again after a failure, and hands
// outward, as messages, all outputs the transaction has collected.
func (m *Middleware[T]) innermost(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		c := carrierOf(msg.Context(), m)
		if c == nil {
			return nil, fmt.Errorf("a middleware in Config.Inside replaced the message's context: %w", ErrNoTx)
		}
		produced, err := c.guard(msg, h)
		if published := c.take(); len(published) > 0 {
			produced = append(published, produced...)
		}
		return produced, err
	}
}

// objection is what stands against a commit although the handler returned nil.
func (m *Middleware[T]) objection(p *pending[T], c *carrier, shadow *message.Message, begun time.Time) error {
	switch fault := c.spoiled(); {
	case fault != nil:
		return fmt.Errorf("%w: %w", ErrTxFailed, fault)
	case p.delivery != nil && wasCancelled(p.ctx) && m.cfg.Guarantee != AtMostOnce:
		return context.Cause(p.ctx) // the engine ignores our Ack from here on: the message comes again for certain
	case nacked(shadow):
		return errNacked
	case time.Since(begun) >= m.cfg.TxBudget:
		return context.DeadlineExceeded
	case c.asked.Load():
		return nil
	case m.cfg.RequireTx:
		return ErrTxUnused
	}
	m.counters.withoutTx.Add(1)
	if _, known := m.withoutTx.LoadOrStore(p.handler, true); !known {
		m.log.Error("A handler never asked for its transaction: its effect is outside the promise", ErrNoTx, m.fields(p).Add(
			watermill.LogFields{"remedy": "use Handle or TxFrom; RequireTx refuses such a handler"}))
	}
	return nil
}

// handlerFailed tells whose failure it is that a handler failed.
func (m *Middleware[T]) handlerFailed(p *pending[T], err error, begun time.Time) verdict {
	if wasCancelled(p.ctx) {
		if !errors.Is(err, context.Canceled) {
			err = fmt.Errorf("%w: %w", context.Canceled, err)
		}
		return returned(err)
	}
	if errors.Is(err, ErrNoOutputs) || errors.Is(err, ErrTxUnused) || errors.Is(err, ErrNested) {
		return returnedAndHeld(err) // the program has to change, not the message
	}
	v := m.classify(err, func(err error) verdict {
		switch {
		case isPermanent(err):
			return permanent(err)
		case time.Since(begun) >= m.cfg.TxBudget:
			return failed(fmt.Errorf("the TxBudget of %v is over: %w", m.cfg.TxBudget, err))
		default:
			return failed(err)
		}
	})
	if v.kind == kindContention && m.info.Lanes == 1 {
		v.err = fmt.Errorf("inside the handler, whose transaction is the only writer: does it write through another handle than "+
			"its transaction? %w", v.err)
		if _, known := m.inOwnWay.LoadOrStore(p.handler, true); !known {
			m.log.Error("A handler met contention although its transaction is the only writer", v.err, m.fields(p))
		}
	}
	return v
}

// commitWithOutputs stores the outputs and commits. An error in here is charged: what breaks a transaction that could
// claim is what the handler did with it.
func (m *Middleware[T]) commitWithOutputs(p *pending[T], r *running[T], outputs []receipts.Output) verdict {
	then := done(&m.counters.handled)
	if len(outputs) > 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), m.cfg.TxBudget)
		defer cancel()
		stored, err := r.tx.AddOutputs(ctx, outputs)
		if err != nil {
			return m.classify(fmt.Errorf("store outputs: %w", err), failed)
		}
		then.outputs = stored
		if id := m.owner(p.scope, p.key, r.tx.Nonce()); m.cfg.Outputs != nil && m.sending.own(id) {
			p.owns = id
		}
	}
	return m.commit(p, r, then, m.whenUnknown(), failed)
}
