package sdk

import (
	"context"
	"time"
)

// prepare makes the message and the context of the next attempt.
func (s *subscription) prepare(e *inflight) {
	ctx, cancel := context.WithCancelCause(s.base)
	t := e.nextTry()
	t.cancel = cancel
	t.info.Token = e.delivery.Token
	t.info.Topic, t.info.Group = s.topic, s.owner.cfg.Group
	t.info.Limits = e.session.limits
	t.info.origin, t.info.try, t.info.ending = e, t, s.life.Done()
	t.deliveryContext = deliveryContext{Context: ctx, info: &t.info}
	if e.delivery.Err == nil {
		t.msg = toWatermill(t, &e.delivery.Message)
	}
	e.try = t
	e.held = false
	e.count()
}

// count tells the attempt's number to its handler.
func (e *inflight) count() {
	e.try.info.Attempt = e.attempt
	e.try.info.Redelivered = e.delivery.Redelivered || e.attempt > 1
}

// handOut offers messages one by one until the subscription ends.
func (s *subscription) handOut() {
	for {
		e := s.nextOffer()
		if e == nil {
			return
		}
		select {
		case s.out <- e.try.msg:
			s.handedOut(e)
		case <-e.try.Done(): // lost while it was offered
		case <-s.life.Done(): // it stays on the session's list, from where drain sends it back
			return
		}
	}
}

// nextOffer blocks until there is a message to offer; nil when the subscription ends.
func (s *subscription) nextOffer() *inflight {
	for {
		if s.isEnded() {
			return nil
		}
		if e := s.popReady(); e != nil {
			return e
		}
		select {
		case <-s.readyWake:
		case <-s.life.Done():
			return nil
		}
	}
}

func (s *subscription) popReady() *inflight {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		e := s.again.pop()
		if e == nil {
			e = s.ready.pop()
		}
		if e == nil || e.phase == phaseReady {
			return e
		}
	}
}

// handedOut is called after a message was taken by its reader.
func (s *subscription) handedOut(e *inflight) {
	s.lock()
	if e.phase == phaseReady {
		s.running(e)
	} else { // lost in the very moment it was taken
		s.orphan(e)
		e.deadline = time.Now().Add(s.cfg().MaxProcessing)
	}
	s.waiters.Add(1)
	s.unlock()
	go s.await(e, e.try)
}

// running notes that the message is with its handler. It is called under the lock.
func (s *subscription) running(e *inflight) {
	e.phase = phaseRunning
	s.startClock(e)
}

// startClock begins the time of MaxProcessing. It is called under the lock.
func (s *subscription) startClock(e *inflight) {
	e.deadline = time.Now().Add(s.cfg().MaxProcessing)
	if sess := e.session; sess.sweepAt.IsZero() {
		sess.sweepAt = e.deadline
		signal(sess.wake)
	}
}

// await waits for the decision about one attempt.
func (s *subscription) await(e *inflight, t *try) {
	defer s.waiters.Done()
	select {
	case <-t.msg.Acked():
		s.decided(e, t, Ack)
		return
	case <-t.msg.Nacked():
		s.decided(e, t, Requeue)
		return
	case <-t.Done():
	}
	wait, orphaned := s.patience(e)
	if !orphaned {
		return // abandoned, or given up: nobody asks any more
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-t.msg.Acked():
		s.decided(e, t, Ack)
	case <-t.msg.Nacked():
		s.decided(e, t, Requeue)
	case <-timer.C:
		s.abandonOrphan(e)
	case <-s.over:
	}
}

// patience tells how long an orphan may still run.
func (s *subscription) patience(e *inflight) (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Until(e.deadline), e.phase == phaseOrphaned
}

func (s *subscription) abandonOrphan(e *inflight) {
	s.lock()
	defer s.unlock()
	s.note(Event{Kind: EventAbandoned, ID: e.delivery.ID, Token: e.delivery.Token, Attempt: e.attempt})
	s.forgetOrphan(e)
}

// decided turns what happened to a message into a verdict.
func (s *subscription) decided(e *inflight, t *try, v Verdict) {
	s.lock()
	defer s.unlock()
	switch {
	case e.try != t: // a late decision about an attempt that was abandoned
	case e.phase == phaseOrphaned:
		e.settlement = Settlement{Token: e.delivery.Token, Verdict: v}
		s.noteSettled(e, SettleOutcomeFailed, ErrDeliveryLost)
		s.forgetOrphan(e)
	case e.phase == phaseRunning && v == Ack:
		s.settle(e, Ack, 0)
	case e.phase == phaseRunning:
		s.nacked(e)
	}
}
