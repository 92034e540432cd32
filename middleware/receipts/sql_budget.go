package receipts

import (
	"sync"
	"time"
)

// budgets ends the transactions of a store whose budget is over. One timer serves all, and is set again only when it has rung:
// setting one wakes a thread of an idle process, which costs a transaction on its own as much as a statement.
type budgets struct {
	mu    sync.Mutex
	open  map[*budget]struct{}
	rings time.Time // zero: it does not
}

// budget is the time of one transaction.
type budget struct {
	ends time.Time
	over func()
}

// begin has over called in a goroutine of its own after d, unless end is called before.
func (b *budgets) begin(d time.Duration, over func()) *budget {
	x := &budget{ends: time.Now().Add(d), over: over}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open == nil {
		b.open = map[*budget]struct{}{}
	}
	b.open[x] = struct{}{}
	b.wake(x.ends)
	return x
}

// wake makes the timer ring then, or before. It wants the lock held.
func (b *budgets) wake(then time.Time) {
	if b.rings.IsZero() || then.Before(b.rings) {
		b.rings = then
		time.AfterFunc(time.Until(then), func() { b.ring(then) })
	}
}

// end ends a budget that is not over; nil has none.
func (b *budgets) end(x *budget) {
	if x == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.open, x)
}

// ring ends what is over by now, and waits for the next one. Where an earlier timer was set meanwhile, that one does it.
func (b *budgets) ring(set time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.rings.Equal(set) {
		return
	}
	b.rings = time.Time{}
	now := time.Now()
	var next time.Time
	for x := range b.open {
		switch {
		case !x.ends.After(now):
			delete(b.open, x)
			go x.over()
		case next.IsZero() || x.ends.Before(next):
			next = x.ends
		}
	}
	if !next.IsZero() {
		b.wake(next)
	}
}
