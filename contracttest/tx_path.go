package contracttest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// pathClauses are about the ways a message can take through a router.
func pathClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T27", Name: "one middleware, several handlers", Capability: "groups",
				Text: "one middleware on a router: two handlers of one topic, two CQRS handlers of one event, and a pass-through " +
					"to a second topic: each takes effect once",
			},
			check: severalHandlers[T],
		},
		{
			Clause: Clause{
				ID: "T28", Name: "used twice on one path",
				Text: "plugin, Wrap and Handle on one path: one transaction, one claim",
			},
			check: usedTwice[T],
		},
	}
}

// severalHandlers builds one router with all of them, the plugin on it, and sends messages and events twice.
func severalHandlers[T any](ctx context.Context, e *txEnv[T]) error {
	e.used = nil // the clause's own group has no consumer
	events := e.fresh("events")
	second := e.fresh("second")
	pub, err := sdk.NewPublisher(e.w, sdk.PublisherConfig{})
	if err != nil {
		return fmt.Errorf("making the publisher: %w", err)
	}
	e.atEnd(pub.Close)
	for _, b := range [][2]string{
		{e.topic, "one"}, {e.topic, "two"}, {e.topic, "pass"}, {second, "last"}, {events, "first"}, {events, "other"},
	} {
		if err := e.prepare(ctx, b[0], e.group+b[1]); err != nil {
			return err
		}
	}
	_, err = e.consume(ctx, plan[T]{config: idempotency.Config{Outputs: pub}, wire: func(c *consumer[T]) error {
		c.router.AddPlugin(c.m.Plugin)
		return errors.Join(e.twoHandlers(c), e.passThrough(c, second, pub), e.twoEventHandlers(c, events))
	}})
	if err != nil {
		return err
	}
	ids := e.ids(3)
	if err := errors.Join(e.send(ctx, ids...), e.send(ctx, ids...)); err != nil {
		return err
	}
	want := account{effects: map[string]int64{}}
	for _, id := range ids {
		for _, name := range []string{"one", "two", "pass", "last"} {
			want.effects[name+":"+id] = 1
		}
	}
	event, err := command(e.messageID())
	if err != nil {
		return err
	}
	if err := e.used[4].sendAll(ctx, event, event); err != nil {
		return err
	}
	want.effects["first:"+event.ID], want.effects["other:"+event.ID] = 1, 1
	return e.balance(ctx, want)
}

// named is a wrapped handler that counts under its own name.
func (e *txEnv[T]) named(name string, outputs func(*message.Message) []*message.Message) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		tx, err := idempotency.TxFrom[T](msg.Context())
		if err != nil {
			return nil, err
		}
		if err := e.s.Apply(msg.Context(), tx, name+":"+msg.UUID, 1); err != nil {
			return nil, err
		}
		return outputs(msg), nil
	}
}

func noOutputs(*message.Message) []*message.Message { return nil }

// twoHandlers adds two handlers of one topic.
func (e *txEnv[T]) twoHandlers(c *consumer[T]) error {
	for _, name := range []string{"one", "two"} {
		sub, err := c.subscribe(e.group + name)
		if err != nil {
			return err
		}
		handle := e.named(name, noOutputs)
		c.router.AddConsumerHandler(name, e.topic, sub, func(msg *message.Message) error {
			_, err := handle(msg)
			return err
		})
	}
	return nil
}

// passThrough adds a handler that sends its message on as it is, and a handler of where it goes.
func (e *txEnv[T]) passThrough(c *consumer[T], second string, pub message.Publisher) error {
	pass, err := c.subscribe(e.group + "pass")
	if err != nil {
		return err
	}
	last, err := c.subscribe(e.group + "last")
	if err != nil {
		return err
	}
	c.router.AddHandler("pass", e.topic, pass, second, unclosed{pub}, e.named("pass", func(msg *message.Message) []*message.Message {
		return []*message.Message{msg.Copy()}
	}))
	c.router.AddHandler("last", second, last, "", unclosed{pub}, e.named("last", noOutputs))
	return nil
}

// unclosed keeps a publisher open that is shared between handlers: the router closes each handler's.
type unclosed struct{ message.Publisher }

// Close does nothing.
func (unclosed) Close() error { return nil }

// twoEventHandlers adds two CQRS handlers of one event, each with a subscriber of its own, as EventProcessor does it.
func (e *txEnv[T]) twoEventHandlers(c *consumer[T], topic string) error {
	processor, err := cqrs.NewEventProcessorWithConfig(c.router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return topic, nil },
		SubscriberConstructor: func(p cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return c.subscribe(e.group + p.HandlerName)
		},
		Marshaler: cqrs.JSONMarshaler{},
	})
	if err != nil {
		return err
	}
	handler := func(name string) cqrs.EventHandler {
		return cqrs.NewEventHandler(name, func(ctx context.Context, event *charge) error {
			tx, err := idempotency.TxFrom[T](ctx)
			if err != nil {
				return err
			}
			return e.s.Apply(ctx, tx, name+":"+event.ID, 1)
		})
	}
	return processor.AddHandlers(handler("first"), handler("other"))
}

// usedTwice puts the plugin on the router, Wrap on the handler and Handle inside, and counts what reaches the store.
func usedTwice[T any](ctx context.Context, e *txEnv[T]) error {
	var begun, claimed atomic.Int64
	c, err := e.consume(ctx, plan[T]{
		config: idempotency.Config{BatchSize: 1}, // else messages may share a transaction
		wrap: func(s receipts.Store[T]) receipts.Store[T] {
			return countingStore[T]{Store: s, begun: &begun, claimed: &claimed}
		},
		wire: func(c *consumer[T]) error {
			sub, err := c.subscribe("")
			if err != nil {
				return err
			}
			c.router.AddPlugin(c.m.Plugin)
			c.router.AddConsumerHandler("apply", e.topic, sub, c.m.Handle(e.apply)).AddMiddleware(c.m.Wrap)
			return nil
		},
	})
	if err != nil {
		return err
	}
	ids := e.ids(3)
	begun.Store(0) // making the middleware may have begun transactions of its own
	if err := e.send(ctx, ids...); err != nil {
		return err
	}
	if err := e.balance(ctx, once(ids...)); err != nil {
		return err
	}
	contention := int64(c.m.Report().Contention) // each is a further transaction, and one is no fault
	if n := claimed.Load(); n < 3 || n > 3+contention {
		return fmt.Errorf("%d claims for 3 messages", n)
	}
	if n := begun.Load(); n < 3 || n > 3+contention {
		return fmt.Errorf("%d transactions for 3 messages", n)
	}
	return nil
}
