package sdk

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"time"
)

// settleTries is how often a settlement is tried before it is given up, while its source lives.
const settleTries = 5

// work is what the settler found to do, and when to look again.
type work struct {
	settle, extend []*inflight
	next           time.Time
}

// settleLoop is the goroutine that calls Settle and Extend of one source. It also is the session's clock: for MaxProcessing,
// held messages, settlements to be tried again, and leases. It closes a source that is lost.
func (s *session) settleLoop() {
	defer close(s.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for s.ctx.Err() == nil {
		w := s.gather(time.Now())
		if len(w.extend) > 0 {
			s.extend(w.extend)
		}
		if len(w.settle) > 0 {
			s.settleBatch(w.settle)
		}
		if len(w.extend)+len(w.settle) > 0 {
			continue
		}
		timer.Stop()
		if !w.next.IsZero() {
			timer.Reset(time.Until(w.next))
		}
		select {
		case <-s.wake:
			runtime.Gosched() // decisions that are being made right now join the batch
		case <-timer.C:
		case <-s.ctx.Done():
		}
	}
	if s.isLost() {
		s.closeSource()
	}
}

func (s *session) isLost() bool {
	s.sub.mu.Lock()
	defer s.sub.mu.Unlock()
	return s.lost
}

// gather does what is due and takes what has accumulated.
func (s *session) gather(now time.Time) work {
	s.sub.lock()
	defer s.sub.unlock()
	s.sweep(now)
	for e := s.timers.due(now); e != nil; e = s.timers.due(now) {
		s.sub.ring(e)
	}
	w := work{extend: s.leasesDue(now)}
	if len(s.queue) > 0 {
		w.settle = make([]*inflight, 0, len(s.queue))
		for _, e := range s.queue {
			if e.phase == phaseSettling { // else it was lost meanwhile
				e.sending = true
				w.settle = append(w.settle, e)
			}
		}
		clear(s.queue)
		s.queue = s.queue[:0]
	}
	w.next = earlier(s.sweepAt, s.leaseAt)
	if len(s.timers) > 0 {
		w.next = earlier(w.next, s.timers[0].at)
	}
	return w
}

// earlier is the earlier of two times, of which a zero one means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}

// sweep abandons what ran longer than MaxProcessing.
func (s *session) sweep(now time.Time) {
	if s.sweepAt.IsZero() || s.sweepAt.After(now) {
		return
	}
	s.sweepAt = time.Time{}
	for e := s.live.first; e != nil; e = e.next {
		if e.phase != phaseRunning || e.held {
			continue
		}
		if e.deadline.After(now) {
			s.sweepAt = earlier(s.sweepAt, e.deadline)
			continue
		}
		s.sub.abandon(e)
	}
}

// ring does what the alarm of e was set for.
func (s *subscription) ring(e *inflight) {
	if !e.again {
		e.phase = phaseSettling
		e.session.queue = append(e.session.queue, e)
		return
	}
	e.attempt++
	s.prepare(e)
	if e.delivery.Err != nil {
		s.poison(e)
		return
	}
	e.phase = phaseReady
	s.again.push(e)
	signal(s.readyWake)
}

// settle gives a delivery its verdict and leaves it to the settler. It is called under the lock.
func (s *subscription) settle(e *inflight, v Verdict, delay time.Duration) {
	e.phase = phaseSettling
	e.tries = 0
	e.settlement = Settlement{Token: e.delivery.Token, Verdict: v, Delay: delay}
	e.session.queue = append(e.session.queue, e)
	if len(e.session.queue) == 1 {
		signal(e.session.wake)
	}
}

// settleBatch calls Settle and spreads its answer.
func (s *session) settleBatch(batch []*inflight) {
	settlements := make([]Settlement, len(batch))
	for i, e := range batch {
		settlements[i] = e.settlement
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.callTimeout())
	err := s.source.Settle(ctx, settlements)
	cancel()
	if err == nil {
		s.sub.lock()
		defer s.sub.unlock()
		if s.sub.owner.report.wants() {
			s.sub.events = slices.Grow(s.sub.events, len(batch)) // one event each
		}
		for _, e := range batch {
			s.sub.settled(e)
		}
		return
	}
	_, single := errors.AsType[*BatchError](err)
	errs := EntryErrors(err, len(batch))
	s.sub.lock()
	defer s.sub.unlock()
	for i, e := range batch {
		if errs[i] == nil {
			s.sub.settled(e)
		} else {
			s.sub.settleFailed(e, errs[i], !single)
		}
	}
}

// callTimeout leaves time to extend leases although a call hangs.
func (s *session) callTimeout() time.Duration {
	if s.leases > 0 {
		return min(settleTimeout, s.leases/3)
	}
	return settleTimeout
}

// settled ends a delivery whose settlement succeeded. It is called under the lock.
func (s *subscription) settled(e *inflight) {
	e.sending = false
	outcome := SettleOutcomeSent
	if e.session.caps.Settle == SettleConfirmed {
		outcome = SettleOutcomeConfirmed
	}
	if s.owner.report.wants() {
		s.noteSettled(e, outcome, nil)
	}
	if e.settlement.Verdict == Requeue {
		s.attempts.remember(e.delivery.ID, e.attempt)
	} else {
		s.attempts.forget(e.delivery.ID)
	}
	if e.phase == phaseSettling {
		s.finish(e, nil)
	}
}

// settleFailed decides what follows a failed settlement. It is called under the lock.
func (s *subscription) settleFailed(e *inflight, err error, wholeCall bool) {
	e.sending = false
	if e.phase != phaseSettling { // lost or given up while the driver had it
		s.noteSettled(e, outcomeOfFailure(err), err)
		return
	}
	if errors.Is(err, ErrStaleToken) {
		s.noteSettled(e, SettleOutcomeFailed, err)
		s.finish(e, ErrDeliveryLost)
		return
	}
	e.tries++
	final := OutcomeOf(err) == OutcomePermanent || (isRefusal(err) && e.settlement.Verdict != Ack)
	if e.tries < settleTries && !final {
		e.again = false
		e.session.timers.set(e, time.Now().Add(s.cfg().Backoff.Delay(e.tries)))
		return
	}
	s.noteSettled(e, outcomeOfFailure(err), err)
	s.refused(e, err, wholeCall)
}

// isRefusal tells an error that surely changed nothing and will be the same next time.
func isRefusal(err error) bool {
	return errors.Is(err, ErrUnsupported) || errors.Is(err, ErrStaleToken) || OutcomeOf(err) == OutcomePermanent
}

// refused finds a way on for a delivery that the broker does not settle as asked. It is called under the lock.
func (s *subscription) refused(e *inflight, err error, wholeCall bool) {
	switch {
	case s.draining: // closing the source gives it back
		s.finish(e, ErrDeliveryLost)
	case e.settlement.Verdict == Ack:
		s.strand(e, err, wholeCall)
	case e.settlement.Verdict == Reject:
		s.requeueUndecodable(e)
	case e.settlement.Delay > 0 && errors.Is(err, ErrUnsupported):
		e.session.noDelay = true
		s.hold(e, e.settlement.Delay, true)
	default: // the token is still ours, so the next attempt can be made here
		s.hold(e, s.cfg().Backoff.Delay(max(e.attempt, e.tries)), true)
	}
}

// strand gives up an ack that the broker does not take. Our slot is free, the broker's is not: with a lease it frees itself,
// without one only the end of the source does it, so too many of them end it. It is called under the lock.
func (s *subscription) strand(e *inflight, err error, wholeCall bool) {
	sess := e.session
	s.finish(e, nil)
	if sess.leases > 0 {
		return
	}
	sess.stranded++
	if wholeCall || 2*sess.stranded >= s.cfg().MaxInFlight {
		s.lose(sess, err)
	}
}

// finish takes a delivery off the list and ends its context. It is called under the lock.
func (s *subscription) finish(e *inflight, cause error) {
	e.session.live.remove(e)
	e.phase = phaseGone
	e.alarm++
	e.try.cancel(cause)
	s.freed()
}

func (s *subscription) noteSettled(e *inflight, outcome SettleOutcome, err error) {
	s.note(Event{
		Kind: EventSettled, ID: e.delivery.ID, Token: e.delivery.Token, Attempt: e.attempt,
		Verdict: e.settlement.Verdict, Delay: e.settlement.Delay, Outcome: outcome, Err: err,
	})
}
