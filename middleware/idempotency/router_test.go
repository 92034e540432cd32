package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/sony/gobreaker"

	"github.com/penstock-mq/penstock/sdk"
)

// app is a router over a database, with Watermill's GoChannel as a foreign broker.
type app struct {
	*database
	router *message.Router
	broker *gochannel.GoChannel
}

func newApp(t *testing.T) *app {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	return &app{database: newDatabase(t), router: router, broker: gochannel.NewGoChannel(gochannel.Config{}, nil)}
}

// start runs the router until the test ends.
func (a *app) start() {
	a.Helper()
	done := make(chan error, 1)
	go func() { done <- a.router.Run(context.Background()) }()
	<-a.router.Running()
	a.Cleanup(func() {
		_ = a.broker.Close()
		if err := a.router.Close(); err != nil {
			a.Error(err)
		}
		if err := <-done; err != nil {
			a.Error(err)
		}
	})
}

func (a *app) publish(topic, uuid, payload string) {
	a.Helper()
	if err := a.broker.Publish(topic, message.NewMessage(uuid, []byte(payload))); err != nil {
		a.Error(err)
	}
}

// until waits until a condition holds.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// acknowledged is how many deliveries were.
func acknowledged(r Report) int {
	return int(r.Handled + r.Replayed + r.Conflicted + r.Refused + r.Diverted + r.Torn)
}

// T27: two handlers of one topic and a pass-through to a second topic, under one plugin.
func TestRouterPlugin(t *testing.T) {
	a := newApp(t)
	m := a.middleware(Config{Outputs: a.broker})
	a.router.AddPlugin(m.Plugin)
	wrapped := func(msg *message.Message) ([]*message.Message, error) {
		tx, err := TxFrom[*sql.Tx](msg.Context())
		if err != nil {
			return nil, err
		}
		return []*message.Message{msg}, applying(msg.Context(), tx, msg)
	}
	a.router.AddHandler("pass", "orders", a.broker, "paid", gochannel.NewGoChannel(gochannel.Config{}, nil), wrapped) // that publisher is not used
	a.router.AddConsumerHandler("charge", "orders", a.broker, m.Handle(applying))
	a.router.AddConsumerHandler("ship", "paid", a.broker, m.Handle(applying))
	a.start()
	for i := range 5 {
		for range 2 {
			a.publish("orders", fmt.Sprint(i), "p")
		}
	}
	until(t, "all acknowledged", func() bool { return acknowledged(m.Report()) == 5+5+10+5 })
	want := map[string]int{"pass p": 5, "charge p": 5, "ship p": 5}
	if got := a.effects(); !reflect.DeepEqual(got, want) {
		t.Errorf("effects %v, want %v", got, want)
	}
	if r := m.Report(); r.Handled != 15 || r.Replayed != 10 || r.WithoutTx != 0 || r.OutputsSent != 5 {
		t.Errorf("report %+v", r)
	}
	a.wantRows(15, 0, 0, 0)
	if err := m.Plugin(nil); err == nil {
		t.Error("a nil router is an error")
	}
}

// T07, T23: an error, a panic and Goexit under a plain router and GoChannel, which brings a nacked message back at once.
func TestRouterRedelivers(t *testing.T) {
	endings := map[string]func() error{
		"error":  func() error { return errHandler },
		"panic":  func() error { panic("boom") },
		"goexit": func() error { runtime.Goexit(); return nil },
	}
	for name, ending := range endings {
		t.Run(name, func(t *testing.T) {
			a := newApp(t)
			m := a.middleware(Config{RetryBackoff: sdk.Backoff{Min: 20 * time.Millisecond, Max: 40 * time.Millisecond}})
			var runs atomic.Int32
			a.router.AddConsumerHandler("charge", "orders", a.broker, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
				if err := applying(ctx, tx, msg); err != nil {
					return err
				}
				if runs.Add(1) <= 3 {
					return ending()
				}
				return nil
			}))
			a.start()
			start := time.Now()
			a.publish("orders", "u-1", "p")
			until(t, "handled", func() bool { return m.Report().Handled == 1 })
			if d := time.Since(start); d < 60*time.Millisecond {
				t.Errorf("three failures took %v: the broker spins", d)
			}
			if got := a.effects(); got["charge p"] != 1 || m.Report().Failed != 3 {
				t.Errorf("effects %v, report %+v", got, m.Report())
			}
		})
	}
}

