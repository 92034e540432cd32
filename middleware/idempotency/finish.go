package idempotency

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// begin forgets what an earlier transaction came to.
func (p *pending[T]) begin() {
	p.v, p.then = verdict{}, verdict{}
	p.kept, p.fresh = false, false
}

// stays makes a message part of what the transaction commits: then is what that is worth, lost what to do about a COMMIT
// without an answer.
func (p *pending[T]) stays(then verdict, lost unknown) { p.kept, p.then, p.lost = true, then, lost }

// decided tells whether the transaction has nothing more to say about the message.
func (p *pending[T]) decided() bool { return p.gone || p.v.kind != kindNone }

// again tells whether the message goes into another transaction, and prepares it for that.
func (b *batch[T]) again(p *pending[T]) bool {
	switch p.v.kind {
	case kindAgain:
		if p.most = p.v.most; p.v.contended {
			b.contended(p)
		}
	case kindClaimed:
		p.claimed, p.contentions = true, 0
	case kindPermanent:
		p.permanent, p.contentions = p.v.err, 0
	case kindContention:
		p.most = p.v.most
		b.contended(p)
	}
	return p.v.kind == kindAgain || p.v.kind == kindClaimed || p.v.kind == kindPermanent || p.v.kind == kindContention
}

// contended counts contention; too much of it gives the message back.
func (b *batch[T]) contended(p *pending[T]) {
	p.contentions++
	b.met = max(b.met, p.contentions)
	if p.contentions > b.m.cfg.ContentionRetries {
		p.v = p.tooMuch(p.v.err)
	}
}

// finish tells everybody who waits for the transaction what became of his message, and makes what has to run again pending,
// in front. After contention that waits a little, without the lane, so that the others are out of the way meanwhile. It
// tells whether the message whose goroutine this is was decided.
func (b *batch[T]) finish(ctx context.Context) (decided bool) {
	b.tellGate()
	var front []*pending[T]
	var lines, rows []string // order keys that are free now, and rows
	for _, p := range b.members {
		rows = append(rows, p.locks...)
		if !p.gone && b.again(p) {
			front = append(front, p)
			continue
		}
		if p.line == "" || !p.gone && p.v.kind == kindBlocked {
			continue
		}
		if p.gone || p.v.kind != kindDone {
			p.ticket.stumbled() // before its order key is free: later ones of it must not run now
		}
		lines = append(lines, p.line)
	}
	b.m.counters.repeated.Add(uint64(len(front)))
	decided = b.self == nil || !slices.Contains(front, b.self)
	b.answer(front)
	b.learn()
	if b.met > 0 && len(front) > 0 {
		b.lane.release()
		pause(ctx, contentionBackoff().Delay(b.met))
	}
	b.leave(front, lines, rows)
	return decided
}

// tellGate says what the transaction proved about the database. An outage counts for more than what was decided before it.
func (b *batch[T]) tellGate() {
	reached := false
	for _, p := range b.members {
		switch {
		case p.gone:
		case p.v.kind == kindOutage:
			b.m.databaseAway(p.v.err)
			return
		case p.v.reached():
			reached = true
		}
	}
	if reached {
		b.m.databaseBack()
	}
}

// contentionBackoff is how long what met contention waits.
func contentionBackoff() sdk.Backoff {
	return sdk.Backoff{Min: 5 * time.Millisecond, Max: 500 * time.Millisecond}
}

// answer wakes up those who are decided. From then on they are not the batch's.
func (b *batch[T]) answer(front []*pending[T]) {
	i := 0
	for _, p := range b.members {
		if p.gone {
			continue
		}
		if ctx := p.handling.Load(); ctx != nil {
			ctx.stop() // after the transaction's end, so that nothing of it is cut
		}
		if i < len(front) && front[i] == p {
			i++
			continue
		}
		if p != b.self {
			p.wake <- struct{}{}
		}
	}
}

// learn adapts the size of the batches that follow.
func (b *batch[T]) learn() {
	if b.met > 0 {
		b.m.counters.contention.Add(1)
	}
	l := b.m.lanes
	l.mu.Lock()
	defer l.mu.Unlock()
	if b.ran > 0 {
		b.q.ran(b.ran, b.took)
		if b.lane.phase != nil {
			b.q.pace.ended(b.ran, len(b.q.phases), b.q.mean, time.Now())
		}
	}
	switch {
	case b.met == 0 && !b.shrink:
		b.q.grow()
	case b.several(): // one that meets contention alone says nothing about how large batches may be
		b.q.halve(len(b.members))
	}
}

// leave ends the batch's hold on its queue. An order key stays occupied where one of its messages runs again: the queue,
// which has that one in front, gives it away with it.
func (b *batch[T]) leave(front []*pending[T], lines, rows []string) {
	q, l := b.q, b.m.lanes
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range lines {
		delete(q.busy, line)
	}
	for _, p := range front {
		delete(q.busy, p.line)
	}
	for _, row := range rows {
		delete(l.locked, row)
	}
	front = slices.DeleteFunc(front, b.wentAway)
	q.inside -= len(b.members) - len(front)
	if len(front) > 0 {
		q.pending = append(front, q.pending...)
	}
	l.list(q)
	l.staff()
}

// wentAway lets a message go whose context has ended while the transaction had it: it does not wait for another lane only
// to be told so.
func (b *batch[T]) wentAway(p *pending[T]) bool {
	if p == b.self || p.ctx.Err() == nil {
		return false
	}
	p.v = returned(p.ctx.Err())
	p.ticket.stumbled()
	p.wake <- struct{}{}
	return true
}

// inOrder puts a batch's messages into the order in which they run: those of one order key as they arrived; across keys by
// the rows they lock, or else by the keys, so that batches in different lanes take them in the same order.
func (b *batch[T]) inOrder() {
	if !b.several() || b.m.cfg.LockKeys == nil && b.m.cfg.OrderKey == nil {
		return
	}
	smallest := make(map[string][]string) // the locks of each order key
	for _, p := range b.members {
		if locks, known := smallest[p.line]; !known || slices.Compare(p.locks, locks) < 0 {
			smallest[p.line] = p.locks
		}
	}
	locks := func(p *pending[T]) []string {
		if p.line == "" {
			return p.locks
		}
		return smallest[p.line]
	}
	slices.SortStableFunc(b.members, func(x, y *pending[T]) int {
		if c := slices.Compare(locks(x), locks(y)); c != 0 {
			return c
		}
		return strings.Compare(x.line, y.line)
	})
}
