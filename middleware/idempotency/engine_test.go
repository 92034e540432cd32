package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// engine is an app whose broker is the memory driver, through our own subscriber.
type engine struct {
	*app
	driver sdk.Driver
	broker *memory.Broker
	sub    *sdk.Subscriber
	pub    *sdk.Publisher
}

func newEngine(t *testing.T, cfg sdk.SubscriberConfig) *engine {
	t.Helper()
	network := memory.NewNetwork(memory.Options{})
	driver, err := network.Driver("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = driver.Close(context.Background()) })
	pub, err := sdk.NewPublisher(driver, sdk.PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{app: newApp(t), driver: driver, broker: network.Broker("test"), pub: pub}
	e.subscribe(cfg)
	return e
}

func (e *engine) subscribe(cfg sdk.SubscriberConfig) {
	e.Helper()
	cfg.Group, cfg.Backoff = "billing", sdk.Backoff{Min: time.Millisecond, Max: 10 * time.Millisecond}
	sub, err := sdk.NewSubscriber(e.driver, cfg)
	if err != nil {
		e.Fatal(err)
	}
	e.sub = sub
}

// restart gives a second life of the application: another router and subscriber over the same database and broker.
func (e *engine) restart(cfg sdk.SubscriberConfig) *engine {
	e.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	if err != nil {
		e.Fatal(err)
	}
	life := &engine{app: &app{database: e.database, router: router}, driver: e.driver, broker: e.broker, pub: e.pub}
	life.subscribe(cfg)
	return life
}

// run runs the router under sdk.Run until stop is called, which waits for its end.
func (e *engine) run() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- sdk.Run(ctx, e.router, e.sub) }()
	<-e.router.Running()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-ran; err != nil {
			e.Logf("sdk.Run: %v", err)
		}
	})
}

func (e *engine) send(topic, uuid, payload string) {
	e.Helper()
	if err := e.pub.Publish(topic, message.NewMessage(uuid, []byte(payload))); err != nil {
		e.Fatal(err)
	}
}

// left is what the broker still holds of a topic.
func (e *engine) left(topic string) int {
	return e.broker.Unsettled(topic, "billing") + e.broker.Pending(topic, "billing")
}

// Duplicates, failures, outputs, and nothing left unsettled (T25).
func TestEngine(t *testing.T) {
	e := newEngine(t, sdk.SubscriberConfig{})
	m := e.middleware(Config{Limits: e.sub.Limits(), Outputs: e.pub})
	var seen sync.Map
	e.router.AddConsumerHandler("charge", "orders", e.sub, m.HandleOutputs("shipped", func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
		if err := applying(ctx, tx, msg); err != nil {
			return nil, err
		}
		if _, again := seen.LoadOrStore(msg.UUID, true); !again {
			return nil, errHandler // everyone fails once
		}
		if msg.UUID == "7" {
			return nil, Permanent(errHandler)
		}
		return []*message.Message{message.NewMessage("o"+msg.UUID, nil)}, nil
	}))
	e.router.AddConsumerHandler("ship", "shipped", e.sub, m.Handle(applying))
	stop := e.run()

	const n = 20
	for i := range n {
		for range 3 {
			e.send("orders", fmt.Sprint(i), "p")
		}
	}
	defer func() {
		if t.Failed() {
			t.Logf("%+v; left %d and %d", m.Report(), e.left("orders"), e.left("shipped"))
		}
	}()
	until(t, "all acknowledged", func() bool { return acknowledged(m.Report()) == 3*n+n-1 })
	stop()
	if got := e.effects(); got["charge p"] != n-1 || got["ship "] != n-1 {
		t.Errorf("effects %v", got)
	}
	r := m.Report()
	if r.Handled != 2*(n-1) || r.Diverted != 1 || r.Failed != n || !slices.Equal(r.Unchecked, []string{"Horizon"}) {
		t.Errorf("report %+v", r)
	}
	if left := e.left("orders") + e.left("shipped"); left != 0 {
		t.Errorf("%d messages are left at the broker", left)
	}
	e.wantRows(2*(n-1), 1, 0, 1)
}

// While the database does not move, what waits in memory is the window and no more; the rest stays with the broker.
func TestWindowHoldsWhileTheDatabaseStandsStill(t *testing.T) {
	const window, n = 16, 400
	e := newEngine(t, sdk.SubscriberConfig{MaxInFlight: window})
	m := e.middleware(Config{Limits: e.sub.Limits()})
	e.router.AddConsumerHandler("charge", "orders", e.sub, m.Handle(applying))
	stop := e.run()
	defer stop()
	writer, err := e.db.BeginTx(t.Context(), nil) // somebody else holds the write lock
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		e.send("orders", fmt.Sprint(i), "p")
	}
	until(t, "the window is full", func() bool { return m.Report().Health.Pending == window })
	for range 100 {
		pending, lent, flying := m.Report().Health.Pending, e.broker.Unsettled("orders", "billing"), e.sub.InFlight()
		if pending > window || lent > window || flying > window {
			t.Fatalf("%d pending, %d lent by the broker, %d in flight: the window is %d", pending, lent, flying, window)
		}
		time.Sleep(time.Millisecond)
	}
	if err := writer.Rollback(); err != nil {
		t.Fatal(err)
	}
	until(t, "all acknowledged", func() bool { return acknowledged(m.Report()) == n })
	if got := e.effects()["charge p"]; got != n {
		t.Errorf("%d effects of %d messages", got, n)
	}
}

