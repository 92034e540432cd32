package idempotency

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"time"
)

// inside knows the deliveries inside the middleware, and which identities they have: a second delivery of an identity that
// is in flight here waits in memory for the first one's outcome, instead of asking the database.
type inside[T any] struct {
	door chan struct{} // one value for each delivery that was taken up

	mu             sync.Mutex
	oldest, newest *pending[T] // a list, in the order of arrival
	n              int
	first          map[identity]*pending[T]
}

// identity names a message within this middleware.
type identity struct{ scope, key string }

func newInside[T any](most int) *inside[T] {
	return &inside[T]{door: make(chan struct{}, most), first: make(map[identity]*pending[T])}
}

// enter counts a delivery in.
func (in *inside[T]) enter(p *pending[T]) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.n++
	if p.before = in.newest; p.before != nil {
		p.before.after = p
	} else {
		in.oldest = p
	}
	in.newest = p
}

// leave counts it out.
func (in *inside[T]) leave(p *pending[T]) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.n--
	if p.before != nil {
		p.before.after = p.after
	} else {
		in.oldest = p.after
	}
	if p.after != nil {
		p.after.before = p.before
	} else {
		in.newest = p.before
	}
	p.before, p.after = nil, nil
}

func (in *inside[T]) state() (n int, oldest time.Time) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.oldest != nil {
		oldest = in.oldest.arrived
	}
	return in.n, oldest
}

// claim makes p the delivery whose outcome others of its identity wait for, unless there is one: then it waits for that one.
func (in *inside[T]) claim(p *pending[T]) (first bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	other, taken := in.first[p.id]
	if taken {
		other.followers = append(other.followers, p)
		return false
	}
	in.first[p.id], p.leads = p, true
	return true
}

// release ends that, and tells those who wait what became of it. It may be called again.
func (in *inside[T]) release(p *pending[T], v verdict) {
	in.mu.Lock()
	if !p.leads {
		in.mu.Unlock()
		return
	}
	p.leads = false
	delete(in.first, p.id)
	followers := p.followers
	p.followers = nil
	in.mu.Unlock()
	for _, f := range followers {
		f.v = p.outcomeFor(f, v)
		f.wake <- struct{}{}
	}
}

// left tells how long the first copy of p's identity may still be waited for, since it has begun.
func (in *inside[T]) left(p *pending[T], patience time.Duration) time.Duration {
	in.mu.Lock()
	defer in.mu.Unlock()
	first := in.first[p.id]
	if first == nil {
		return 0
	}
	began := first.began.Load()
	if began == 0 {
		return patience
	}
	return patience - time.Since(time.Unix(0, began))
}

// stop makes a follower one no longer. It fails where its first copy has told it what became of it.
func (in *inside[T]) stop(p *pending[T]) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	first := in.first[p.id]
	if first == nil {
		return false
	}
	i := slices.Index(first.followers, p)
	if i < 0 {
		return false
	}
	first.followers = slices.Delete(first.followers, i, i+1)
	return true
}

// outcomeFor tells what the outcome of an identity's first copy is for another one; again: nothing, it has to ask for itself.
func (p *pending[T]) outcomeFor(other *pending[T], v verdict) verdict {
	switch {
	case v.kind == kindFailed:
		return returnedAndHeld(fmt.Errorf("another delivery of the same message failed: %w", v.err))
	case v.kind == kindDone && v.applied && bytes.Equal(p.fingerprint, other.fingerprint):
		return verdict{kind: kindDone}
	default:
		return again(0, nil)
	}
}

// tells is whether a first copy's outcome is all that another one needs. Where the router publishes outputs it has to have
// them from the database: nobody knows whether the first one's delivery still counts.
func (m *Middleware[T]) tells() bool { return !m.cfg.OutputsThroughRouter }

// follow waits for the first copy's outcome, where there is one in flight. None: this is the first. Meanwhile it has no place
// among those of its order key: nobody keeps later ones from running.
func (m *Middleware[T]) follow(p *pending[T]) verdict {
	if m.cfg.Guarantee == AtLeastOnce || len(p.key) == 0 {
		return verdict{} // no receipt: each delivery is on its own
	}
	for !m.inside.claim(p) {
		v := m.awaitFirst(p)
		if v.kind == kindDone {
			v = done(&m.counters.replayed)
		}
		if v.kind != kindAgain {
			return v
		}
	}
	return verdict{}
}

// awaitFirst waits while the first copy has not begun, and then for as long as two transactions may last: one that needs longer
// is waited for by the broker. How long the line before the first copy is says nothing about it.
func (m *Middleware[T]) awaitFirst(p *pending[T]) verdict {
	patience := 2 * m.cfg.TxBudget
	for left := patience; left > 0; left = m.inside.left(p, patience) {
		timer := time.NewTimer(left)
		select {
		case <-p.wake:
			timer.Stop()
			return p.v
		case <-p.ctx.Done():
			timer.Stop()
			return m.followNoMore(p)
		case <-timer.C:
		}
	}
	return m.followNoMore(p)
}

// followNoMore ends the wait for a first copy that was not heard of.
func (m *Middleware[T]) followNoMore(p *pending[T]) verdict {
	if !m.inside.stop(p) {
		<-p.wake
		return p.v
	}
	if err := p.ctx.Err(); err != nil {
		return returned(err)
	}
	return returnedAndHeld(fmt.Errorf("%w: another delivery of the same message is still in flight", ErrContention))
}
