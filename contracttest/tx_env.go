package contracttest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// txEnv is what one run of a transaction clause works with: an Env with a watched driver, a database of its own and a
// handle on it that no consumer uses.
type txEnv[T any] struct {
	*Env
	s            StoreHarness[T]
	dir          string
	w            *watch
	db           Database[T]
	topic, group string
	used         []*bench // every topic and group consumed from, looked at by balance
	consumers    []*consumer[T]
}

// newTxEnv opens driver and database. What it opened ends with the Env.
func newTxEnv[T any](ctx context.Context, e *Env, s StoreHarness[T], dir string) (*txEnv[T], error) {
	d, err := e.driver(ctx)
	if err != nil {
		return nil, err
	}
	db, err := s.Open(ctx, dir)
	if err != nil {
		return nil, fmt.Errorf("opening the database: %w", err)
	}
	e.atEnd(db.Close)
	tx := &txEnv[T]{Env: e, s: s, dir: dir, w: newWatch(d), db: db, topic: e.fresh("t"), group: e.fresh("g")}
	return tx, tx.prepare(ctx, tx.topic, tx.group)
}

// prepare makes a topic and a group, and remembers that balance has to look at them.
func (e *txEnv[T]) prepare(ctx context.Context, topic, group string) error {
	b := &bench{e: e.Env, d: e.w.Driver, topic: topic, group: group}
	e.used = append(e.used, b)
	return b.prepare(ctx)
}

// ids makes n identities.
func (e *txEnv[T]) ids(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = e.messageID()
	}
	return ids
}

// send sends one message for each identity, in one batch.
func (e *txEnv[T]) send(ctx context.Context, ids ...string) error {
	msgs := make([]sdk.Message, len(ids))
	for i, id := range ids {
		msgs[i] = sdk.Message{ID: id, Payload: []byte("effect of " + id)}
	}
	return e.used[0].sendAll(ctx, msgs...)
}

// apply is the handler most clauses use: it applies the effect of the message's identity.
func (e *txEnv[T]) apply(ctx context.Context, tx T, msg *message.Message) error {
	return e.s.Apply(ctx, tx, msg.UUID, 1)
}

// handler is what an application writes.
type handler[T any] func(ctx context.Context, tx T, msg *message.Message) error

// plan says how a consumer differs from the plain one. The zero value is a consumer that applies effects.
type plan[T any] struct {
	handle handler[T] // apply
	// produce, where set, is the handler in place of handle, and its outputs go to the topic to.
	produce func(ctx context.Context, tx T, msg *message.Message) ([]*message.Message, error)
	to      string
	// together, where set, is the handler in place of handle, for HandleBatch.
	together func(ctx context.Context, tx T, msgs []*message.Message) error
	group    string        // the clause's
	window   int           // 8
	lease    time.Duration // the engine's
	config   idempotency.Config
	backoff  sdk.Backoff                               // 20 ms to 80 ms
	db       *Database[T]                              // a handle of its own
	wrap     func(receipts.Store[T]) receipts.Store[T] // put around the store, inside planted faults
	outer    []message.HandlerMiddleware               // on the router, outside ours
	wire     func(c *consumer[T]) error                // adds handlers to c.router instead of the one called "apply"
	ordered  bool                                      // puts Ordered around every subscriber of the router
	plain    bool                                      // runs the router without sdk.Run
}

// consumer is one running application: router, subscribers, middleware, relay and database handle.
type consumer[T any] struct {
	e      *txEnv[T]
	p      plan[T]
	m      *idempotency.Middleware[T]
	router *message.Router
	subs   []*sdk.Subscriber
	cancel context.CancelFunc
	done   chan error // the router's end
	relay  chan error // the relay's end
	close  func() error
}

// consume starts a consumer and returns when its router runs. It ends with the clause, if not before.
func (e *txEnv[T]) consume(ctx context.Context, p plan[T]) (*consumer[T], error) {
	c, err := e.build(ctx, p)
	if err != nil {
		return nil, err
	}
	e.consumers = append(e.consumers, c)
	e.atEnd(c.stop)
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c.cancel = cancel
	go func() { c.relay <- c.m.Run(run) }()
	go func() { c.done <- c.run(run) }()
	select {
	case <-c.router.Running():
		return c, nil
	case err := <-c.done:
		c.done <- err
		return nil, fmt.Errorf("the router did not start: %w", err)
	}
}

// run runs the router to its end.
func (c *consumer[T]) run(ctx context.Context) error {
	if c.p.plain {
		return c.router.Run(ctx)
	}
	return sdk.Run(ctx, c.router, c.subs...)
}

