package sdk

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	// openTimeout bounds one Prepare and one Open.
	openTimeout = 30 * time.Second
	// settleTimeout bounds one Settle and one Extend, so that a broker that never answers holds nothing for ever (F03).
	settleTimeout = 10 * time.Second
	// closeTimeout bounds the closing of one source.
	closeTimeout = 5 * time.Second
)

// session is one source and what was taken from it. Its fields below ctx belong to the subscription's lock.
type session struct {
	sub    *subscription
	source Source
	caps   Capabilities
	limits Limits
	leases time.Duration // the lease as far as it can be relied on; 0: none
	ctx    context.Context
	cancel context.CancelFunc // ends intake and settler
	wake   chan struct{}      // capacity 1: something for the settler
	done   chan struct{}      // closed when the settler has returned

	live     inflights
	queue    []*inflight // have a verdict, in the order of decision
	timers   alarms
	sweepAt  time.Time     // the next look at MaxProcessing; zero: nothing is running
	leaseAt  time.Time     // the next look at leases; zero: none
	extender LeaseExtender // nil: leases cannot be extended
	noDelay  bool          // the broker refused a delayed requeue
	stranded int           // acks the broker does not take, though it holds the deliveries
	lost     bool
}

// open prepares topic and group and opens a source.
func (s *subscription) open(ctx context.Context) (*session, error) {
	b := s.cfg().binding(s.topic)
	prepareCtx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if err := s.owner.driver.Prepare(prepareCtx, b); err != nil {
		return nil, fmt.Errorf("prepare: %w", err)
	}
	openCtx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	source, err := s.owner.driver.Open(openCtx, b)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	if source == nil {
		return nil, errors.New("open: the driver returned neither a source nor an error")
	}
	return s.newSession(source), nil
}

func (s *subscription) newSession(source Source) *session {
	caps := source.Capabilities()
	ctx, cancel := context.WithCancel(context.Background())
	sess := &session{
		sub:    s,
		source: source,
		caps:   caps,
		limits: s.cfg().limits(caps),
		ctx:    ctx,
		cancel: cancel,
		wake:   make(chan struct{}, 1),
		done:   make(chan struct{}),
	}
	if caps.Lease > 0 {
		sess.leases = min(caps.Lease, s.cfg().Lease)
		sess.leaseAt = time.Now().Add(sess.leaseInterval())
		sess.extender, _ = source.(LeaseExtender)
	}
	return sess
}

// closeSource closes the source within its own deadline. What goes wrong is the log's: the broker takes back what is
// unsettled when the connection ends.
func (s *session) closeSource() {
	s.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if err := s.source.Close(ctx); err != nil && !errors.Is(err, ErrClosed) {
		s.sub.owner.cfg.Logger.Error("Delivery engine: close source", err, map[string]any{"topic": s.sub.topic})
	}
}

// lose ends a session whose source is lost: what is running becomes an orphan, all else is dropped. It is called under the
// lock and may be called again.
func (s *subscription) lose(sess *session, err error) {
	if sess.lost {
		return
	}
	sess.lost = true
	if err == nil {
		err = ErrDeliveryLost
	}
	s.note(Event{Kind: EventSourceLost, Err: err})
	all := sess.live.all()
	for _, e := range all { // first what is not running, so that whoever sees a context end is not handed another lost one
		if e.phase != phaseRunning {
			s.loseDelivery(e, false)
		}
	}
	for _, e := range all {
		if e.phase == phaseRunning {
			s.loseDelivery(e, false)
		}
	}
	if s.session == sess {
		s.session = nil
	}
	sess.cancel()
	s.freed()
}

// loseDelivery drops a delivery that is no longer ours. byLease says that the source lives and only this one's lease is
// over. It is called under the lock.
func (s *subscription) loseDelivery(e *inflight, byLease bool) {
	was := e.phase
	e.session.live.remove(e)
	e.alarm++
	e.phase = phaseGone
	if was == phaseRunning {
		s.orphan(e)
	}
	e.try.cancel(ErrDeliveryLost)
	if was == phaseSettling && !e.sending {
		s.noteSettled(e, SettleOutcomeFailed, ErrDeliveryLost)
	}
	if byLease {
		s.note(Event{Kind: EventDeliveryLost, ID: e.delivery.ID, Token: e.delivery.Token, Attempt: e.attempt, Err: ErrDeliveryLost})
	}
}

// orphan keeps a lost delivery in mind for as long as its handler runs, so that memory stays bounded. It is called under
// the lock.
func (s *subscription) orphan(e *inflight) {
	e.phase = phaseOrphaned
	s.orphans.push(e)
}

// forgetOrphan frees the place of an orphan. It is called under the lock.
func (s *subscription) forgetOrphan(e *inflight) {
	e.phase = phaseGone
	s.orphans.remove(e)
	s.freed()
}

// freed lets intake and drain look again. It is called under the lock.
func (s *subscription) freed() { signal(s.spaceWake) }
