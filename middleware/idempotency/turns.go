package idempotency

import (
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// turnEnd is how a message's turn in a batch ended.
type turnEnd uint8

const (
	turnReturned  turnEnd = iota // the handler returned
	turnLeft                     // it did not: a panic or Goexit passes through the message's goroutine
	turnAbandoned                // the budget ended while it still runs
)

// turns lets the messages of a batch run their handlers one after the other, each in its own goroutine.
type turns struct {
	current atomic.Pointer[turn]
	ended   chan turnEnd
	timer   *time.Timer
}

// turn is one message's. Whoever ends it first, the message or the end of the budget, has the say.
type turn struct {
	handle message.HandlerFunc
	over   atomic.Bool
	of     *turns
}

func (t *turn) end(how turnEnd) bool {
	if !t.over.CompareAndSwap(false, true) {
		return false
	}
	t.of.ended <- how
	return true
}

// giveTurn wakes the message up and waits until its handler has returned, or the budget is over.
func (b *batch[T]) giveTurn(p *pending[T]) turnEnd {
	if b.turns == nil {
		ts := &turns{ended: make(chan turnEnd, 1)}
		ts.timer = time.AfterFunc(b.m.cfg.TxBudget-time.Since(b.begun), func() {
			if t := ts.current.Load(); t != nil {
				t.end(turnAbandoned)
			}
		})
		b.turns = ts
	}
	t := &turn{handle: b.q.handle, of: b.turns}
	b.turns.current.Store(t)
	p.turn = t
	p.wake <- struct{}{}
	how := <-b.turns.ended
	if p.gone = how != turnReturned; !p.gone {
		p.turn = nil
	}
	return how
}

func (b *batch[T]) endTurns() {
	if b.turns != nil {
		b.turns.timer.Stop()
	}
}

// takeTurn runs the handler of a message whose turn it is. abandoned: its budget ended before, and the batch went on.
func (p *pending[T]) takeTurn() (abandoned bool) {
	t := p.turn
	how := turnLeft
	defer func() {
		if first := t.end(how); !first || how == turnLeft {
			p.cancel() // nobody else will
			abandoned = !first && how == turnReturned
		}
	}()
	p.callHandler(t.handle)
	how = turnReturned
	return false
}
