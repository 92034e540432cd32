package idempotency

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/sony/gobreaker"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// seen is a subscriber decorator that notes in which order a subscriber hands out. Added before Ordered, it is inside it.
type seen struct {
	mu    sync.Mutex
	uuids []string
	known map[string]bool
}

func (s *seen) decorate(sub message.Subscriber) (message.Subscriber, error) {
	return message.MessageTransformSubscriberDecorator(func(msg *message.Message) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.known == nil {
			s.known = map[string]bool{}
		}
		if !s.known[msg.UUID] {
			s.uuids = append(s.uuids, msg.UUID)
		}
		s.known[msg.UUID] = true
	})(sub)
}

func (s *seen) order() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.uuids...)
}

// unreliable is a handler that fails at random, at most three times for each message, and takes some time.
type unreliable struct {
	rate float64

	mu       sync.Mutex
	rng      *rand.Rand
	failures map[string]int
}

func newUnreliable(seed uint64, rate float64) *unreliable {
	return &unreliable{rate: rate, rng: rand.New(rand.NewPCG(seed, 1)), failures: map[string]int{}}
}

var errUnreliable = errors.New("the handler failed")

func (u *unreliable) handle(msg *message.Message) error {
	u.mu.Lock()
	fails := u.failures[msg.UUID] < 3 && u.rng.Float64() < u.rate
	if fails {
		u.failures[msg.UUID]++
	}
	panics := fails && u.rng.IntN(4) == 0
	took := time.Duration(u.rng.IntN(5)) * time.Millisecond
	u.mu.Unlock()
	time.Sleep(took)
	switch {
	case panics:
		panic(errUnreliable)
	case fails:
		return errUnreliable
	default:
		return nil
	}
}

// keyedUUIDs are messages of five keys, and some without.
func keyedUUIDs(n int) []string {
	uuids := make([]string, n)
	for i := range uuids {
		uuids[i] = fmt.Sprintf("%c%03d", "aabcde-"[i*5%7], i)
	}
	return uuids
}

// limiter lets n messages in at a time, as an application's own middleware would.
func limiter(n int) message.HandlerMiddleware {
	slots := make(chan struct{}, n)
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			slots <- struct{}{}
			defer func() { <-slots }()
			return h(msg)
		}
	}
}

// delayed lets messages arrive at random times, out of order.
func delayed(seed uint64) message.HandlerMiddleware {
	rng := rand.New(rand.NewPCG(seed, 2))
	var mu sync.Mutex
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			mu.Lock()
			d := time.Duration(rng.IntN(20)) * time.Millisecond
			mu.Unlock()
			time.Sleep(d)
			return h(msg)
		}
	}
}

// filtered acknowledges every tenth message without handling it.
func filtered(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		if msg.UUID[len(msg.UUID)-1] == '7' {
			return nil, nil
		}
		return h(msg)
	}
}

// What stands outside: whatever it is, order stays, nothing is lost, and nothing stands still.
func outerMiddlewares(poison message.Publisher) map[string]func() []message.HandlerMiddleware {
	list := func(m ...message.HandlerMiddleware) func() []message.HandlerMiddleware {
		return func() []message.HandlerMiddleware { return m }
	}
	inPlace := middleware.Retry{MaxRetries: 2, InitialInterval: 5 * time.Millisecond}.Middleware
	onError := middleware.DelayOnError{InitialInterval: time.Millisecond, MaxInterval: 10 * time.Millisecond, Multiplier: 2}
	return map[string]func() []message.HandlerMiddleware{
		"nothing":                list(),
		"Retry":                  list(inPlace),
		"Retry around Recoverer": list(inPlace, middleware.Recoverer),
		"Recoverer":              list(middleware.Recoverer),
		"Timeout":                list(middleware.Timeout(time.Minute)),
		"DelayOnError":           list(onError.Middleware),
		"a filter":               list(filtered),
		"PoisonQueue": func() []message.HandlerMiddleware {
			poisoned, err := middleware.PoisonQueueWithFilter(poison, "poison", func(err error) bool {
				return errors.Is(err, errUnreliable)
			})
			if err != nil {
				panic(err)
			}
			return []message.HandlerMiddleware{poisoned}
		},
		"CircuitBreaker": func() []message.HandlerMiddleware {
			return []message.HandlerMiddleware{middleware.NewCircuitBreaker(gobreaker.Settings{
				Timeout:     50 * time.Millisecond,
				ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures > 5 },
			}).Middleware}
		},
		"Throttle": func() []message.HandlerMiddleware {
			return []message.HandlerMiddleware{middleware.NewThrottle(200, time.Second).Middleware}
		},
		"random delays":  func() []message.HandlerMiddleware { return []message.HandlerMiddleware{delayed(3)} },
		"a limiter of 4": func() []message.HandlerMiddleware { return []message.HandlerMiddleware{limiter(4)} },
		"a limiter of 1": func() []message.HandlerMiddleware { return []message.HandlerMiddleware{limiter(1)} },
		"a limiter around delays": func() []message.HandlerMiddleware {
			return []message.HandlerMiddleware{limiter(4), delayed(4)}
		},
		"many": func() []message.HandlerMiddleware {
			return []message.HandlerMiddleware{limiter(4), delayed(5), inPlace, middleware.Recoverer, filtered}
		},
	}
}