// build puts a consumer together without starting it.
func (e *txEnv[T]) build(ctx context.Context, p plan[T]) (_ *consumer[T], err error) {
	c := &consumer[T]{e: e, p: p, done: make(chan error, 1), relay: make(chan error, 1)}
	db, err := e.handle(ctx, p)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.Close())
		}
	}()
	c.close = db.Close
	if p.config.Consumer == "" {
		p.config.Consumer = "suite"
	}
	if c.m, err = idempotency.New(e.wrapped(db.Store, p.wrap), p.config); err != nil {
		return nil, fmt.Errorf("making the middleware: %w", err)
	}
	c.router, err = message.NewRouter(message.RouterConfig{CloseTimeout: e.h.Patience}, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	return c, c.wire()
}

// handle gives the database handle that the plan asks for.
func (e *txEnv[T]) handle(ctx context.Context, p plan[T]) (Database[T], error) {
	if p.db != nil {
		return *p.db, nil
	}
	db, err := e.s.Open(ctx, e.dir)
	if err != nil {
		return db, fmt.Errorf("opening the consumer's database handle: %w", err)
	}
	return db, nil
}

// wrapped puts a clause's own wrapper and the planted fault around a store, the fault outermost: a clause that kills
// inside a commit does so inside what a faulty store takes for one.
func (e *txEnv[T]) wrapped(s receipts.Store[T], own func(receipts.Store[T]) receipts.Store[T]) receipts.Store[T] {
	if own != nil {
		s = own(s)
	}
	if e.s.Wrap != nil {
		s = e.s.Wrap(s)
	}
	return s
}

// subscribe makes the engine's subscriber over the watched driver for one group; empty: the plan's, or the clause's.
func (c *consumer[T]) subscribe(group string) (*sdk.Subscriber, error) {
	cfg := subscriberConfig(cmp.Or(group, c.p.group, c.e.group), c.p.window, c.p.backoff)
	cfg.Lease = c.p.lease
	sub, err := sdk.NewSubscriber(c.e.w, cfg)
	if err != nil {
		return nil, fmt.Errorf("making the subscriber of %s: %w", cfg.Group, err)
	}
	c.subs = append(c.subs, sub)
	return sub, nil
}

// subscriberConfig fills in what a clause leaves open.
func subscriberConfig(group string, window int, backoff sdk.Backoff) sdk.SubscriberConfig {
	if window == 0 {
		window = 8
	}
	if backoff == (sdk.Backoff{}) {
		backoff = sdk.Backoff{Min: 20 * time.Millisecond, Max: 80 * time.Millisecond}
	}
	return sdk.SubscriberConfig{Group: group, MaxInFlight: window, Backoff: backoff, DrainTimeout: 5 * time.Second}
}

// wire adds the plan's handlers to the router.
func (c *consumer[T]) wire() error {
	c.router.AddMiddleware(c.p.outer...)
	if c.p.ordered {
		c.router.AddSubscriberDecorators(c.m.Ordered)
	}
	if c.p.wire != nil {
		return c.p.wire(c)
	}
	sub, err := c.subscribe("")
	if err != nil {
		return err
	}
	c.router.AddConsumerHandler("apply", c.e.topic, sub, c.handler())
	return nil
}

// handler makes the plan's handler.
func (c *consumer[T]) handler() message.NoPublishHandlerFunc {
	switch p := c.p; {
	case p.together != nil:
		return c.m.HandleBatch(p.together)
	case p.produce != nil:
		return c.m.HandleOutputs(p.to, p.produce)
	case p.handle != nil:
		return c.m.Handle(p.handle)
	default:
		return c.m.Handle(c.e.apply)
	}
}

// stop ends a consumer in order and waits for it: intake, handlers, router, relay, database handle. Stopping twice is nil.
func (c *consumer[T]) stop() error {
	if c.close == nil {
		return nil
	}
	c.cancel()
	grace := 3 * c.e.h.Patience
	errs := []error{ends(c.done, grace, "the router"), ends(c.relay, grace, "the relay")}
	for _, sub := range c.subs {
		errs = append(errs, sub.Close())
	}
	errs = append(errs, c.close())
	c.close = nil
	return errors.Join(errs...)
}

// ends waits for the end of something that was told to end.
func ends(done <-chan error, grace time.Duration, what string) error {
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case err := <-done:
		if err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("%s ended with: %w", what, err)
		}
		return nil
	case <-timer.C:
		return fmt.Errorf("%s did not end within %s", what, grace)
	}
}

// stopAll stops every consumer.
func (e *txEnv[T]) stopAll() error {
	var errs []error
	for _, c := range e.consumers {
		errs = append(errs, c.stop())
	}
	e.consumers = nil
	return errors.Join(errs...)
}
