package idempotency

import (
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// errStandsStill is what the log says about a subscription that stands still.
var errStandsStill = errors.New("messages of failing order keys take more than half of the window")

// errParked is what the log says about parked messages.
var errParked = errors.New("order keys fail, and their messages took more than half of the window")

// standsStill tells whether nothing more is taken because of what is held. While a lost message is waited for, it must be
// able to come. It is called under the mutex.
func (s *orderedSubscription) standsStill() bool {
	return s.held > s.window/2 && s.lost == 0 && !s.stopping && !s.inClosed
}

// noteStill keeps the beginning of a standstill. The log line that it gives is to be written without the mutex.
func (s *orderedSubscription) noteStill(stands bool) (tell func()) {
	if stands != s.still.IsZero() {
		return nil
	}
	fields := watermill.LogFields{"topic": s.topic, "failing_order_keys": len(s.shaky), "messages_held": s.held, "window": s.window}
	if stands {
		s.still = time.Now()
		return func() {
			s.order.log.Error("Order: the subscription stands still until they are handled; what failed goes on being tried", errStandsStill, fields)
		}
	}
	fields["stood_still"] = time.Since(s.still).String()
	s.still = time.Time{}
	return func() { s.order.log.Info("Order: the subscription goes on", fields) }
}

// noteParked tells the log when something is parked, and when nothing is any more.
func (s *orderedSubscription) noteParked() (tell func()) {
	if s.lot == nil || s.lot.told == (s.lot.messages > 0) {
		return nil
	}
	s.lot.told = s.lot.messages > 0
	fields := watermill.LogFields{
		"topic": s.topic, "handler_name": s.lot.handler, "parked_order_keys": len(s.lot.keys), "parked_messages": s.lot.messages,
	}
	if s.lot.told {
		return func() { s.order.log.Error("Order: messages are parked in the database", errParked, fields) }
	}
	return func() { s.order.log.Info("Order: no message is parked any more", fields) }
}

// health adds up what the ordered subscriptions tell.
func (o *ordering) health(h *Health) {
	if o == nil {
		return
	}
	o.mu.Lock()
	subs := make([]*orderedSubscription, 0, len(o.subs))
	for s := range o.subs {
		subs = append(subs, s)
	}
	o.mu.Unlock()
	for _, s := range subs {
		s.mu.Lock()
		h.FailingKeys += len(s.shaky)
		h.Held += s.held
		if s.lot != nil {
			h.ParkedKeys += len(s.lot.keys)
			h.Parked += s.lot.messages
		}
		if since := s.still; !since.IsZero() {
			h.StandsStill = true
			if h.StandsStillSince.IsZero() || since.Before(h.StandsStillSince) {
				h.StandsStillSince = since
			}
		}
		s.mu.Unlock()
	}
}