// expected is what is left for the handler.
func expected(name string, uuids []string, poisoned map[string]bool) []string {
	var left []string
	for _, uuid := range uuids {
		if (name == "a filter" || name == "many") && uuid[len(uuid)-1] == '7' || poisoned[uuid] {
			continue
		}
		left = append(left, uuid)
	}
	return left
}

type poisonBox struct {
	mu    sync.Mutex
	uuids map[string]bool
}

func (p *poisonBox) Publish(_ string, msgs ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, msg := range msgs {
		p.uuids[msg.UUID] = true
	}
	return nil
}

func (p *poisonBox) Close() error { return nil }

func (p *poisonBox) all() map[string]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string]bool{}
	for uuid := range p.uuids {
		out[uuid] = true
	}
	return out
}

// T24, as far as the decorator goes: with a stand-in for the middleware's inside, and with the middleware.
func TestOrderUnderOuterMiddlewares(t *testing.T) {
	for name := range outerMiddlewares(&poisonBox{}) {
		for _, broker := range []string{"GoChannel", "GoChannel, blocking", "memory", "memory, small window"} {
			for inside, made := range insides() {
				t.Run(name+", "+broker+", "+inside, func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						underOuterMiddlewares(t, name, broker, made)
					})
				})
			}
		}
	}
}

// inner makes the handler that a router calls. All that one makes write into the same runs.
type inner func(m *Middleware[*fakeTx], handle func(*message.Message) error) message.NoPublishHandlerFunc

func insides() map[string]func() (inner, *runs) {
	return map[string]func() (inner, *runs){
		"a stand-in": func() (inner, *runs) {
			r := newRuns()
			return func(m *Middleware[*fakeTx], handle func(*message.Message) error) message.NoPublishHandlerFunc {
				return r.count(newStandIn(m, func(msg *message.Message) error {
					r.ran(msg.UUID)
					return handle(msg)
				}).handler)
			}, r
		},
		"the middleware": func() (inner, *runs) {
			r := newRuns()
			return func(m *Middleware[*fakeTx], handle func(*message.Message) error) message.NoPublishHandlerFunc {
				return r.count(m.Handle(func(_ context.Context, tx *fakeTx, msg *message.Message) error {
					r.ran(msg.UUID)
					tx.add(msg.UUID, 1)
					return handle(msg)
				}))
			}, r
		},
	}
}

// runs knows in which order handlers ran for the last time: a run that was rolled back does not count.
type runs struct {
	mu   sync.Mutex
	n    int
	last map[string]int
	done map[string]bool
}

func newRuns() *runs { return &runs{last: map[string]int{}, done: map[string]bool{}} }

func (r *runs) ran(uuid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.n++
	r.last[uuid] = r.n
}

// count notes what was handled with success.
func (r *runs) count(h message.NoPublishHandlerFunc) message.NoPublishHandlerFunc {
	return func(msg *message.Message) error {
		err := h(msg)
		if err == nil {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.done[msg.UUID] = true
		}
		return err
	}
}

