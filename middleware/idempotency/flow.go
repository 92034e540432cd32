package idempotency

import (
	"github.com/ThreeDotsLabs/watermill/message"
)

// handle takes one delivery through the middleware. It returns to the router only when the message may be acknowledged
// (nil), or with the reason why it must come again.
func (m *Middleware[T]) handle(msg *message.Message, h, chain message.HandlerFunc, consumerOnly bool) ([]*message.Message, error) {
	p := m.newPending(msg, consumerOnly)
	if err := m.identify(p); err != nil {
		return nil, m.giveBack(p, returnedAndHeld(err))
	}
	if c := carrierOf(p.ctx, m); c != nil && !c.isOver() {
		return m.join(p, c, h) // an inner level of the same message
	}
	if m.sharesStore(p.ctx) {
		return nil, m.giveBack(p, returnedAndHeld(ErrNested))
	}
	return m.settle(p, chain)
}

// settle brings a message that claims for itself to its end, and notices where the handler did not return: a panic
// passes on with its value, after Goexit the router would settle nothing, so the message is nacked here. Either way the
// transaction was rolled back and the lane freed by then.
func (m *Middleware[T]) settle(p *pending[T], h message.HandlerFunc) (outputs []*message.Message, err error) {
	m.inside.enter(p, p.arrived)
	defer m.inside.leave(p)
	defer m.disown(p)
	finished := false
	defer func() {
		if finished {
			return
		}
		value := recover()
		m.counters.failed.Add(1)
		m.holdBack(p, 0)
		if value != nil {
			panic(value)
		}
		m.log.Error("The handler called runtime.Goexit, as test helpers and some loggers do; its message comes again", errPanicked, m.fields(p))
		p.msg.Nack()
	}()
	outputs, err = m.process(p, h)
	finished = true
	return outputs, err
}

// process makes rounds until the message is done or goes back.
func (m *Middleware[T]) process(p *pending[T], h message.HandlerFunc) ([]*message.Message, error) {
	if err := m.examine(p); err != nil {
		return nil, m.giveBack(p, returnedAndHeld(err))
	}
	if err := m.checkLease(p); err != nil {
		return nil, m.giveBack(p, returnedAndHeld(err))
	}
	for {
		switch v := m.round(p, h); v.kind {
		case kindDone:
			return m.conclude(p, v)
		case kindClaimed:
			p.claimed, p.contentions = true, 0
		case kindPermanent:
			p.permanent, p.contentions = v.err, 0
		case kindContention:
			if err := m.awaitTurn(p, v.err); err != nil {
				return nil, m.giveBack(p, returned(err))
			}
		case kindPaused: // and the next round waits at the gate
		case kindOutage:
			if err := m.awaitDatabase(p, v.err); err != nil {
				return nil, m.giveBack(p, returned(err))
			}
		case kindFailed:
			return nil, m.fail(p, v)
		default:
			return nil, m.giveBack(p, v)
		}
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

// round is one transaction for one message: it waits while the database is away, takes a lane, and frees it again before
// anything else is waited for.
func (m *Middleware[T]) round(p *pending[T], h message.HandlerFunc) (v verdict) {
	m.disown(p) // of a transaction that did not commit
	probing, err := m.gate.admit(p.ctx, p.untilPatience)
	if err != nil {
		m.requeueLater(p, err)
		return returned(err)
	}
	defer func() { m.afterRound(probing, v) }()
	if v = m.inLane(p, h, probing); v.kind == kindUnknown {
		v = m.resolve(p, v)
	}
	return v
}

func (m *Middleware[T]) inLane(p *pending[T], h message.HandlerFunc, probing bool) verdict {
	lane, err := m.lanes.acquire(p.ctx)
	if err != nil {
		return returned(err)
	}
	defer lane.release()
	if m.gate.paused.Load() && !probing {
		return verdict{kind: kindPaused} // the one before us in this lane found out: do not try the same, one by one
	}
	return m.transaction(p, lane, h)
}

// disown gives up the outputs of a message that did not come to publish them.
func (m *Middleware[T]) disown(p *pending[T]) {
	if p.owns != "" {
		m.sending.disown(p.owns)
		p.owns = ""
	}
}

// afterRound tells the gate what a round proved about the database.
func (m *Middleware[T]) afterRound(probing bool, v verdict) {
	switch {
	case v.kind == kindOutage:
		m.databaseAway(v.err)
	case v.reached():
		m.databaseBack()
	}
	if probing {
		m.gate.probed()
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
	m.counters.failed.Add(1)
	m.holdBack(p, delayOf(v.err))
	return p.failed(v.err, true)
}

// giveBack returns a delivery that is nobody's failed attempt.
func (m *Middleware[T]) giveBack(p *pending[T], v verdict) error {
	m.counters.returned.Add(1)
	if v.hold {
		m.holdBack(p, 0)
	}
	return p.failed(v.err, false)
}
