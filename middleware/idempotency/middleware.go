package idempotency

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// checkBound is how long New waits for the store's Check.
const checkBound = 10 * time.Second

// Middleware commits handlers' effects together with receipts. It is made by New, safe for concurrent use, and shared by
// all handlers of one consumer. It owns neither the store nor any publisher, holds no connection while it is idle, and
// starts nothing in the background except a publish of outputs, which ends by itself.
type Middleware[T any] struct {
	store receipts.Store[T]
	cfg   Config
	info  receipts.Info
	log   watermill.LoggerAdapter

	lanes    *lanes[T]
	side     side
	inside   *inside[T]
	gate     *gate
	sending  *sending
	marking  marking
	order    *ordering // nil without Config.OrderKey
	failures failing
	seed     maphash.Seed
	spare    sync.Pool // of *pending[T]

	relaying atomic.Bool
	nudges   chan receiptRef

	counters   counters
	lastCommit atomic.Int64 // Unix nanoseconds
	withoutTx  sync.Map     // names of handlers that were logged for not asking for their transaction
	inOwnWay   sync.Map     // names of handlers that were logged for contention with themselves
}

// New makes the middleware of one consumer. It asks the store's Check, for at most 10 s, and refuses what cannot work; its
// errors say what to change. The store and the publishers in cfg stay the caller's, who closes them after the router has
// stopped.
func New[T any](store receipts.Store[T], cfg Config) (*Middleware[T], error) {
	if isNil(store) {
		return nil, errors.New("idempotency: the store is nil: give New a receipts store, from receipts.NewSQLite for instance")
	}
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("idempotency: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkBound)
	defer cancel()
	info, err := store.Check(ctx)
	if err != nil {
		return nil, fmt.Errorf("idempotency: check the receipts store: %w", err)
	}
	n, err := lanesFor(cfg, info)
	if err != nil {
		return nil, fmt.Errorf("idempotency: %w", err)
	}
	order, err := newOrdering(cfg, store)
	if err != nil {
		return nil, fmt.Errorf("idempotency: %w", err)
	}
	m := &Middleware[T]{
		store: store, cfg: cfg, info: info, log: cfg.Logger,
		side: make(side, 1), inside: newInside[T](cfg.MaxPending),
		gate: newGate(), sending: newSending(), seed: maphash.MakeSeed(),
		nudges: make(chan receiptRef, maxNudges), order: order,
	}
	m.lanes = &lanes[T]{m: m, all: n, free: n}
	for _, warning := range info.Warnings {
		m.log.Info("Receipts store: "+warning, watermill.LogFields{"dialect": info.Dialect})
	}
	return m, nil
}

// nilHandler is what Wrap, Handle, HandleOutputs and HandleBatch panic with when they are given none: where the handler is
// made, not when its first message comes.
const nilHandler = "idempotency: the handler is nil"

// Wrap is a message.HandlerMiddleware: the handler's effect, written through the transaction that TxFrom gives, commits
// with the message's receipt. nil from the wrapped handler means that this is durable, or was before; outputs are taken
// out of the flow and sent through Config.Outputs to the handler's publish topic. An error means that nothing of this
// attempt is committed, or that it is not known (ErrUndecided): the message must come again. It blocks while it waits for
// a lane, the database, or the backoff of a foreign subscriber's message, until the message's context is done.
//
// Used twice on one path, with the same message, the inner level joins the transaction of the outer one. A nil handler panics,
// here and in Handle, HandleOutputs and HandleBatch.
func (m *Middleware[T]) Wrap(h message.HandlerFunc) message.HandlerFunc {
	if h == nil {
		panic(nilHandler)
	}
	return m.wrap(h, nil, false)
}

// Handle makes a handler for Router.AddConsumerHandler of a function that writes its effect through tx. ctx is the
// message's, with the transaction in it and a deadline of Config.TxBudget. Otherwise it is like Wrap.
func (m *Middleware[T]) Handle(h func(ctx context.Context, tx T, msg *message.Message) error) message.NoPublishHandlerFunc {
	if h == nil {
		panic(nilHandler)
	}
	return m.consumer(func(msg *message.Message) ([]*message.Message, error) {
		tx, err := m.txOf(msg)
		if err != nil {
			return nil, err
		}
		return nil, h(msg.Context(), tx, msg)
	}, nil)
}

// HandleOutputs is Handle for a function that also produces outputs: they are stored with its effect and sent through
// Config.Outputs to the topic after the commit.
func (m *Middleware[T]) HandleOutputs(topic string, h func(ctx context.Context, tx T, msg *message.Message) ([]*message.Message, error)) message.NoPublishHandlerFunc {
	if h == nil {
		panic(nilHandler)
	}
	return m.consumer(func(msg *message.Message) ([]*message.Message, error) {
		tx, err := m.txOf(msg)
		if err != nil {
			return nil, err
		}
		produced, err := h(msg.Context(), tx, msg)
		if err != nil {
			return nil, err
		}
		return nil, m.keep(msg.Context(), topic, produced)
	}, nil)
}

// HandleBatch makes a handler of a function that writes the effects of several messages at once: those of one batch that
// are neither replayed nor conflicting, at least one. ctx has the first message's values, the transaction, and a deadline of
// Config.TxBudget; what belongs to one message, such as an output, goes with that message's own context. An error, or a
// panic, undoes all of them. With PerMessage they then run again in halves, and only a message that fails alone is charged;
// with PerBatch all go back to the broker. Config.Inside does not apply while there are several messages. Inside another level of the same
// middleware, such as Plugin, it gets one message at a time.
func (m *Middleware[T]) HandleBatch(h func(ctx context.Context, tx T, msgs []*message.Message) error) message.NoPublishHandlerFunc {
	if h == nil {
		panic(nilHandler)
	}
	return m.consumer(func(msg *message.Message) ([]*message.Message, error) {
		tx, err := m.txOf(msg)
		if err != nil {
			return nil, err
		}
		return nil, h(msg.Context(), tx, []*message.Message{msg})
	}, h)
}

// Plugin adds Wrap to a router as its last, innermost, middleware: router.AddPlugin(m.Plugin), after all others. Handlers
// made with Handle or HandleOutputs join it. Middlewares added while the router runs are inside it, which they must not
// be if they retry or swallow errors.
func (m *Middleware[T]) Plugin(r *message.Router) error {
	if r == nil {
		return errors.New("idempotency: the router is nil")
	}
	r.AddMiddleware(m.Wrap)
	return nil
}

// wrap builds the chain once, Config.Inside around the handler, and the queue of its deliveries.
func (m *Middleware[T]) wrap(h message.HandlerFunc, batch batchHandler[T], consumerOnly bool) message.HandlerFunc {
	chain := m.innermost(h)
	for i := len(m.cfg.Inside) - 1; i >= 0; i-- {
		chain = m.cfg.Inside[i](chain)
	}
	q := m.newQueue(chain, batch)
	return func(msg *message.Message) ([]*message.Message, error) {
		return m.handle(msg, h, q, consumerOnly)
	}
}

func (m *Middleware[T]) consumer(h message.HandlerFunc, batch batchHandler[T]) message.NoPublishHandlerFunc {
	wrapped := m.wrap(h, batch, true)
	return func(msg *message.Message) error {
		_, err := wrapped(msg)
		return err
	}
}

// innermost wraps the handler itself, inside Config.Inside: it stops what would run it again after a failure, and hands
// outward, as messages, all outputs the transaction has collected.
func (m *Middleware[T]) innermost(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		c := carrierOf(msg.Context(), m)
		if c == nil {
			return nil, fmt.Errorf("a middleware in Config.Inside replaced the message's context: %w", ErrNoTx)
		}
		produced, err := c.guard(msg, h)
		if published := c.take(); len(published) > 0 {
			produced = append(published, produced...)
		}
		return produced, err
	}
}

// txOf gives this middleware's transaction for the message, and marks it as asked for.
func (m *Middleware[T]) txOf(msg *message.Message) (T, error) {
	c := carrierOf(msg.Context(), m)
	if c == nil {
		var none T
		return none, ErrNoTx
	}
	c.asked.Store(true)
	return c.tx.(T), nil
}

// keep stores what HandleOutputs produced for the level that claimed.
func (m *Middleware[T]) keep(ctx context.Context, topic string, produced []*message.Message) error {
	c := carrierOf(ctx, m)
	if c == nil {
		return ErrNoTx
	}
	copies := make([]*message.Message, len(produced))
	for i, msg := range produced {
		if msg == nil {
			return fmt.Errorf("output %d of %d is nil", i+1, len(produced))
		}
		copies[i] = toTopic(topic, msg)
	}
	return c.add(copies)
}
