package sdk

import (
	"time"
)

// holdMax is the longest delay that the engine prefers to hold itself.
const holdMax = 5 * time.Second

// nacked finds the delay of a nacked message. It is called under the lock.
func (s *subscription) nacked(e *inflight) {
	if s.draining && e.held { // it was with no handler
		s.settle(e, Requeue, 0)
		return
	}
	backoff := s.cfg().Backoff
	delay, asked := e.try.info.RequeueDelay()
	if !asked {
		delay = backoff.Delay(e.attempt)
	}
	s.requeue(e, max(delay, backoff.Min))
}

// requeue brings a message back after a delay that is never nothing. Short delays are held here, which keeps order, routing
// and the count of attempts; long ones are the broker's where it can. It is called under the lock.
func (s *subscription) requeue(e *inflight, delay time.Duration) {
	sess := e.session
	short := delay <= holdMax && (sess.leases == 0 || delay < sess.leases)
	switch {
	case s.draining:
		s.settle(e, Requeue, sess.brokerDelay(delay))
	case short && sess.canHold(e, delay):
		s.hold(e, delay, true)
	case sess.delaysRequeue():
		s.settle(e, Requeue, delay)
	case sess.canHold(e, delay):
		s.hold(e, delay, true)
	default:
		s.hold(e, max(sess.safeHold(e), s.cfg().Backoff.Min), false)
	}
}

// hold keeps a delivery, and its slot, for a while: then comes a new attempt, or else a requeue without delay. It is called
// under the lock.
func (s *subscription) hold(e *inflight, delay time.Duration, again bool) {
	e.phase = phaseHeld
	e.again = again
	e.tries = 0
	e.settlement = Settlement{Token: e.delivery.Token, Verdict: Requeue}
	e.try.cancel(nil)
	sess := e.session
	sess.timers.set(e, time.Now().Add(delay))
	signal(sess.wake)
	if s.owner.report.wants() {
		s.note(Event{Kind: EventHeld, ID: e.delivery.ID, Token: e.delivery.Token, Attempt: e.attempt, Delay: delay})
	}
}

// abandon requeues a message that was not settled within MaxProcessing. Its next attempt belongs to whoever the broker gives
// it to, because its handler may still run here. It is called under the lock.
func (s *subscription) abandon(e *inflight) {
	s.note(Event{Kind: EventAbandoned, ID: e.delivery.ID, Token: e.delivery.Token, Attempt: e.attempt})
	e.try.cancel(ErrAbandoned)
	s.settle(e, Requeue, e.session.brokerDelay(s.cfg().Backoff.Delay(e.attempt)))
}

// delaysRequeue tells whether the broker takes a delay.
func (s *session) delaysRequeue() bool { return s.caps.DelayedRequeue && !s.noDelay }

// brokerDelay is the delay as far as the broker can take it.
func (s *session) brokerDelay(delay time.Duration) time.Duration {
	if s.delaysRequeue() {
		return delay
	}
	return 0
}
