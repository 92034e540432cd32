package sdk

import (
	"context"
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// decorate is the subscriber decorator that Run adds to its router.
func (p *parking) decorate(sub message.Subscriber) (message.Subscriber, error) {
	return &parkingSubscriber{parking: p, inner: sub}, nil
}

// parkingSubscriber makes a foreign subscriber shut down like one of ours: when it is to stop, what it has handed over is
// waited for first.
type parkingSubscriber struct {
	parking *parking
	inner   message.Subscriber
	lots    sync.WaitGroup
}

// Subscribe passes messages on until ctx is done. The inner subscription's context ends later: when the messages that were
// passed on are settled, because many subscribers cancel their messages with it.
func (s *parkingSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	in, err := s.inner.Subscribe(inner, topic)
	if err != nil {
		cancel()
		return nil, err
	}
	l := &lot{parking: s.parking, stop: ctx, cancel: cancel, in: in, out: make(chan *message.Message)}
	s.parking.mu.Lock()
	s.parking.lots[l] = struct{}{}
	s.parking.mu.Unlock()
	s.lots.Add(1)
	go func() {
		defer s.lots.Done()
		l.run()
	}()
	return l.out, nil
}

// Close is called when the router closes: then nothing foreign is passed on any more, and what was is waited for, on all
// subscriptions, because several of them may share the subscriber that is closed now.
func (s *parkingSubscriber) Close() error {
	s.parking.park()
	s.parking.waitIdle()
	err := s.inner.Close()
	s.lots.Wait()
	return err
}

// lot is one subscription under Run.
type lot struct {
	parking *parking
	stop    context.Context // the router's: it ends when the handler is to stop
	cancel  context.CancelFunc
	in      <-chan *message.Message
	out     chan *message.Message

	// mu is held while a foreign message is offered, so that whoever parks first and locks then sees all that were passed on.
	mu     sync.Mutex
	passed []*message.Message // foreign ones; the settled ones are dropped when there are more than bound
	bound  int
}

// run passes messages on until the inner channel closes. Its own channel closes later: when what was passed on is settled,
// and during Run's own shutdown not before the router closes, because the router closes a handler's publisher with the
// channel, and other handlers may still need that publisher.
func (l *lot) run() {
	defer l.parking.forget(l)
	defer close(l.out)
	inClosed, detached := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(detached)
		l.detach(inClosed)
	}()
	l.passAll()
	select {
	case <-l.parking.parked:
		<-l.stop.Done()
	default:
	}
	close(inClosed)
	<-detached
}

// detach ends the inner subscription when the router asks for it and what was passed on is settled.
func (l *lot) detach(inClosed <-chan struct{}) {
	defer l.cancel()
	select {
	case <-l.stop.Done():
	case <-inClosed:
		if l.stop.Err() == nil { // it ended by itself: the router finds out by its channel
			return
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), l.parking.timeout)
	defer cancel()
	l.waitIdle(ctx)
}

func (l *lot) passAll() {
	for msg := range l.in {
		if _, ours := DeliveryFrom(msg.Context()); ours {
			l.out <- msg // also while stopping: its subscriber waits for it
		} else {
			l.pass(msg)
		}
	}
}

// pass offers a foreign message until it is time to park: then it is left alone.
func (l *lot) pass(msg *message.Message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.parking.parked:
		return
	case <-l.stop.Done():
		return
	default:
	}
	select {
	case l.out <- msg:
		l.keep(msg)
	case <-l.parking.parked:
	case <-l.stop.Done():
	}
}

// keep remembers a message that was passed on. It is called under the lock.
func (l *lot) keep(msg *message.Message) {
	l.passed = append(l.passed, msg)
	if len(l.passed) > l.bound {
		l.passed = slices.DeleteFunc(l.passed, isSettled)
		l.bound = max(64, 2*len(l.passed))
	}
}

func isSettled(msg *message.Message) bool {
	select {
	case <-msg.Acked():
		return true
	case <-msg.Nacked():
		return true
	default:
		return false
	}
}

// waitIdle waits until all that was passed on is settled, or ctx is done. It must be called after parking began.
func (l *lot) waitIdle(ctx context.Context) {
	l.mu.Lock()
	passed := slices.Clone(l.passed)
	l.mu.Unlock()
	for _, msg := range passed {
		select {
		case <-msg.Acked():
		case <-msg.Nacked():
		case <-ctx.Done():
			return
		}
	}
}