func (r *runs) handled() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	uuids := slices.Collect(maps.Keys(r.done))
	slices.SortFunc(uuids, func(a, b string) int { return cmp.Compare(r.last[a], r.last[b]) })
	return uuids
}

func underOuterMiddlewares(t *testing.T, name, broker string, made func() (inner, *runs)) {
	uuids := keyedUUIDs(100)
	if name == "CircuitBreaker" { // nobody slows down what a foreign broker hands out again without a key
		uuids = slices.DeleteFunc(uuids, func(uuid string) bool { return orderKeyOf(uuid) == "" })
	}
	box := &poisonBox{uuids: map[string]bool{}}
	e := newEnv(t, func(cfg *Config, _ *fakeStore) {
		orderByKey(cfg)
		cfg.RetryBackoff = sdk.Backoff{Min: 10 * time.Millisecond, Max: 100 * time.Millisecond}
	})
	source, sub, publish, stop := brokerFor(t, broker)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	inside, c := made()
	s := &seen{}
	router.AddSubscriberDecorators(s.decorate, e.m.Ordered)
	router.AddMiddleware(outerMiddlewares(box)[name]()...)
	router.AddConsumerHandler("charge", "orders", sub, inside(e.m, newUnreliable(7, 0.2).handle))
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- sdk.Run(ctx, router, source...) }()
	<-router.Running()
	go publish(uuids)
	want := func() []string { return expected(name, s.order(), box.all()) }
	for start := time.Now(); len(s.order()) < len(uuids) || len(c.handled()) < len(want()); time.Sleep(10 * time.Millisecond) {
		if time.Since(start) > time.Minute {
			t.Errorf("stands still: %d seen, %d handled of %d; health %+v", len(s.order()), len(c.handled()), len(want()), e.m.Report().Health)
			break
		}
	}
	checkOrder(t, c.handled(), want())
	start := time.Now()
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("the shutdown took %v", d)
	}
	if h := e.m.Report().Health; h.Held != 0 || h.FailingKeys != 0 || h.StandsStill {
		t.Errorf("health after the end: %+v", h)
	}
	stop()
}

// brokerFor gives a subscriber, and what publishes to it. source is the subscriber where it is one of ours.
func brokerFor(t *testing.T, name string) (source []*sdk.Subscriber, sub message.Subscriber, publish func([]string), stop func()) {
	t.Helper()
	if name == "GoChannel" || name == "GoChannel, blocking" {
		g := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: name != "GoChannel"}, nil)
		return nil, g, func(uuids []string) {
			for _, uuid := range uuids {
				msg := message.NewMessage(uuid, nil)
				msg.Metadata.Set("key", orderKeyOf(uuid))
				if err := g.Publish("orders", msg); err != nil {
					t.Error(err)
				}
			}
		}, func() { _ = g.Close() }
	}
	driver, err := memory.NewNetwork(memory.Options{}).Driver("test")
	if err != nil {
		t.Fatal(err)
	}
	cfg := sdk.SubscriberConfig{Group: "billing"}
	if name != "memory" {
		cfg.MaxInFlight = 5
	}
	engine, err := sdk.NewSubscriber(driver, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return []*sdk.Subscriber{engine}, engine, func(uuids []string) {
		send(t, driver, uuids)
	}, func() { _ = driver.Close(context.Background()) }
}

func send(t *testing.T, driver sdk.Driver, uuids []string) {
	t.Helper()
	for _, uuid := range uuids {
		msg := sdk.Message{ID: uuid, Key: orderKeyOf(uuid), Metadata: map[string]string{"key": orderKeyOf(uuid)}}
		if err := driver.Send(context.Background(), "orders", []sdk.Message{msg}); err != nil {
			t.Error(err)
		}
	}
}

