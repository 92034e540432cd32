package handlertest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

const (
	defaultTopic    = "handlertest"
	defaultPatience = 20 * time.Second
)

// Case is one handler, one message, and the database they meet in. Store, Message, State and one of Handler,
// HandlerOutputs, HandlerBatch and Register are required.
type Case[T any] struct {
	// Store is a receipts store on a database that nothing else uses and that has the application's tables. [Run] brings
	// the store's own tables there. It stays the caller's: close its handle with t.Cleanup.
	Store receipts.Store[T]

	// Handler is what the application gives to [idempotency.Middleware.Handle].
	Handler func(ctx context.Context, tx T, msg *message.Message) error
	// HandlerOutputs is what it gives to [idempotency.Middleware.HandleOutputs].
	HandlerOutputs func(ctx context.Context, tx T, msg *message.Message) ([]*message.Message, error)
	// HandlerBatch is what it gives to [idempotency.Middleware.HandleBatch]. It is called with one message at a time.
	HandlerBatch func(ctx context.Context, tx T, msgs []*message.Message) error
	// Register adds the handler to the router as the application does, with m.Plugin, m.Wrap or a CQRS processor, say. It
	// must subscribe to Topic with sub, once. It is called again, with others, where the consumer restarts.
	Register func(m *idempotency.Middleware[T], r *message.Router, sub message.Subscriber) error

	// Topic is where the message is published; "" means "handlertest".
	Topic string
	// Message makes the message: the same identity, metadata and payload at each call.
	Message func() *message.Message
	// State reads the part of the application's state that the handler changes: committed values, compared by
	// [reflect.DeepEqual], without what differs from run to run, such as clocks and random ids. It gives a fresh value at
	// each call, and is called while no transaction is open.
	State func(ctx context.Context) (any, error)

	// Config is the middleware's, as the application has it. An empty Consumer and Limits are filled in. Outputs must be nil:
	// what the handler produces is stored, counted and sent nowhere.
	Config idempotency.Config
	// Patience is the longest wait for what has to come; 0 means 20 s. Only what fails waits that long.
	Patience time.Duration
}

func (c Case[T]) withDefaults() Case[T] {
	if c.Topic == "" {
		c.Topic = defaultTopic
	}
	if c.Patience == 0 {
		c.Patience = defaultPatience
	}
	if c.Config.Consumer == "" {
		c.Config.Consumer = "handlertest"
	}
	return c
}

// check refuses a case that can show nothing, and says what to change.
func (c Case[T]) check() error {
	forms := 0
	for _, there := range []bool{c.Handler != nil, c.HandlerOutputs != nil, c.HandlerBatch != nil, c.Register != nil} {
		if there {
			forms++
		}
	}
	switch {
	case c.Store == nil:
		return errors.New("the case has no Store: give it a receipts store on an empty database")
	case c.Message == nil:
		return errors.New("the case has no Message: give it a func that makes the message to handle")
	case c.State == nil:
		return errors.New("the case has no State: give it a func that reads what the handler changes")
	case forms != 1:
		return fmt.Errorf("the case has %d of Handler, HandlerOutputs, HandlerBatch and Register: give it exactly one", forms)
	case c.Patience < 0:
		return fmt.Errorf("the case's Patience is %v: use a positive duration, or 0 for %v", c.Patience, defaultPatience)
	case c.Config.Guarantee != idempotency.EffectivelyOnce:
		return errors.New("the case's Config.Guarantee is not EffectivelyOnce: no other guarantee promises one effect")
	case c.Config.Outputs != nil:
		return errors.New("the case's Config.Outputs is set: leave it nil, outputs are sent nowhere here")
	}
	first, second := c.Message(), c.Message()
	if first == nil || second == nil {
		return errors.New("the case's Message gives nil")
	}
	if first == second {
		return errors.New("the case's Message gives the same pointer twice: it must make a new message at each call")
	}
	if first.UUID != second.UUID || !reflect.DeepEqual(first.Metadata, second.Metadata) || string(first.Payload) != string(second.Payload) {
		return errors.New("the case's Message gives another message at each call: fix its UUID, metadata and payload, " +
			"or a second delivery is a second message")
	}
	return nil
}

// add puts the handler into a router.
func (c Case[T]) add(m *idempotency.Middleware[T], r *message.Router, sub message.Subscriber) error {
	const name = "handlertest"
	switch {
	case c.Register != nil:
		if err := c.Register(m, r, sub); err != nil {
			return fmt.Errorf("the case's Register: %w", err)
		}
		if len(r.Handlers()) == 0 {
			return errors.New("the case's Register added no handler to the router")
		}
	case c.HandlerOutputs != nil:
		r.AddConsumerHandler(name, c.Topic, sub, m.HandleOutputs("handlertest-outputs", c.HandlerOutputs))
	case c.HandlerBatch != nil:
		r.AddConsumerHandler(name, c.Topic, sub, m.HandleBatch(c.HandlerBatch))
	default:
		r.AddConsumerHandler(name, c.Topic, sub, m.Handle(c.Handler))
	}
	return nil
}

// discard is where outputs go: they are counted when they are stored.
type discard struct{}

// Publish takes everything.
func (discard) Publish(string, ...*message.Message) error { return nil }

// Close does nothing.
func (discard) Close() error { return nil }
