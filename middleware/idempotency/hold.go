package idempotency

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/ThreeDotsLabs/watermill/message"
)

// maxFailing is the most identities whose failures are counted in memory. Beyond it one is forgotten for each new one,
// which then starts with a short delay again.
const maxFailing = 4096

// holdBack slows a message down that is about to be returned. An sdk.Subscriber backs off by itself: it only needs to be
// told a delay that was asked for. A foreign subscriber may bring a nacked message back at once: so it is held here,
// without transaction or lane, for the backoff of this identity's failures in this process, for the delay asked for, or
// until its context is done. Within one delivery only the first failure is held for the backoff: an outer Retry has
// intervals of its own.
//
// One with an order key is held by Ordered, together with those behind it.
func (m *Middleware[T]) holdBack(p *pending[T], asked time.Duration) {
	if p.ticket != nil {
		p.ticket.after(asked)
		return
	}
	if p.delivery != nil {
		if asked > 0 {
			p.delivery.RequeueAfter(asked)
		}
		return
	}
	count, first := m.failures.note(p.hash(m.seed), p.msg)
	delay := asked
	if delay <= 0 {
		if !first {
			return
		}
		delay = m.cfg.RetryBackoff.Delay(count)
	}
	if lease := m.cfg.Limits.Lease; lease > 0 {
		delay = min(delay, lease/2)
	}
	pause(p.ctx, delay)
}

// hash names an identity in the table of failures. Two that collide only share a delay.
func (p *pending[T]) hash(seed maphash.Seed) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	_, _ = h.WriteString(p.scope)
	_ = h.WriteByte(0)
	if len(p.key) > 0 {
		_, _ = h.Write(p.key)
	} else {
		_, _ = h.WriteString(p.handler)
		_, _ = h.WriteString(p.msg.UUID)
	}
	return h.Sum64()
}

// failing counts failed deliveries of identities, in bounded memory.
type failing struct {
	some    atomic.Bool // entries is not empty: spares the way of messages that never failed
	mu      sync.Mutex
	entries map[uint64]failedDelivery
}

type failedDelivery struct {
	count int
	last  weak.Pointer[message.Message]
}

// note counts a failure. first is false where this very delivery has failed before, which does not count again.
func (f *failing) note(id uint64, msg *message.Message) (count int, first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.entries == nil {
		f.entries = make(map[uint64]failedDelivery)
	}
	e, known := f.entries[id]
	if known && e.last.Value() == msg {
		return e.count, false
	}
	if !known && len(f.entries) >= maxFailing {
		for victim := range f.entries {
			delete(f.entries, victim)
			break
		}
	}
	e = failedDelivery{count: e.count + 1, last: weak.Make(msg)}
	f.entries[id] = e
	f.some.Store(true)
	return e.count, true
}

// forget ends the count of an identity that went through.
func (f *failing) forget(id uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.entries, id)
	f.some.Store(len(f.entries) > 0)
}