// T20: the application stops while a handler runs on SQLite's only lane and others wait for it. Nothing is charged or
// diverted, what did not commit is still at the broker, and the application's second life finishes the work.
func TestEngineShutdown(t *testing.T) {
	e := newEngine(t, sdk.SubscriberConfig{DrainTimeout: 300 * time.Millisecond})
	m := e.middleware(Config{Limits: e.sub.Limits()})
	var second atomic.Bool
	handler := func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		if err := apply(ctx, tx, "all"); err != nil {
			return err
		}
		if msg.UUID[0] == 's' && !second.Load() { // slow: it ends only when it is told to
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}
	e.router.AddConsumerHandler("charge", "orders", e.sub, m.Handle(handler))
	stop := e.run()
	const n = 10
	for i := range n {
		e.send("orders", fmt.Sprint("f", i), "p")
	}
	until(t, "the fast ones are done", func() bool { return acknowledged(m.Report()) == n })
	e.send("orders", "s", "p")
	until(t, "the slow one runs", func() bool { return m.Report().Health.LanesBusy == 1 })
	for i := range n {
		e.send("orders", fmt.Sprint("l", i), "p") // behind the slow one, on SQLite's only lane
	}
	stop()
	done, left := e.effects()["all"], e.left("orders")
	if done+left < 2*n+1 || left == 0 { // one more where the end came between COMMIT and Ack
		t.Errorf("%d effects, %d messages left, of %d", done, left, 2*n+1)
	}
	if r := m.Report(); r.Failed != 0 || r.Diverted != 0 || r.Health.Pending != 0 || int(r.Handled) != done {
		t.Errorf("report %+v", r)
	}
	e.wantRows(done, 0, 0, 0)

	second.Store(true)
	life := e.restart(sdk.SubscriberConfig{})
	m = life.middleware(Config{Limits: life.sub.Limits()})
	life.router.AddConsumerHandler("charge", "orders", life.sub, m.Handle(handler))
	stop = life.run()
	until(t, "the second life is done", func() bool { return acknowledged(m.Report()) == left })
	stop()
	if got := e.effects()["all"]; got != 2*n+1 {
		t.Errorf("%d effects in the end", got)
	}
	e.wantRows(2*n+1, 0, 0, 0)
}

// A delivery that is lost while its handler runs is not committed: its message comes again for certain.
func TestEngineLosesADelivery(t *testing.T) {
	e := newEngine(t, sdk.SubscriberConfig{})
	m := e.middleware(Config{Limits: e.sub.Limits()})
	var runs atomic.Int32
	e.router.AddConsumerHandler("charge", "orders", e.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		if err := applying(context.WithoutCancel(ctx), tx, msg); err != nil {
			return err
		}
		if runs.Add(1) == 1 {
			e.broker.Disconnect()
			<-ctx.Done()
			if !errors.Is(context.Cause(ctx), sdk.ErrDeliveryLost) {
				t.Errorf("cause %v", context.Cause(ctx))
			}
		}
		return nil
	}))
	stop := e.run()
	defer stop()
	e.send("orders", "u-1", "p")
	until(t, "handled", func() bool { return m.Report().Handled == 1 && e.left("orders") == 0 })
	if got := e.effects()["charge p"]; got != 1 || m.Report().Failed != 0 || m.Report().Returned != 1 {
		t.Errorf("effect %d, report %+v", got, m.Report())
	}
}

// RetryAfter reaches the broker, and an engine without a long enough lease is found out at New.
func TestEngineLimits(t *testing.T) {
	e := newEngine(t, sdk.SubscriberConfig{Lease: 5 * time.Second})
	if _, err := New(e.store, Config{Consumer: "billing", Limits: e.sub.Limits()}); err == nil {
		t.Error("a lease below TxBudget is refused")
	}
	m := e.middleware(Config{TxBudget: time.Second, Limits: e.sub.Limits()})
	var first time.Time
	e.router.AddConsumerHandler("charge", "orders", e.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		if first.IsZero() {
			first = time.Now()
			return RetryAfter(errHandler, 300*time.Millisecond)
		}
		if d := time.Since(first); d < 300*time.Millisecond {
			t.Errorf("again after %v", d)
		}
		return applying(ctx, tx, msg)
	}))
	stop := e.run()
	defer stop()
	e.send("orders", "u-1", "p")
	until(t, "handled", func() bool { return m.Report().Handled == 1 })
}
