package idempotency

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/sdk"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// routed is a message context as a router, and where info is set an sdk.Subscriber, makes it. The keys of both packages
// are known by their types' names.
type routed struct {
	context.Context
	handler, topic, publishTopic string
	info                         *sdk.DeliveryInfo
}

func (c *routed) Value(key any) any {
	switch reflect.TypeOf(key).String() {
	case "message.ctxKey":
		switch fmt.Sprint(key) {
		case "handler_name":
			return c.handler
		case "subscribe_topic":
			return c.topic
		case "publish_topic":
			return c.publishTopic
		}
	case "sdk.deliveryKey":
		if c.info != nil {
			return c.info
		}
	}
	return c.Context.Value(key)
}

// requeueDelay reads what RequeueAfter was told.
func requeueDelay(info *sdk.DeliveryInfo) time.Duration {
	return time.Duration(reflect.ValueOf(info).Elem().FieldByName("delay").FieldByName("v").Int())
}

// env is a middleware over the fake store.
type env struct {
	*testing.T
	store *fakeStore
	m     *Middleware[*fakeTx]
	log   *watermill.CaptureLoggerAdapter
}

func newEnv(t *testing.T, change func(*Config, *fakeStore)) *env {
	t.Helper()
	logger := watermill.NewCaptureLogger()
	store, cfg := newFakeStore(), Config{Consumer: "billing", Logger: logger}
	if change != nil {
		change(&cfg, store)
	}
	m, err := New(store, cfg)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	return &env{T: t, store: store, m: m, log: logger}
}

// bubble runs a test with virtual time.
func bubble(t *testing.T, change func(*Config, *fakeStore), f func(e *env)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(newEnv(t, change)) })
}

func deliver(uuid, payload string) *message.Message {
	return deliverTo("charge", "orders", "", uuid, payload)
}

func deliverTo(handler, topic, publishTopic, uuid, payload string) *message.Message {
	msg := message.NewMessage(uuid, []byte(payload))
	msg.SetContext(&routed{Context: context.Background(), handler: handler, topic: topic, publishTopic: publishTopic})
	return msg
}

// withDelivery makes it a delivery of an sdk.Subscriber.
func withDelivery(msg *message.Message) (*message.Message, *sdk.DeliveryInfo) {
	ctx := *msg.Context().(*routed)
	ctx.info = &sdk.DeliveryInfo{Attempt: 1}
	msg.SetContext(&ctx)
	return msg, ctx.info
}

// withCancel makes its context one that can be cancelled.
func withCancel(msg *message.Message) (*message.Message, context.CancelFunc) {
	ctx := *msg.Context().(*routed)
	inner, cancel := context.WithCancel(ctx.Context)
	ctx.Context = inner
	msg.SetContext(&ctx)
	return msg, cancel
}

// counting is a handler that adds one to the effect "done".
func (e *env) counting() message.HandlerFunc {
	return e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		tx, err := TxFrom[*fakeTx](msg.Context())
		if err != nil {
			return nil, err
		}
		tx.add("done", 1)
		return nil, nil
	})
}

// acting is a handler that adds one to the effect "done" and then does what f says.
func (e *env) acting(f func(msg *message.Message) error) message.HandlerFunc {
	return e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		tx, err := TxFrom[*fakeTx](msg.Context())
		if err != nil {
			return nil, err
		}
		tx.add("done", 1)
		return nil, f(msg)
	})
}

// wantEffect checks how often the handler's effect was applied, and that no transaction stayed open.
func (e *env) wantEffect(n int) {
	e.Helper()
	if got := e.store.effect("done"); got != n {
		e.Errorf("effect %d, want %d", got, n)
	}
	if open := e.store.openNow(); open != 0 {
		e.Errorf("%d transactions are open", open)
	}
	for wait := time.Millisecond; e.m.Report().Health.LanesBusy != 0; wait *= 2 { // whoever answered us still lets go of it
		if wait > time.Second {
			e.Errorf("%d lanes are held", e.m.Report().Health.LanesBusy)
			return
		}
		time.Sleep(wait)
	}
}

// wantCounts checks all counters that are not zero.
func (e *env) wantCounts(want map[string]uint64) {
	e.Helper()
	got := map[string]uint64{}
	r := reflect.ValueOf(e.m.Report())
	for i := range r.NumField() {
		if f := r.Field(i); f.Kind() == reflect.Uint64 && f.Uint() != 0 {
			got[r.Type().Field(i).Name] = f.Uint()
		}
	}
	if !reflect.DeepEqual(got, want) {
		e.Errorf("counters %v, want %v", got, want)
	}
	if pending := e.m.Report().Health.Pending; pending != 0 {
		e.Errorf("%d messages are pending", pending)
	}
}

// recording is a publisher that keeps what it gets, and fails or does what the hook says.
type recording struct {
	hook func(topic string, messages []*message.Message) error

	mu     sync.Mutex
	got    []published
	calls  int
	closed int
}

type published struct{ topic, uuid, payload string }

func (r *recording) Publish(topic string, messages ...*message.Message) error {
	r.mu.Lock()
	r.calls++
	r.mu.Unlock()
	if r.hook != nil {
		if err := r.hook(topic, messages); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, msg := range messages {
		r.got = append(r.got, published{topic, msg.UUID, string(msg.Payload)})
	}
	return nil
}

func (r *recording) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed++
	return nil
}

func (r *recording) all() []published {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]published(nil), r.got...)
}

func (r *recording) called() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls
}