// Consumers that are ended in the middle of failures, one after the other: the order goes on where it stopped, because the
// broker keeps it when it takes messages back, and no end waits for a timeout. Watermill's Router.Close holds a mutex for as
// long as handlers run, so virtual time would stand still under it.
func TestOrderThroughRestarts(t *testing.T) {
	byRun := func(_ *message.Router, cancel context.CancelFunc) { cancel() }
	byRouter := func(router *message.Router, _ context.CancelFunc) { _ = router.Close() }
	for inside, made := range insides() {
		for seed := range uint64(10) {
			t.Run(fmt.Sprint(inside, ", sdk.Run, seed ", seed), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { throughRestarts(t, seed, byRun, made) })
			})
		}
		for seed := range uint64(2) {
			t.Run(fmt.Sprint(inside, ", Router.Close, seed ", seed), func(t *testing.T) { throughRestarts(t, seed, byRouter, made) })
		}
	}
}

func throughRestarts(t *testing.T, seed uint64, end func(*message.Router, context.CancelFunc), made func() (inner, *runs)) {
	driver, err := memory.NewNetwork(memory.Options{}).Driver("test")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = driver.Close(context.Background()) }()
	uuids := keyedUUIDs(120)
	if err := driver.Prepare(context.Background(), sdk.Binding{Topic: "orders", Group: "billing", Declare: true}); err != nil {
		t.Fatal(err)
	}
	sent := make(chan struct{})
	go func() { defer close(sent); send(t, driver, uuids) }()
	handler, store := newUnreliable(seed, 0.3), newFakeStore()
	inside, c := made()
	for life := 0; len(c.handled()) < len(uuids); life++ {
		if life > 200 {
			t.Fatalf("after %d lives %d of %d are handled", life, len(c.handled()), len(uuids))
		}
		cfg := Config{Consumer: "billing"}
		orderByKey(&cfg)
		cfg.RetryBackoff = sdk.Backoff{Min: 10 * time.Millisecond, Max: 100 * time.Millisecond}
		m, err := New(store, cfg)
		if err != nil {
			t.Fatal(err)
		}
		oneLife(t, driver, m, inside(m, handler.handle), end)
	}
	<-sent
	checkOrder(t, c.handled(), uuids)
}

// oneLife runs a consumer for a short time.
func oneLife(t *testing.T, driver sdk.Driver, m *Middleware[*fakeTx], h message.NoPublishHandlerFunc, end func(*message.Router, context.CancelFunc)) {
	t.Helper()
	sub, err := sdk.NewSubscriber(driver, sdk.SubscriberConfig{Group: "billing", MaxInFlight: 20, Backoff: sdk.Backoff{Max: 100 * time.Millisecond}})
	if err != nil {
		t.Fatal(err)
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	router.AddSubscriberDecorators(m.Ordered)
	router.AddMiddleware(limiter(4))
	router.AddConsumerHandler("charge", "orders", sub, h)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ran := make(chan error, 1)
	go func() { ran <- sdk.Run(ctx, router, sub) }()
	<-router.Running()
	time.Sleep(40 * time.Millisecond)
	start := time.Now()
	end(router, cancel)
	if err := <-ran; err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("the end took %v", d)
	}
}

// A plain Router.Close, without sdk.Run, over a foreign broker, while a key fails: nothing waits for what is held.
func TestRouterCloseOverAForeignBroker(t *testing.T) {
	e := newEnv(t, func(cfg *Config, _ *fakeStore) { orderByKey(cfg) })
	g := gochannel.NewGoChannel(gochannel.Config{}, nil)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	c := newStandIn(e.m, func(*message.Message) error { return errUnreliable })
	router.AddSubscriberDecorators(e.m.Ordered)
	router.AddConsumerHandler("charge", "orders", g, c.handler)
	ran := make(chan error, 1)
	go func() { ran <- router.Run(context.Background()) }()
	<-router.Running()
	for _, uuid := range []string{"a1", "a2", "b1"} {
		msg := message.NewMessage(uuid, nil)
		msg.Metadata.Set("key", orderKeyOf(uuid))
		if err := g.Publish("orders", msg); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "three are held", func() bool { return e.m.Report().Health.Held == 3 })
	start := time.Now()
	if err := router.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ran; err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("the end took %v", d)
	}
	_ = g.Close()
}
