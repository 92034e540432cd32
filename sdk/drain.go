package sdk

import (
	"context"
	"time"
)

// drain ends a subscription whose intake and hand-out have ended: what was not handed out goes back, what was handed out
// settles, or DrainTimeout is over; then the source closes.
func (s *subscription) drain() {
	ctx, cancel := context.WithDeadline(context.Background(), s.endedAt.Add(s.cfg().DrainTimeout))
	defer cancel()
	sess := s.sendBack()
	for s.inFlight() > 0 && ctx.Err() == nil {
		select {
		case <-s.spaceWake:
		case <-ctx.Done():
		}
	}
	s.giveUp()
	if sess != nil {
		sess.cancel()
		<-sess.done
		s.barrier(ctx, sess)
		sess.closeSource()
	}
	s.waiters.Wait()
	s.sessions.Wait()
}

// sendBack requeues at once what waits to be handed out or is held, in the order in which it came.
func (s *subscription) sendBack() *session {
	s.lock()
	defer s.unlock()
	s.draining = true
	sess := s.session
	if sess == nil {
		return nil
	}
	for e := sess.live.first; e != nil; e = e.next {
		if e.phase == phaseReady || e.phase == phaseHeld {
			e.alarm++
			s.settle(e, Requeue, 0)
		}
	}
	return sess
}

// giveUp lets go of what is not settled: contexts end, waiters too.
func (s *subscription) giveUp() {
	s.lock()
	defer s.unlock()
	if n := s.unsettled(); n > 0 {
		s.note(Event{Kind: EventDrainTimeout, Attempt: n, Err: ErrDrainTimeout})
	}
	if s.session != nil {
		for _, e := range s.session.live.all() {
			if e.phase == phaseSettling && !e.sending {
				s.noteSettled(e, SettleOutcomeFailed, ErrDrainTimeout)
			}
			s.finish(e, ErrDrainTimeout)
		}
	}
	for _, e := range s.orphans.all() {
		s.forgetOrphan(e)
	}
	close(s.over)
}

// barrier waits until settlements that were only sent have arrived. Where the time is over already it is not asked for.
func (s *subscription) barrier(ctx context.Context, sess *session) {
	b, ok := sess.source.(Barrier)
	if !ok || ctx.Err() != nil {
		return
	}
	if err := b.Barrier(ctx); err != nil {
		s.owner.cfg.Logger.Error("Delivery engine: settlements are not known to have arrived", err, map[string]any{
			"topic": s.topic, "within": time.Since(s.endedAt).String(),
		})
	}
}
