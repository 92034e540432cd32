package idempotency

import (
	"bytes"

	"github.com/ThreeDotsLabs/watermill/message"
)

// sight is what one run of the handler gets to see: the message's shadow, a copy whose payload and metadata are its own and
// whose Ack and Nack reach nobody, in a context that carries the transaction.
type sight struct {
	shadow  *message.Message
	carrier carrier
	ctx     handling
}

// foresee makes the next sight before there is a transaction, in the message's own goroutine: the batch has less to do.
func (m *Middleware[T]) foresee(p *pending[T]) *sight {
	s := &sight{shadow: p.msg.Copy()}
	s.shadow.Payload = bytes.Clone(p.msg.Payload)
	s.carrier.owner, s.carrier.store, s.carrier.parent = m, m.store, carrierIn(p.ctx)
	s.carrier.scope, s.carrier.key, s.carrier.route = p.scope, p.key, p.route
	s.ctx.carry(p.ctx, &s.carrier)
	s.shadow.SetContext(&s.ctx)
	return s
}

// prepare makes what the handler sees in this transaction.
func (b *batch[T]) prepare(p *pending[T]) {
	s := p.foreseen
	if p.foreseen = nil; s == nil {
		s = b.m.foresee(p)
	}
	s.carrier.tx = b.tx.Raw()
	s.ctx.deadline = earlier(p.ctx, b.begun.Add(b.m.cfg.TxBudget))
	s.ctx.watched = p != b.self
	p.shadow, p.carrier = s.shadow, &s.carrier
	p.handling.Store(&s.ctx)
	p.produced, p.err = nil, nil
}

// nacked tells whether Nack was the shadow's first decision.
func nacked(shadow *message.Message) bool {
	select {
	case <-shadow.Nacked():
		return true
	default:
		return false
	}
}