// T23: Watermill's middlewares outside ours. The results are those that the package documents.
func TestOuterMiddlewares(t *testing.T) {
	failing := func(n int32, end func() error) func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		var runs atomic.Int32
		return func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			if err := applying(ctx, tx, msg); err != nil {
				return err
			}
			if runs.Add(1) <= n {
				return end()
			}
			return nil
		}
	}
	fail := func() error { return errHandler }
	poisoned := &recording{}
	poison, err := middleware.PoisonQueueWithFilter(poisoned, "poison", IsFailure)
	if err != nil {
		t.Fatal(err)
	}
	retry := middleware.Retry{
		MaxRetries: 3, InitialInterval: time.Millisecond,
		ShouldRetry: func(p middleware.RetryParams) bool { return IsFailure(p.Err) },
	}
	tests := []struct {
		name     string
		outer    []message.HandlerMiddleware
		handler  func(ctx context.Context, tx *sql.Tx, msg *message.Message) error
		effect   int
		failed   uint64
		poisoned int
	}{
		{"Retry", []message.HandlerMiddleware{retry.Middleware}, failing(2, fail), 1, 2, 0},
		{"PoisonQueue", []message.HandlerMiddleware{poison}, failing(100, fail), 0, 1, 1},
		{"PoisonQueue around Retry", []message.HandlerMiddleware{poison, retry.Middleware}, failing(100, fail), 0, 4, 1},
		{"Recoverer", []message.HandlerMiddleware{middleware.Recoverer}, failing(2, func() error { panic("boom") }), 1, 2, 0},
		{"PoisonQueue around Recoverer", []message.HandlerMiddleware{poison, middleware.Recoverer}, failing(100, func() error { panic("boom") }), 0, 1, 1},
		{"Timeout", []message.HandlerMiddleware{middleware.Timeout(time.Second)}, failing(1, fail), 1, 1, 0},
		{"CircuitBreaker", []message.HandlerMiddleware{middleware.NewCircuitBreaker(gobreaker.Settings{}).Middleware}, failing(2, fail), 1, 2, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			before := len(poisoned.all())
			a := newApp(t)
			m := a.middleware(Config{RetryBackoff: sdk.Backoff{Min: time.Millisecond, Max: time.Millisecond}})
			a.router.AddMiddleware(tt.outer...)
			a.router.AddPlugin(m.Plugin)
			a.router.AddConsumerHandler("charge", "orders", a.broker, m.Handle(tt.handler))
			a.start()
			a.publish("orders", "u-1", "p")
			until(t, "handled or poisoned", func() bool {
				return acknowledged(m.Report()) == tt.effect && len(poisoned.all())-before == tt.poisoned
			})
			if got := a.effects()["charge p"]; got != tt.effect || m.Report().Failed != tt.failed {
				t.Errorf("effect %d, failed %d, want %d, %d", got, m.Report().Failed, tt.effect, tt.failed)
			}
			a.wantRows(tt.effect, 0, 0, 0)
		})
	}
}

// T23: a Timeout outside ends the handler's statements, and the transaction is rolled back.
func TestOuterTimeout(t *testing.T) {
	a := newApp(t)
	m := a.middleware(Config{RetryBackoff: sdk.Backoff{Min: time.Millisecond, Max: time.Millisecond}})
	a.router.AddMiddleware(middleware.Timeout(50 * time.Millisecond))
	var runs atomic.Int32
	a.router.AddConsumerHandler("charge", "orders", a.broker, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		if err := applying(ctx, tx, msg); err != nil {
			return err
		}
		if runs.Add(1) == 1 {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}))
	a.start()
	a.publish("orders", "u-1", "p")
	until(t, "handled", func() bool { return m.Report().Handled == 1 })
	if got := a.effects()["charge p"]; got != 1 || m.Report().Failed != 1 {
		t.Errorf("effect %d, report %+v", got, m.Report())
	}
}

