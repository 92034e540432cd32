package sdk

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// closeMargin is what Close waits longer than DrainTimeout, for the source to close.
const closeMargin = 10 * time.Second

// Subscriber turns a [Driver] into a Watermill subscriber: windows, batched settlement, leases, backoff, reopening and
// draining. It is safe for concurrent use. It does not own the driver.
type Subscriber struct {
	driver Driver
	cfg    SubscriberConfig
	caps   Capabilities
	report reporter

	mu   sync.Mutex
	subs map[*subscription]struct{} // guarded by mu
	fate error                      // guarded by mu: why a subscription ended that nobody ended
	stop chan struct{}              // closed by the first Stop
	once sync.Once
}

var (
	_ message.Subscriber           = (*Subscriber)(nil)
	_ message.SubscribeInitializer = (*Subscriber)(nil)
)

// NewSubscriber makes a subscriber. It does no I/O and starts nothing. Its error says what to change in the configuration.
func NewSubscriber(d Driver, cfg SubscriberConfig) (*Subscriber, error) {
	if d == nil {
		return nil, errors.New("new subscriber: the driver is nil: open one with Registry.Open or a driver package")
	}
	caps := d.Capabilities()
	if err := cfg.validate(caps); err != nil {
		return nil, fmt.Errorf("new subscriber: %w", err)
	}
	cfg = cfg.withDefaults()
	return &Subscriber{
		driver: d,
		cfg:    cfg,
		caps:   caps,
		report: reporter{observer: cfg.Observer, logger: cfg.Logger},
		subs:   map[*subscription]struct{}{},
		stop:   make(chan struct{}),
	}, nil
}

// Subscribe starts a subscription with a window of its own. It prepares topic and group and opens the first source before
// it returns, so that a wrong configuration surfaces here; that is bounded by ctx and by 30 s. Cancelling ctx later ends
// the subscription, as Stop does.
//
// Messages are handed out one by one in the broker's order. Each message has a context that carries a [DeliveryInfo] and
// the values of ctx, but not its cancellation: it is cancelled when the message is settled, when the delivery is lost,
// after MaxProcessing, and at the end of DrainTimeout; [context.Cause] tells which. A payload must not be changed in
// place, because another attempt may share it.
//
// The channel closes last: after everything that was handed out is settled and the driver has answered, or DrainTimeout
// is over, and the source is closed. After Stop or Close it returns an error for which errors.Is(err, [ErrClosed]) holds.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if topic == "" {
		return nil, errors.New("subscribe: the topic is empty")
	}
	sub := newSubscription(ctx, s, topic)
	if err := s.add(sub); err != nil {
		return nil, fmt.Errorf("subscribe to topic %q as group %q: %w", topic, s.cfg.Group, err)
	}
	first, err := sub.openFirst(ctx)
	if err != nil {
		s.remove(sub)
		return nil, fmt.Errorf("subscribe to topic %q as group %q: %w", topic, s.cfg.Group, err)
	}
	sub.start(ctx, first)
	return sub.out, nil
}

// SubscribeInitialize prepares topic and group without subscribing: nil promises that what is published to the topic from
// now on waits for the group. Without it, or a first Subscribe, a broker that detects unroutable messages refuses to take
// any. With VerifyOnly it verifies that both are there. It is idempotent, blocks for at most 30 s, and leaves nothing
// behind in this process. After Stop or Close, which also interrupt it, errors.Is(err, [ErrClosed]) holds.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	if topic == "" {
		return errors.New("initialize: the topic is empty")
	}
	if err := s.prepare(topic); err != nil {
		return fmt.Errorf("initialize topic %q for group %q: %w", topic, s.cfg.Group, err)
	}
	return nil
}

func (s *Subscriber) prepare(topic string) error {
	if s.stopped() {
		return ErrClosed
	}
	ctx, cancel := context.WithTimeout(context.Background(), openTimeout)
	defer cancel()
	go func() {
		select {
		case <-s.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := s.driver.Prepare(ctx, s.cfg.binding(topic))
	if err != nil && s.stopped() && ctx.Err() != nil {
		return ErrClosed
	}
	return err
}

func (s *Subscriber) add(sub *subscription) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped() {
		return ErrClosed
	}
	s.subs[sub] = struct{}{}
	return nil
}

// remove forgets a subscription that has ended, or never began, and lets Stop know.
func (s *Subscriber) remove(sub *subscription) {
	s.mu.Lock()
	delete(s.subs, sub)
	s.mu.Unlock()
	close(sub.done)
}

// endedBy keeps the first reason for which a subscription ended that nobody ended.
func (s *Subscriber) endedBy(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fate == nil {
		s.fate = err
	}
}

func (s *Subscriber) ending() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fate
}

func (s *Subscriber) stopped() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

func (s *Subscriber) snapshot() []*subscription {
	s.mu.Lock()
	defer s.mu.Unlock()
	subs := make([]*subscription, 0, len(s.subs))
	for sub := range s.subs {
		subs = append(subs, sub)
	}
	return subs
}

// Stop ends all subscriptions: intake ends at once, what was not handed out goes back to the broker, what was handed out
// settles, bounded by DrainTimeout; then sources and output channels close. It returns nil once all are closed. When ctx is
// done first it returns the context's error and the draining goes on. It is idempotent and safe for concurrent use; the
// driver stays open.
func (s *Subscriber) Stop(ctx context.Context) error {
	s.once.Do(func() {
		s.mu.Lock() // after this nothing is added any more
		close(s.stop)
		s.mu.Unlock()
	})
	subs := s.snapshot()
	for _, sub := range subs {
		sub.end()
	}
	for _, sub := range subs {
		select {
		case <-sub.done:
		case <-ctx.Done():
			return fmt.Errorf("stop subscriber of group %q: topic %q is still closing: %w", s.cfg.Group, sub.topic, ctx.Err())
		}
	}
	return nil
}

// Close is Stop, bounded by DrainTimeout and a margin of 10 s for sources that are slow to close. It is idempotent and
// safe for concurrent use. The driver stays open.
func (s *Subscriber) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.DrainTimeout+closeMargin)
	defer cancel()
	return s.Stop(ctx)
}

// Limits are the bounds of each subscription, as far as the driver tells without I/O. A source may add a lease or a
// horizon: [DeliveryInfo] has the limits of the source itself.
func (s *Subscriber) Limits() Limits { return s.cfg.limits(s.caps) }

// InFlight is the number of deliveries taken from the broker and not settled yet, in all subscriptions, plus the messages
// of lost sources whose handlers have not decided yet. It is at most twice MaxInFlight per subscription.
func (s *Subscriber) InFlight() int {
	n := 0
	for _, sub := range s.snapshot() {
		n += sub.inFlight()
	}
	return n
}
