package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// OrderPolicy says what happens when messages of failing order keys would take more than half of the window.
type OrderPolicy uint8

// The order policies.
const (
	// StandStill takes nothing more from the subscription until they fit again. What failed goes on being tried. Health says
	// that it stands still, and since when.
	StandStill OrderPolicy = iota
	// ParkKeys stores the messages of the failing order key in the database, acknowledges them, and goes on: the key is parked.
	// Its messages, and those that come later, are handled out of the database, in order, with backoff, also after a restart.
	// The store must be a receipts.Parker.
	ParkKeys
)

// Ordered is a message.SubscriberDecorator, for router.AddSubscriberDecorators, that keeps the order of Config.OrderKey: of
// each key it hands out the next message only when the one before it has its place inside the middleware, or was
// acknowledged without it. Messages of other keys, and those without one, do not wait. A message that fails is held, with
// the later ones of its key, and handed out again after Config.RetryBackoff or the delay that was asked for; then come the
// others, in order.
//
// What is promised, by one subscription in one process: per key, handlers succeed in the order in which the subscriber hands
// out. It covers what comes again only where the broker keeps the order when it takes messages back.
//
// The router gets copies of the messages: same UUID, metadata and payload, a context that ends with the original's. Closing
// the decorated subscriber closes sub: what is held goes back to the broker, what is being handled is waited for, and its
// outcome passed on. Ordered returns an error where sub is nil or there is no OrderKey.
func (m *Middleware[T]) Ordered(sub message.Subscriber) (message.Subscriber, error) {
	switch {
	case isNil(sub):
		return nil, errors.New("idempotency: Ordered: the subscriber is nil")
	case m.order == nil:
		return nil, errors.New("idempotency: Ordered needs Config.OrderKey: set it, or leave Ordered out")
	}
	return &orderedSubscriber{order: m.order, inner: sub, subs: map[*orderedSubscription]struct{}{}}, nil
}

// ordering is what the ordered subscriptions of a middleware share.
type ordering struct {
	keyOf    func(*message.Message) string
	policy   OrderPolicy
	parker   receipts.Parker // nil with StandStill
	consumer string
	aliases  map[string]string
	budget   time.Duration // Config.TxBudget
	backoff  sdk.Backoff
	window   int // Config.Limits.MaxInFlight; 0: unknown
	log      watermill.LoggerAdapter

	mu   sync.Mutex
	subs map[*orderedSubscription]struct{}
}

// newOrdering is nil without Config.OrderKey.
func newOrdering(cfg Config, store any) (*ordering, error) {
	if cfg.OrderKey == nil {
		return nil, nil
	}
	o := &ordering{
		keyOf: cfg.OrderKey, policy: cfg.OrderPolicy, consumer: cfg.Consumer, aliases: cfg.Aliases, budget: cfg.TxBudget,
		backoff: cfg.RetryBackoff, window: cfg.Limits.MaxInFlight, log: cfg.Logger,
		subs: map[*orderedSubscription]struct{}{},
	}
	if cfg.OrderPolicy == ParkKeys {
		parker, ok := store.(receipts.Parker)
		if !ok {
			return nil, errNoParker
		}
		o.parker = parker
	}
	return o, nil
}

func (o *ordering) add(s *orderedSubscription) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.subs[s] = struct{}{}
}

func (o *ordering) remove(s *orderedSubscription) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.subs, s)
}

// key asks OrderKey. A panic must not end the process: no router recovers it here.
func (o *ordering) key(msg *message.Message) (key string, err error) {
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("config: OrderKey panicked: %v", value)
		}
	}()
	if key = o.keyOf(msg); len(key) > receipts.MaxKey {
		key = string(digestOf([]byte(key)))
	}
	return key, nil
}

// handlerOf is the name of a message's handler, as it is written into the tables.
func (o *ordering) handlerOf(msg *message.Message) string {
	name := message.HandlerNameFromCtx(msg.Context())
	if written, ok := o.aliases[name]; ok {
		return written
	}
	return name
}

// orderedSubscriber decorates one subscriber of a router.
type orderedSubscriber struct {
	order *ordering
	inner message.Subscriber

	mu      sync.Mutex
	closed  bool
	subs    map[*orderedSubscription]struct{}
	running sync.WaitGroup
}

// Subscribe subscribes to the inner subscriber and passes its messages on in order. The channel closes last: after the inner
// one, and after what was handed out is settled.
func (o *orderedSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if !o.enter() {
		return nil, fmt.Errorf("subscribe in order to topic %q: %w", topic, sdk.ErrClosed)
	}
	inner := ctx
	if o.order.policy == ParkKeys {
		inner = sdk.WithGreeting(ctx)
	}
	in, err := o.inner.Subscribe(inner, topic)
	if err != nil {
		o.running.Done()
		return nil, err
	}
	s := newOrderedSubscription(ctx, o, topic, in)
	o.add(s)
	go func() {
		defer o.running.Done()
		defer o.remove(s)
		s.run()
	}()
	return s.out, nil
}

func (o *orderedSubscriber) add(s *orderedSubscription) {
	o.order.add(s)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.subs[s] = struct{}{}
	if o.closed {
		s.end()
	}
}

func (o *orderedSubscriber) remove(s *orderedSubscription) {
	o.order.remove(s)
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.subs, s)
}

// enter lets Close wait for one more.
func (o *orderedSubscriber) enter() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.closed {
		o.running.Add(1)
	}
	return !o.closed
}

// Close closes the inner subscriber and waits for the end of its subscriptions. Nothing more is handed out from its
// beginning on. It is idempotent.
func (o *orderedSubscriber) Close() error {
	o.mu.Lock()
	o.closed = true
	for s := range o.subs {
		s.end()
	}
	o.mu.Unlock()
	err := o.inner.Close()
	o.running.Wait()
	return err
}
