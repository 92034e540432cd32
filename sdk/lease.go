package sdk

import (
	"context"
	"errors"
	"time"
)

// leaseInterval is the time between two extensions: two of them may fail before a lease ends.
func (s *session) leaseInterval() time.Duration { return s.leases / 3 }

// freshLease is the end of a lease that begins now; zero where nothing is lent.
func (s *session) freshLease(now time.Time) time.Time {
	if s.leases == 0 {
		return time.Time{}
	}
	return now.Add(s.limits.Lease)
}

// canHold tells whether a delivery stays ours for so long.
func (s *session) canHold(e *inflight, d time.Duration) bool {
	return s.leases == 0 || s.extender != nil || d < s.safeHold(e)
}

// safeHold is what is left of a lease that cannot be extended, less a margin for the way to the broker.
func (s *session) safeHold(e *inflight) time.Duration {
	return time.Until(e.leaseEnd) - s.leases/10
}

// leasesDue gives up deliveries whose lease is over and lists those to be extended. It is called under the lock.
func (s *session) leasesDue(now time.Time) []*inflight {
	if s.leaseAt.IsZero() || s.leaseAt.After(now) {
		return nil
	}
	var due []*inflight
	next := now.Add(s.leaseInterval())
	enough := now.Add(s.limits.Lease - s.leaseInterval()/2) // these were received, or extended, a moment ago
	for _, e := range s.live.all() {
		switch {
		case !e.leaseEnd.After(now):
			s.sub.loseDelivery(e, true)
			s.sub.freed()
			continue
		case s.extender != nil && e.leaseEnd.Before(enough):
			due = append(due, e)
		}
		next = earlier(next, e.leaseEnd)
	}
	s.leaseAt = next
	return due
}

// extend calls Extend and spreads its answer.
func (s *session) extend(due []*inflight) {
	tokens := make([]Token, len(due))
	for i, e := range due {
		tokens[i] = e.delivery.Token
	}
	start := time.Now()
	ctx, cancel := context.WithTimeout(s.ctx, s.callTimeout())
	err := s.extender.Extend(ctx, tokens, s.limits.Lease)
	cancel()
	errs := EntryErrors(err, len(due))
	s.sub.lock()
	defer s.sub.unlock()
	for i, e := range due {
		if e.phase != phaseGone && e.phase != phaseOrphaned {
			s.extended(e, errs[i], start)
		}
	}
}

// extended takes in the answer for one delivery. It is called under the lock.
func (s *session) extended(e *inflight, err error, start time.Time) {
	switch {
	case err == nil:
		e.leaseEnd = start.Add(s.limits.Lease)
	case errors.Is(err, ErrStaleToken):
		s.sub.loseDelivery(e, true)
		s.sub.freed()
	case errors.Is(err, ErrUnsupported):
		s.extender = nil
	default: // soon again, for as long as the lease lasts
		s.leaseAt = earlier(s.leaseAt, time.Now().Add(s.leaseInterval()/4))
	}
}
