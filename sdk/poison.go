package sdk

import (
	"errors"
	"fmt"
)

// poison decides about a delivery that could not be decoded. It is not part of the hand-out order, so it blocks nobody. It
// is called under the lock.
func (s *subscription) poison(e *inflight) {
	s.note(Event{
		Kind: EventPoison, ID: e.delivery.ID, Token: e.delivery.Token, Attempt: e.attempt, Err: e.delivery.Err,
	})
	switch {
	case s.cfg().Poison != nil:
		s.running(e)
		go s.callPoison(e, e.try)
	case e.session.caps.Reject:
		s.settle(e, Reject, 0)
	default:
		s.requeueUndecodable(e)
	}
}

// callPoison is not waited for beyond DrainTimeout: the function is the user's. A panic and a runtime.Goexit fail the
// attempt like an error.
func (s *subscription) callPoison(e *inflight, t *try) {
	err := errors.New("poison function did not return")
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("poison function panicked: %v", r)
		}
		s.poisoned(e, t, err)
	}()
	err = s.cfg().Poison(t, e.delivery)
}

// poisoned turns what the poison function returned into a verdict.
func (s *subscription) poisoned(e *inflight, t *try, err error) {
	s.lock()
	defer s.unlock()
	switch {
	case e.try != t: // a late answer about an attempt that was abandoned
	case e.phase == phaseOrphaned:
		s.forgetOrphan(e)
	case e.phase == phaseRunning && err == nil:
		s.settle(e, Ack, 0)
	case e.phase == phaseRunning:
		s.nacked(e)
	}
}

// requeueUndecodable sends a delivery back at the longest backoff: another version of the program may be able to decode it.
// It is called under the lock.
func (s *subscription) requeueUndecodable(e *inflight) {
	sess, longest := e.session, s.cfg().Backoff.Max
	switch {
	case s.draining:
		s.settle(e, Requeue, sess.brokerDelay(longest))
	case sess.delaysRequeue():
		s.settle(e, Requeue, longest)
	case sess.canHold(e, longest):
		s.hold(e, longest, false)
	default:
		s.hold(e, max(sess.safeHold(e), s.cfg().Backoff.Min), false)
	}
}
