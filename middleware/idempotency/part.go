package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// runAll runs the handlers of the messages that need one, each in its own part of the transaction. It tells whether the
// transaction can go on to its commit.
func (b *batch[T]) runAll() bool {
	if b.self != nil {
		b.turns = b.members
		return b.self.decided() || b.self.kept || b.runSelf()
	}
	run := make([]*pending[T], 0, len(b.members))
	for _, p := range b.members {
		switch {
		case p.v.kind == kindReturned:
			p.ticket.stumbled() // and what follows it here is behind
		case !p.decided() && !p.kept:
			run = append(run, p)
		}
	}
	b.turns = run
	switch {
	case len(run) == 0:
		return true
	case b.q.batch != nil && len(run) > 1:
		return b.runTogether(run)
	default:
		b.parts = b.m.info.Parts && b.m.cfg.Atomicity == PerMessage
		return b.runEach(run)
	}
}

// runSelf runs the handler of a lone message, in its own goroutine: a panic or Goexit passes through here. The store ends a
// transaction whose budget is over; a handler that does not notice, or stands still, then keeps its goroutine, but no longer
// the lane.
func (b *batch[T]) runSelf() bool {
	p := b.self
	if p.behind() {
		b.giveUp(p, returnedAndHeld(errBehind))
		return false
	}
	b.prepare(p)
	b.attribute(0)
	ctx := p.handling.Load()
	timer := time.AfterFunc(b.m.cfg.TxBudget-time.Since(b.begun), func() {
		ctx.expire()
		b.lane.release()
	})
	defer timer.Stop()
	b.account(b.call(p))
	v := b.judge(p)
	if v.kind == kindNone {
		p.kept = true
		return true
	}
	if v.kind != kindContention && v.kind != kindPermanent {
		p.ticket.stumbled()
	}
	p.v = v
	return false
}

// next runs one message of several, if it can run now. It tells whether the transaction can go on.
func (b *batch[T]) next(s *stretch, run []*pending[T], i int) bool {
	p := run[i]
	switch {
	case p.ctx.Err() != nil:
		b.giveUp(p, returned(p.ctx.Err()))
	case p.behind():
		b.giveUp(p, returnedAndHeld(errBehind))
	case b.stuck[p.line], b.late(len(run) - i):
		b.giveUp(p, again(0, nil)) // behind the one of its order key, or first of the next batch
	default:
		return b.part(s, run, i)
	}
	return true
}

// late tells whether a batch has taken so long that what is left of it goes into the next one: its handlers ran BatchTime, and
// the rest would take more than half of that again. A shorter rest runs here, because to give a claim up and to claim again
// takes as long.
func (b *batch[T]) late(left int) bool {
	if limit := b.m.cfg.BatchTime; !b.cut && b.took >= limit {
		b.cut = b.took+b.took/time.Duration(b.ran)*time.Duration(left) > limit+limit/2
	}
	return b.cut
}

// giveUp decides about a message whose handler does not run, or whose part was undone, while the transaction goes on.
func (b *batch[T]) giveUp(p *pending[T], v verdict) {
	p.v = v
	if p.line != "" {
		if b.stuck == nil {
			b.stuck = make(map[string]bool)
		}
		b.stuck[p.line] = true
	}
	if v.kind == kindReturned {
		p.ticket.stumbled()
	}
	if p.fresh {
		b.given = append(b.given, p.claim(time.Time{}))
	}
}

// part is one message's part of the transaction: the handler and its outputs.
func (b *batch[T]) part(s *stretch, run []*pending[T], i int) bool {
	p := run[i]
	if b.parts {
		if err := b.tx.Part(b.ctx); err != nil {
			b.broken(fmt.Errorf("begin a message's part: %w", err), failed)
			return false
		}
	}
	b.prepare(p)
	b.attribute(i)
	s.handling.Store(p.handling.Load())
	if !s.start() {
		b.rest(again(0, nil)) // the budget is over
		return false
	}
	took := b.call(p)
	if !s.returned() {
		return false // and nobody waits for it any more: the batch is not ours
	}
	b.account(took)
	if v := b.judge(p); v.kind != kindNone {
		return b.undo(p, v, run, i)
	}
	return b.keep(p)
}

// call runs the handler and leaves its answer in p. Afterwards the transaction is out of its reach. It tells how long that
// took.
func (b *batch[T]) call(p *pending[T]) time.Duration {
	p.called = time.Now()
	defer p.carrier.end()
	p.produced, p.err = b.q.handle(p.shadow)
	return time.Since(p.called)
}

// account notes that a handler ran.
func (b *batch[T]) account(took time.Duration) {
	b.took += took
	b.ran++
}

