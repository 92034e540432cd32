package idempotency

import (
	"context"
	"fmt"
)

// sideLane tells whether there is a lane beside the others for messages whose identity another transaction has claimed.
// Where there is a single writer, no claim ever waits.
func (m *Middleware[T]) sideLane() bool { return m.info.Lanes > 1 }

// runAside runs a message that is blocked, alone, in the side lane: one transaction at a time waits there, for at most
// TxBudget, while its neighbours go on. Its order key stays occupied meanwhile.
func (q *queue[T]) runAside(p *pending[T]) verdict {
	defer func() {
		if p.v.kind != kindDone {
			p.ticket.stumbled() // before later ones of its order key may run
		}
		p.blocked = false // another round begins like the first one
		q.vacate(p)
	}()
	for {
		if err := q.m.side.enter(p.ctx); err != nil {
			return returned(err)
		}
		v := q.onceAside(p)
		switch v.kind {
		case kindContention:
			if p.fresh || p.claimed { // with something else than its claim
				pause(p.ctx, contentionBackoff().Delay(p.contentions))
				continue
			}
			return returned(fmt.Errorf("%w: the same identity stays claimed elsewhere: %w", ErrContention, v.err))
		case kindClaimed, kindPermanent: // and the next transaction is not blocked any more
		default:
			return v
		}
	}
}

// onceAside is one transaction in the side lane, which is free again however it is left.
func (q *queue[T]) onceAside(p *pending[T]) verdict {
	p.blocked = true
	b := &batch[T]{m: q.m, q: q, self: p, lane: &lane{of: q.m.side}, members: []*pending[T]{p}}
	defer b.lane.release()
	b.run()
	b.tellGate()
	if b.again(p) && p.v.kind == kindContention {
		b.m.counters.contention.Add(1)
	}
	b.answer(nil)
	return p.v
}

// vacate lets other lanes have the message's order key again.
func (q *queue[T]) vacate(p *pending[T]) {
	if p.line == "" {
		return
	}
	l := q.m.lanes
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(q.busy, p.line)
	l.list(q)
	l.staff()
}

// side is the side lane: a slot.
type side chan struct{}

func (s side) enter(ctx context.Context) error {
	select {
	case s <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// put frees the side lane.
func (s side) put(*phase) { <-s }
