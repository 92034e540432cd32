package idempotency

import (
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// ticket is a delivery's place in the line of its order key, given by Ordered for one hand-out. All methods may be called
// on nil, which is a delivery without order. None blocks, and none calls back: they may be called under any lock.
//
// What takes a delivery through the middleware uses it like this, each time the delivery comes in (an outer Retry brings
// the same one, with the same ticket, several times):
//
//  1. ticketFor, before anything else.
//  2. behind: if it is true the delivery goes back at once, uncharged. Else it takes its place in the queue, and then says
//     reached: only now the next one of its line is handed out. The queue keeps that order within a line.
//  3. behind again, just before its handler runs: an earlier one may have failed since.
//  4. passed once it is durable, or stumbled when it goes back for whatever reason (error, panic, Goexit, cancelled,
//     behind), before anything later of its line may run. after, where a delay was asked for, comes before the return.
//
// Whatever goes back is held by Ordered, not by the middleware, also for a foreign subscriber.
//
// A ticket is the context of the copy that is handed out.
type ticket struct {
	context.Context
	order *ordering
	place *place // nil: the message has no order key
	fault error  // OrderKey panicked

	msg    *message.Message
	cancel context.CancelCauseFunc

	// Guarded by the subscription's mutex.
	reachedQueue uint64        // when it took its place in the queue; 0: not yet
	durable      bool          // it passed
	returned     bool          // it goes back
	innocent     bool          // because of an earlier one
	asked        time.Duration // the delay asked for; 0: none
}

type ticketKey struct{ order *ordering }

// Value gives the ticket to its own middleware, and else what the context below holds.
func (t *ticket) Value(key any) any {
	if k, ok := key.(ticketKey); ok && k.order == t.order {
		return t
	}
	return t.Context.Value(key)
}

// ticketFor gives the ticket of a delivery: nil where there is no OrderKey, or where it gives "". Its error is
// ErrNotOrdered: the delivery has an order key, but did not come through Ordered.
func (m *Middleware[T]) ticketFor(msg *message.Message) (*ticket, error) {
	if m.order == nil {
		return nil, nil
	}
	t, ok := msg.Context().Value(ticketKey{m.order}).(*ticket)
	switch {
	case ok && t.place != nil:
		return t, nil
	case ok:
		return nil, t.fault
	}
	key, err := m.order.key(msg)
	if err == nil && key != "" {
		err = ErrNotOrdered
	}
	return nil, err
}

// line names the order key; "" where there is none.
func (t *ticket) line() string {
	if t == nil {
		return ""
	}
	return t.place.line.key
}

// reached says that the delivery has its place in the queue: the next one of its key may come.
func (t *ticket) reached() {
	if t == nil {
		return
	}
	s := t.place.line.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if !t.isOut() {
		return
	}
	s.reached++
	t.reachedQueue, t.returned, t.innocent = s.reached, false, false
	t.place.line.advance()
	s.changed()
}

// behind tells whether an earlier delivery of the key is not in its place: it failed and has not passed since, or is on its
// way again, or took its place again only after this one. Then this one has to go back, uncharged.
func (t *ticket) behind() bool {
	if t == nil {
		return false
	}
	p := t.place
	s := p.line.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case p.ticket != t: // it was nacked before it came here: it is handed out again
		return true
	case p.state == placeLost:
		return true
	case t.isOut() && p.missesEarlier():
		t.innocent = true
		return true
	default:
		return false
	}
}

// stumbled says that the delivery goes back unhandled: from now on later ones of its key are behind.
func (t *ticket) stumbled() {
	if t == nil {
		return
	}
	s := t.place.line.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.isOut() {
		t.place.stumble(t)
	}
}

// passed says that the delivery is done, durably.
func (t *ticket) passed() {
	if t == nil {
		return
	}
	s := t.place.line.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if !t.isOut() {
		return
	}
	if t.reachedQueue == 0 {
		s.reached++
		t.reachedQueue = s.reached
	}
	t.durable, t.returned, t.innocent = true, false, false
	t.place.recover()
	t.place.line.advance()
	s.changed()
}

// after asks for a delay before the delivery is handed out again; otherwise Config.RetryBackoff applies. Not positive means
// nothing was asked for.
func (t *ticket) after(d time.Duration) {
	if t == nil {
		return
	}
	s := t.place.line.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	t.asked = max(d, 0)
}

// isOut tells whether this is the present hand-out of its message, and neither settled nor lost. It may still be offered as
// far as the loop knows. It is called under the lock.
func (t *ticket) isOut() bool {
	return t.place.ticket == t && (t.place.state == placeOut || t.place.state == placeOffered)
}
