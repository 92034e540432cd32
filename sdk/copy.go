package sdk

import (
	"context"
	"time"
)

// What a subscriber decorator needs that hands out copies of its own, holds messages back, or hands them out again. It
// passes the outcome on by settling the message it got.

// Copy makes the delivery of a copy that is handed out for the again-th time more: 0 for the first hand-out. It has an
// Attempt of its own, higher by again, and a delay of its own: RequeueAfter on it tells whoever made the copy.
func (d *DeliveryInfo) Copy(again int) *DeliveryInfo {
	return &DeliveryInfo{
		Attempt:     d.Attempt + again,
		Redelivered: d.Redelivered || again > 0,
		Token:       d.Token,
		Topic:       d.Topic,
		Group:       d.Group,
		Limits:      d.Limits,
		origin:      d.origin,
		try:         d.try,
		ending:      d.ending,
	}
}

// WithDelivery gives a context that belongs to the delivery d, and else is ctx: [DeliveryFrom] finds d in it.
func WithDelivery(ctx context.Context, d *DeliveryInfo) context.Context {
	return &deliveryContext{Context: ctx, info: d}
}

// RequeueDelay is the delay that was set with RequeueAfter, at least 1 ns; false where none was.
func (d *DeliveryInfo) RequeueDelay() (time.Duration, bool) {
	v := d.delay.Load()
	return time.Duration(v), v != 0
}

// Hold says that the message is held back, not with a handler: MaxProcessing does not run until Resume. The message keeps
// its slot in the window and its lease is extended. It does nothing after the message is settled or lost. Like Resume it is
// safe for concurrent use and does not block.
func (d *DeliveryInfo) Hold() { d.clock(false) }

// Resume says that the message goes to its handler now: MaxProcessing begins anew.
func (d *DeliveryInfo) Resume() { d.clock(true) }

func (d *DeliveryInfo) clock(runs bool) {
	if d.origin == nil {
		return
	}
	e := d.origin
	s := e.session.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.try != d.try { // an earlier attempt, long gone
		return
	}
	e.held = !runs // also while it is on its way to its reader, who may be faster than we are
	if runs && e.phase == phaseRunning {
		s.startClock(e)
	}
}

// Ending is closed when the subscription ends: no more is handed out, what was is waited for. A message that is held back
// has to be nacked then, still held: it goes back to the broker at once and without delay. It is nil, and so never closed, for a delivery that no
// [Subscriber] made.
func (d *DeliveryInfo) Ending() <-chan struct{} { return d.ending }