// A PoisonQueue with IsFailure poisons nothing while the database is away.
func TestOutageDoesNotPoison(t *testing.T) {
	poisoned := &recording{}
	poison, err := middleware.PoisonQueueWithFilter(poisoned, "poison", IsFailure)
	if err != nil {
		t.Fatal(err)
	}
	bubble(t, func(_ *Config, s *fakeStore) { s.onBegin = func(int) error { return errGone } }, func(e *env) {
		if _, err := poison(e.counting())(deliver("u-1", "p")); !errors.Is(err, ErrDatabaseAway) {
			e.Errorf("got %v", err)
		}
		if len(poisoned.all()) != 0 {
			e.Error("poisoned")
		}
	})
}

func TestInsideCorrelation(t *testing.T) {
	a := newApp(t)
	m := a.middleware(Config{Outputs: a.broker, Inside: []message.HandlerMiddleware{middleware.CorrelationID}})
	a.router.AddPlugin(m.Plugin)
	a.router.AddHandler("ship", "paid", a.broker, "shipped", gochannel.NewGoChannel(gochannel.Config{}, nil), func(msg *message.Message) ([]*message.Message, error) {
		tx, err := TxFrom[*sql.Tx](msg.Context())
		if err != nil {
			return nil, err
		}
		return []*message.Message{message.NewMessage("o-1", nil)}, applying(msg.Context(), tx, msg)
	})
	shipped, err := a.broker.Subscribe(t.Context(), "shipped")
	if err != nil {
		t.Fatal(err)
	}
	a.start()
	msg := message.NewMessage("u-1", []byte("p"))
	middleware.SetCorrelationID("c-1", msg)
	if err := a.broker.Publish("paid", msg); err != nil {
		t.Fatal(err)
	}
	output := <-shipped
	output.Ack()
	if got := middleware.MessageCorrelationID(output); got != "c-1" || output.UUID != "o-1" {
		t.Errorf("correlation id %q of %s", got, output.UUID)
	}
}

type (
	orderPlaced  struct{ ID string }
	orderCharged struct{ ID string }
	shipOrder    struct{ ID string }
)

// publishTwice sends two copies of one event.
func (a *app) publishTwice(marshaler cqrs.CommandEventMarshaler, event any) {
	a.Helper()
	msg, err := marshaler.Marshal(event)
	if err != nil {
		a.Fatal(err)
	}
	for range 2 {
		if err := a.broker.Publish(marshaler.Name(event), msg); err != nil {
			a.Fatal(err)
		}
	}
}

