package sdk

import (
	"context"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// subscription is one call of Subscribe. Its goroutines:
//
//   - run: opens sources, receives, and in the end drains and closes (intake.go, drain.go);
//   - handOut: offers messages one by one, in order (handout.go);
//   - one settler per source (settler.go);
//   - one waiter per message that was handed out (handout.go), one per poison call (poison.go).
//
// There is one lock, mu, for the subscription and its sessions and deliveries. Events that are found under the lock are
// reported by unlock, after it is released: an observer never runs under it.
type subscription struct {
	owner  *Subscriber
	topic  string
	base   context.Context // carries the values of Subscribe's context, never cancelled
	out    chan *message.Message
	life   context.Context // ended by end: no more intake, nothing more is handed out
	cancel context.CancelFunc
	over   chan struct{} // closed when nothing more is waited for
	done   chan struct{} // closed when everything is over
	unhook func() bool   // detaches end from Subscribe's context

	failures int // of opening, in a row; used by run alone

	readyWake chan struct{} // capacity 1: something to hand out
	spaceWake chan struct{} // capacity 1: a slot is free, or a delivery less to wait for

	waiters  sync.WaitGroup
	sessions sync.WaitGroup // settlers

	mu       sync.Mutex
	events   []Event    // to be reported by unlock
	ready    fifo       // received, to be handed out
	again    fifo       // held ones that are due: older than the ready ones, so they go first
	session  *session   // the current one; nil while none is open
	orphans  inflights  // handed out, source or lease lost, handler has not decided
	draining bool       // nothing is held or handed out any more
	endedAt  time.Time  // when end was called
	attempts attemptLog // attempts of messages that were requeued through the broker
}

func newSubscription(ctx context.Context, owner *Subscriber, topic string) *subscription {
	life, cancel := context.WithCancel(context.Background())
	return &subscription{
		owner:     owner,
		topic:     topic,
		base:      context.WithoutCancel(ctx),
		out:       make(chan *message.Message),
		life:      life,
		cancel:    cancel,
		over:      make(chan struct{}),
		done:      make(chan struct{}),
		readyWake: make(chan struct{}, 1),
		spaceWake: make(chan struct{}, 1),
		attempts:  attemptLog{limit: 4 * owner.cfg.MaxInFlight},
	}
}

// openFirst opens the first source for Subscribe: it gives up when ctx is done, or when the subscriber stops.
func (s *subscription) openFirst(ctx context.Context) (*session, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	sess, err := s.open(ctx)
	if !s.isEnded() {
		return sess, err
	}
	if err == nil {
		sess.closeSource()
	}
	return nil, ErrClosed
}

// start launches the goroutines. ctx is Subscribe's.
func (s *subscription) start(ctx context.Context, first *session) {
	s.report(Event{Kind: EventSourceOpened, Attempt: 1})
	handedOut := make(chan struct{})
	go func() {
		defer close(handedOut)
		s.greet(first.limits)
		s.handOut()
	}()
	s.unhook = context.AfterFunc(ctx, s.end)
	go s.run(first, handedOut)
}

// run lives as long as the subscription.
func (s *subscription) run(sess *session, handedOut <-chan struct{}) {
	for sess != nil {
		s.adopt(sess)
		opened := time.Now()
		err := s.receive(sess)
		if s.isEnded() {
			break
		}
		s.lock()
		s.lose(sess, err)
		s.unlock()
		sess = s.reopen(time.Since(opened))
	}
	s.end()
	s.unhook()
	<-handedOut
	s.drain()
	close(s.out)
	s.owner.remove(s)
}

// adopt makes sess the current session and starts its settler.
func (s *subscription) adopt(sess *session) {
	s.lock()
	s.session = sess
	s.unlock()
	s.sessions.Add(1)
	go func() {
		defer s.sessions.Done()
		sess.settleLoop()
	}()
}

// end stops intake and hand-out; run does the rest. It may be called any number of times.
func (s *subscription) end() {
	s.lock()
	if s.endedAt.IsZero() {
		s.endedAt = time.Now()
	}
	s.unlock()
	s.cancel()
}

func (s *subscription) isEnded() bool { return s.life.Err() != nil }

func (s *subscription) inFlight() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unsettled()
}

// unsettled is called under the lock.
func (s *subscription) unsettled() int {
	n := s.orphans.count
	if s.session != nil {
		n += s.session.live.count
	}
	return n
}

func (s *subscription) cfg() *SubscriberConfig { return &s.owner.cfg }

func (s *subscription) lock() { s.mu.Lock() }

func (s *subscription) unlock() {
	events := s.events
	s.events = nil
	s.mu.Unlock()
	if len(events) > 0 {
		s.owner.report.report(events...)
	}
}

// note keeps an event until unlock. It is called under the lock.
func (s *subscription) note(e Event) {
	e.Topic, e.Group = s.topic, s.owner.cfg.Group
	s.events = append(s.events, e)
}

func (s *subscription) report(e Event) {
	e.Topic, e.Group = s.topic, s.owner.cfg.Group
	s.owner.report.report(e)
}

// pause waits for d; it returns false if ctx ends before.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// signal wakes the one goroutine that waits on a channel of capacity 1.
func signal(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}