// judge decides whether a handler that returned may be committed, and stores its outputs. None: it may.
func (b *batch[T]) judge(p *pending[T]) verdict {
	err := p.err
	if err == nil {
		err = b.m.objection(p, b.begun)
	}
	if err != nil {
		return b.m.handlerFailed(p, err, b.begun)
	}
	outputs, err := b.m.copyOutputs(p, append(p.produced, p.carrier.take()...))
	if err != nil {
		return b.m.handlerFailed(p, err, b.begun)
	}
	then := done(&b.m.counters.handled)
	then.applied = b.m.tells()
	if len(outputs) > 0 {
		ctx := b.detached()
		defer ctx.stop()
		if then.outputs, err = b.tx.AddOutputs(ctx, outputs); err != nil {
			return b.m.classify(fmt.Errorf("store outputs: %w", err), failed)
		}
		if b.m.cfg.Outputs != nil {
			_, p.owns = b.m.ownAll(then.outputs) // all or none: this attempt's
		}
	}
	p.then, p.lost = then, b.m.whenUnknown()
	return verdict{}
}

// keep makes the part stay. Where its handler has ended the transaction it shows here.
func (b *batch[T]) keep(p *pending[T]) bool {
	p.kept = true
	if !b.parts {
		return true
	}
	err := b.tx.Keep(b.ctx)
	if err == nil {
		return true
	}
	p.kept = false
	b.ruined(p, b.m.classify(fmt.Errorf("keep a message's part: %w", err), failed))
	return false
}

// ruined decides after a message that took the whole transaction with it.
func (b *batch[T]) ruined(p *pending[T], v verdict) {
	p.ticket.stumbled()
	if v.kind == kindContention || v.kind == kindOutage {
		b.rest(v)
		return
	}
	p.v = v
	b.spare(v.err)
	b.rest(again(0, v.err))
}

// undo follows a handler that failed, where there are others: they keep what they have, if the store can undo one part alone.
func (b *batch[T]) undo(p *pending[T], v verdict, run []*pending[T], i int) bool {
	if held := b.guilty(v); held != nil && held.Member != i {
		b.blame(held)
		return false
	}
	if v.kind == kindFailed || v.kind == kindReturned {
		p.ticket.stumbled()
	}
	switch {
	case v.kind == kindOutage:
		b.rest(v)
		return false
	case b.m.cfg.Atomicity == PerBatch:
		b.undoAll(p, v)
		return false
	case b.parts:
		return b.undoPart(p, v)
	default:
		b.cutOut(p, v, run, i)
		return false
	}
}

// undoAll is the failure of one message where all stand or fall together.
func (b *batch[T]) undoAll(p *pending[T], v verdict) {
	if p.v = v; v.kind != kindContention {
		v = returnedAndHeld(errBatch)
	}
	b.rest(v)
}

// undoPart undoes one message's work and its claim.
func (b *batch[T]) undoPart(p *pending[T], v verdict) bool {
	if err := b.tx.Undo(b.ctx); err != nil {
		if v.kind != kindContention {
			p.v = v
		}
		if errors.Is(err, receipts.ErrTxEnded) {
			b.spare(err)
		}
		b.rest(b.m.classify(fmt.Errorf("undo a message's part: %w", err), func(err error) verdict {
			if v.kind == kindContention {
				return v // which has ended the transaction for all
			}
			return again(0, err)
		}))
		return false
	}
	if v.kind == kindContention {
		v.most = 1 // somebody holds what its handler needs, perhaps itself: not with others any more
	}
	b.giveUp(p, v)
	return true
}

// cutOut follows a failure where no part can be undone alone: what ran before runs again in a transaction of its own, the
// failed one alone, the rest in the next batch.
func (b *batch[T]) cutOut(p *pending[T], v verdict, run []*pending[T], i int) {
	for _, before := range run[:i] {
		if !before.decided() {
			before.v = again(i, v.err)
		}
	}
	p.v = again(1, v.err)
	p.v.contended = v.kind == kindContention
	b.rest(again(0, v.err))
}

// objection is what stands against a commit although the handler returned nil.
func (m *Middleware[T]) objection(p *pending[T], begun time.Time) error {
	c := p.carrier
	switch fault := c.spoiled(); {
	case fault != nil:
		return fmt.Errorf("%w: %w", ErrTxFailed, fault)
	case p.delivery != nil && wasCancelled(p.ctx) && m.cfg.Guarantee != AtMostOnce:
		return context.Cause(p.ctx) // the engine ignores our Ack from here on: the message comes again for certain
	case nacked(p.shadow):
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
			return p.outlived(m.cfg.TxBudget)
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

// outlived is the failure of a handler that ran for longer than its transaction may last.
func (p *pending[T]) outlived(budget time.Duration) verdict {
	err := p.err
	if err == nil {
		err = context.DeadlineExceeded
	}
	return failed(fmt.Errorf("the TxBudget of %v is over: %w", budget, err))
}