// T27, T31: two CQRS handlers of one event, an event bus inside one of them, and a command bus.
func TestCQRS(t *testing.T) {
	a := newApp(t)
	m := a.middleware(Config{Outputs: a.broker, RetryBackoff: sdk.Backoff{Min: time.Millisecond, Max: time.Millisecond}})
	a.router.AddPlugin(m.Plugin)
	ids := cqrs.JSONMarshaler{}
	events, err := cqrs.NewEventBusWithConfig(m.Publisher(a.broker), cqrs.EventBusConfig{
		GeneratePublishTopic: func(p cqrs.GenerateEventPublishTopicParams) (string, error) { return p.EventName, nil }, Marshaler: ids,
	})
	if err != nil {
		t.Fatal(err)
	}
	commands, err := cqrs.NewCommandBusWithConfig(m.Publisher(a.broker), cqrs.CommandBusConfig{
		GeneratePublishTopic: func(p cqrs.CommandBusGeneratePublishTopicParams) (string, error) { return p.CommandName, nil }, Marshaler: ids,
	})
	if err != nil {
		t.Fatal(err)
	}
	eventProcessor, err := cqrs.NewEventProcessorWithConfig(a.router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(p cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return p.EventName, nil },
		SubscriberConstructor:  func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) { return a.broker, nil },
		Marshaler:              ids,
	})
	if err != nil {
		t.Fatal(err)
	}
	commandProcessor, err := cqrs.NewCommandProcessorWithConfig(a.router, cqrs.CommandProcessorConfig{
		GenerateSubscribeTopic: func(p cqrs.CommandProcessorGenerateSubscribeTopicParams) (string, error) { return p.CommandName, nil },
		SubscriberConstructor: func(cqrs.CommandProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return a.broker, nil
		},
		Marshaler: ids,
	})
	if err != nil {
		t.Fatal(err)
	}
	effect := func(ctx context.Context, name string) error {
		tx, err := TxFrom[*sql.Tx](ctx)
		if err != nil {
			return err
		}
		return apply(ctx, tx, name)
	}
	var failures atomic.Int32
	err = eventProcessor.AddHandlers(
		cqrs.NewEventHandler("charge", func(ctx context.Context, e *orderPlaced) error {
			if err := effect(ctx, "charge"); err != nil {
				return err
			}
			if err := events.Publish(ctx, orderCharged(*e)); err != nil {
				return err
			}
			if failures.Add(1) <= 2 {
				return errHandler // its event must not be out
			}
			return nil
		}),
		cqrs.NewEventHandler("mail", func(ctx context.Context, _ *orderPlaced) error { return effect(ctx, "mail") }),
		cqrs.NewEventHandler("ship", func(ctx context.Context, e *orderCharged) error {
			if err := effect(ctx, "ship"); err != nil {
				return err
			}
			return commands.Send(ctx, shipOrder(*e))
		}),
	)
	if err != nil {
		t.Fatal(err)
	}
	err = commandProcessor.AddHandlers(cqrs.NewCommandHandler("carry", func(ctx context.Context, _ *shipOrder) error { return effect(ctx, "carry") }))
	if err != nil {
		t.Fatal(err)
	}
	a.start()

	a.publishTwice(ids, orderPlaced{ID: "1"})
	until(t, "all acknowledged", func() bool { return acknowledged(m.Report()) == 6 })
	want := map[string]int{"charge": 1, "mail": 1, "ship": 1, "carry": 1}
	if got := a.effects(); !reflect.DeepEqual(got, want) {
		t.Errorf("effects %v, want %v", got, want)
	}
	if r := m.Report(); r.OutputsSent != 2 || r.Failed != 2 {
		t.Errorf("report %+v", r)
	}
	a.wantRows(4, 0, 0, 0)
}

// OutputsThroughRouter: a publish that fails nacks the input, whose replay publishes all of its outputs again.
func TestRouterPublishesOutputs(t *testing.T) {
	a := newApp(t)
	m := a.middleware(Config{OutputsThroughRouter: true})
	var tries atomic.Int32
	pub := &recording{hook: func(string, []*message.Message) error {
		if tries.Add(1) <= 2 {
			return errBroker
		}
		return nil
	}}
	a.router.AddPlugin(m.Plugin)
	a.router.AddHandler("ship", "paid", a.broker, "shipped", pub, func(msg *message.Message) ([]*message.Message, error) {
		tx, err := TxFrom[*sql.Tx](msg.Context())
		if err != nil {
			return nil, err
		}
		return []*message.Message{message.NewMessage("", []byte("1")), message.NewMessage("", []byte("2"))}, applying(msg.Context(), tx, msg)
	})
	a.start()
	a.publish("paid", "u-1", "p")
	until(t, "published", func() bool { return len(pub.all()) == 2 })
	if got := a.effects()["ship p"]; got != 1 {
		t.Errorf("effect %d", got)
	}
	stored, err := a.store.Outputs(t.Context(), "7:billing4:ship4:paid", []byte("u-1"))
	if err != nil || len(stored) != 2 {
		t.Fatalf("stored %v, %v", stored, err)
	}
	for i, p := range pub.all() {
		if p.uuid != stored[i].UUID || p.topic != "shipped" {
			t.Errorf("published %v, stored %v", p, stored[i].UUID)
		}
	}
}
