package idempotency

import (
	"slices"

	"github.com/ThreeDotsLabs/watermill/message"
)

// handle takes one delivery through the middleware. It returns to the router only when the message may be acknowledged
// (nil), or with the reason why it must come again.
func (m *Middleware[T]) handle(msg *message.Message, h message.HandlerFunc, q *queue[T], consumerOnly bool) ([]*message.Message, error) {
	p := m.newPending(msg, consumerOnly)
	if err := m.identify(p, q); err != nil {
		return nil, m.giveBack(p, returnedAndHeld(err))
	}
	if c := carrierOf(p.ctx, m); c != nil && !c.isOver() {
		return m.join(p, c, h) // an inner level of the same message
	}
	if m.sharesStore(p.ctx) {
		return nil, m.giveBack(p, returnedAndHeld(ErrNested))
	}
	if err := m.line(p); err != nil {
		return nil, m.giveBack(p, returnedAndHeld(err))
	}
	outputs, err := m.settle(p, q)
	m.recycle(p)
	return outputs, err
}

// line finds a message's place among those of its order key.
func (m *Middleware[T]) line(p *pending[T]) (err error) {
	if p.ticket, err = m.ticketFor(p.msg); err != nil {
		return err
	}
	if p.ticket.behind() {
		return errBehind
	}
	p.line = p.ticket.line()
	return nil
}

// settle brings a message that claims for itself to its end, and notices where the handler did not return: a panic
// passes on with its value, after Goexit the router would settle nothing, so the message is nacked here. Either way its
// work was undone by then.
func (m *Middleware[T]) settle(p *pending[T], q *queue[T]) (outputs []*message.Message, err error) {
	m.inside.enter(p)
	defer m.inside.leave(p)
	defer m.disown(p)
	finished := false
	defer func() {
		if finished {
			return
		}
		value := recover()
		m.inside.release(p, verdict{})
		p.ticket.stumbled()
		m.counters.failed.Add(1)
		m.holdBack(p, 0)
		if value != nil {
			panic(value)
		}
		m.log.Error("The handler called runtime.Goexit, as test helpers and some loggers do; its message comes again", errPanicked, m.fields(p))
		p.msg.Nack()
	}()
	outputs, err = m.process(p, q)
	finished = true
	return outputs, err
}

// process finds out what becomes of a message, and does what follows from it.
func (m *Middleware[T]) process(p *pending[T], q *queue[T]) ([]*message.Message, error) {
	v := m.verdictOn(p, q)
	m.inside.release(p, v)
	switch v.kind {
	case kindDone:
		p.ticket.passed()
		return m.conclude(p, v)
	case kindFailed:
		return nil, m.fail(p, v)
	default:
		return nil, m.giveBack(p, v)
	}
}

// verdictOn is what a message came to: done, failed or returned.
func (m *Middleware[T]) verdictOn(p *pending[T], q *queue[T]) verdict {
	if err := m.examine(p); err != nil {
		return returnedAndHeld(err)
	}
	if err := m.checkLease(p); err != nil {
		return returnedAndHeld(err)
	}
	if m.cfg.LockKeys != nil {
		p.locks = slices.Sorted(slices.Values(m.cfg.LockKeys(p.msg)))
	}
	if err := m.takeUp(p); err != nil {
		return returned(err)
	}
	defer func() { <-m.inside.door }()
	if v := m.follow(p); v.kind != kindNone {
		return v
	}
	for {
		switch v := m.round(p, q); v.kind {
		case kindPaused: // and the next round waits at the gate
			if p.ticket != nil { // it has lost its place in the queue
				err := m.gate.away()
				m.requeueLater(p, err)
				return returned(err)
			}
		case kindOutage:
			if err := m.awaitDatabase(p, v.err); err != nil {
				return returned(err)
			}
		default:
			return v
		}
	}
}

// takeUp waits at the door while MaxPending deliveries are inside.
func (m *Middleware[T]) takeUp(p *pending[T]) error {
	select {
	case m.inside.door <- struct{}{}:
		return nil
	default:
	}
	select {
	case m.inside.door <- struct{}{}:
		return nil
	case <-p.ctx.Done():
		return p.ctx.Err()
	}
}

// join runs an inner level of the same message inside the transaction that is open already.
func (m *Middleware[T]) join(p *pending[T], c *carrier, h message.HandlerFunc) ([]*message.Message, error) {
	if !p.sameIdentity(c) {
		c.spoil(ErrNested)
		return nil, p.failed(ErrNested, false)
	}
	return c.guard(p.msg, h)
}

// round brings a message through transactions, its own and those it shares, unless the database is away.
func (m *Middleware[T]) round(p *pending[T], q *queue[T]) verdict {
	probing, err := m.gate.admit(p.ctx, p.untilPatience)
	if err != nil {
		m.requeueLater(p, err)
		return returned(err)
	}
	p.probing, p.most = probing, 0
	if probing {
		p.most = 1
		defer m.gate.probed()
	}
	v := q.run(p)
	if v.kind == kindBlocked {
		v = q.runAside(p)
	}
	return v
}

// disown gives up the outputs of a message that did not come to publish them.
func (m *Middleware[T]) disown(p *pending[T]) {
	if p.owns != nil {
		m.sending.disown(p.owns...)
		p.owns = nil
	}
}

// conclude acknowledges: the message is counted, and its outputs are on their way.
func (m *Middleware[T]) conclude(p *pending[T], v verdict) ([]*message.Message, error) {
	outputs, err := m.deliverOutputs(p, v)
	if err != nil {
		return nil, m.giveBack(p, returnedAndHeld(err))
	}
	v.count.Add(1)
	if m.failures.some.Load() {
		m.failures.forget(p.hash(m.seed))
	}
	return outputs, nil
}

// fail charges an attempt and returns the handler's error.
func (m *Middleware[T]) fail(p *pending[T], v verdict) error {
	p.ticket.stumbled()
	m.counters.failed.Add(1)
	m.holdBack(p, delayOf(v.err))
	return p.failed(v.err, true)
}

// giveBack returns a delivery that is nobody's failed attempt.
func (m *Middleware[T]) giveBack(p *pending[T], v verdict) error {
	p.ticket.stumbled()
	m.counters.returned.Add(1)
	if v.hold {
		m.holdBack(p, 0)
	}
	return p.failed(v.err, false)
}
