package sdk

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// The wait after a poll that found nothing: it doubles from the first to the second, and starts anew at the next message.
const (
	emptyPollMin = 50 * time.Millisecond
	emptyPollMax = time.Second
)

// probeAfter is how long a full window goes on before the source is asked whether it still lives.
const probeAfter = 50 * time.Millisecond

// receive takes deliveries from the session until its source ends, the session is given up, or the subscription ends.
// The error is the source's; nil where the reason is ours.
func (s *subscription) receive(sess *session) error {
	ctx, cancel := context.WithCancel(sess.ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	idle := emptyPollMin
	for {
		limit, probe := s.waitForSpace(ctx, sess)
		if limit == 0 {
			return nil
		}
		deliveries, err := sess.source.Receive(ctx, limit)
		if len(deliveries) > 0 {
			s.take(sess, deliveries)
			idle = emptyPollMin
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if len(deliveries) == 0 {
			s.waitIdle(ctx, idle, probe)
			idle = min(2*idle, emptyPollMax)
		}
	}
}

// waitForSpace blocks until there are free slots and returns their number, or 0 when ctx is done.
//
// While the window is full it does not wait for long: a source that is lost says so only to Receive, and resuming must not
// wait for the handlers that fill the window (F01). So it then lets Receive probe, which cannot bring anything as long as
// the broker keeps to the window (D10).
func (s *subscription) waitForSpace(ctx context.Context, sess *session) (limit int, probe bool) {
	var timeout <-chan time.Time
	for {
		if ctx.Err() != nil {
			return 0, false
		}
		free, full := s.space(sess)
		if free > 0 {
			return free, false
		}
		if full && timeout == nil {
			timer := time.NewTimer(probeAfter)
			defer timer.Stop()
			timeout = timer.C
		}
		select {
		case <-s.spaceWake:
		case <-ctx.Done():
		case <-timeout:
			return 1, true
		}
	}
}

// waitIdle waits after a poll that found nothing; after a probe a free slot ends it.
func (s *subscription) waitIdle(ctx context.Context, d time.Duration, probe bool) {
	var space <-chan struct{}
	if probe {
		space = s.spaceWake
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-space:
	case <-ctx.Done():
	}
}

// space is the number of free slots, and whether the source's window is exactly full. Orphans may fill a second window, so
// that a lost source is resumed without waiting for its handlers (F01), but no more than that (F05).
func (s *subscription) space(sess *session) (free int, full bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	window, live := s.cfg().MaxInFlight, sess.live.count
	return max(0, min(window, 2*window-s.orphans.count)-live), live == window
}

// take puts new deliveries into the hand-out order; those that cannot be decoded go to the poison path instead.
func (s *subscription) take(sess *session, deliveries []Delivery) {
	fresh := make([]*inflight, len(deliveries))
	leaseEnd := sess.freshLease(time.Now())
	for i, d := range deliveries {
		fresh[i] = &inflight{session: sess, delivery: d, attempt: max(d.Attempt, 1), leaseEnd: leaseEnd}
		s.prepare(fresh[i])
	}
	s.lock()
	defer s.unlock()
	for _, e := range fresh {
		if known := s.attempts.of(e.delivery.ID); known > 0 {
			e.attempt = max(e.attempt, known+1)
			e.count()
		}
		sess.live.push(e)
		if e.delivery.Err != nil {
			s.poison(e)
			continue
		}
		e.phase = phaseReady
		s.ready.push(e)
	}
	signal(s.readyWake)
}

// reopen opens a new source after one that lived for a while. It returns nil when the subscription ends, or when the driver
// was closed and there is nothing to come back to.
func (s *subscription) reopen(lived time.Duration) *session {
	backoff := s.cfg().Backoff
	if lived >= min(backoff.Ceiling(s.failures), 2*backoff.Min) {
		s.failures = 0
	} else {
		s.failures++
	}
	for delay := s.reopenDelay(); ; delay = s.reopenDelay() {
		if !pause(s.life, delay) {
			return nil
		}
		sess, err := s.open(s.life)
		if err == nil {
			s.report(Event{Kind: EventSourceOpened, Attempt: s.failures + 1})
			return sess
		}
		if s.isEnded() {
			return nil
		}
		s.failures++
		s.report(Event{Kind: EventOpenFailed, Attempt: s.failures, Err: err})
		if errors.Is(err, ErrClosed) {
			s.owner.endedBy(fmt.Errorf("the subscription to topic %q ended because its driver was closed: %w", s.topic, err))
			return nil
		}
	}
}

// reopenDelay is short for the first try after a healthy source, and never nothing: a thousand consumers of one broker must
// not come back in the same instant.
func (s *subscription) reopenDelay() time.Duration {
	backoff := s.cfg().Backoff
	if s.failures == 0 {
		return rand.N(backoff.Min) + 1
	}
	return backoff.Delay(s.failures)
}
