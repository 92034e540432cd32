package idempotency

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// How an ordered subscription ends, over a foreign subscriber.
func TestForeignSubscriptionEnds(t *testing.T) {
	for name, end := range map[string]func(o *orderEnv){
		"Close":             func(o *orderEnv) { go o.sub.Close() }, //nolint:errcheck // ordered looks at it
		"Subscribe context": func(o *orderEnv) { o.cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			ordered(t, nil, func(o *orderEnv) {
				o.put("a1", "a2", "a3", "b1", "b2", "c1", "-1")
				out := o.want("a1", "b1", "c1", "-1")
				o.fail(out[1])                      // b1 is held, b2 behind it
				o.pass(out[2])                      // c1 is done
				synctest.Wait()                     //
				o.put("c2", "a4", "b3", "-2", "-3") // c2 is offered, and nobody takes it
				synctest.Wait()
				start := time.Now()
				end(o)
				o.want()
				// What was not handed out is back; what is behind a1 waits for a1.
				o.wantOutcomes("+c1", "-b1", "-b2", "-c2")
				time.Sleep(3 * time.Second)
				o.want() // and nothing is tried again
				out[0].Nack()
				for range o.out {
					t.Error("handed out at the end")
				}
				if waited := time.Since(start); waited != 3*time.Second {
					t.Errorf("the channel closed after %v", waited)
				}
				o.wantOutcomes("+c1", "-b1", "-b2", "-c2", "-a1", "-a2", "-a3")
			})
		})
	}
}

// A foreign subscriber that closes its channel by itself: what only waits for its turn is handed out, what failed is not
// tried again.
func TestForeignSubscriberEndsByItself(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "a2", "a3", "b1", "b2", "c1", "c2")
		out := o.want("a1", "b1", "c1")
		o.fail(out[1])
		_ = o.feed.Close()
		o.want()
		o.wantOutcomes("-b1", "-b2")
		o.fail(out[2])
		o.wantOutcomes("-b1", "-b2", "-c1", "-c2")
		o.pass(out[0])
		a2 := o.wantOne("a2")
		o.reach(a2)
		a3 := o.wantOne("a3")
		o.pass(a2)
		o.fail(a3)
		if _, open := <-o.out; open {
			t.Error("handed out at the end")
		}
		o.wantOutcomes("-b1", "-b2", "-c1", "-c2", "+a1", "+a2", "-a3")
	})
}

// A copy that nobody settles does not keep the subscription open for ever; one whose delivery is lost not at all.
func TestTheEndIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		lost bool
		want time.Duration
	}{"unsettled": {false, sdk.DefaultDrainTimeout}, "lost": {true, 0}} {
		t.Run(name, func(t *testing.T) {
			ordered(t, nil, func(o *orderEnv) {
				o.put("a1", "a2")
				a1 := o.wantOne("a1")
				if c.lost {
					o.fed["a1"].lose(sdk.ErrDrainTimeout)
				}
				start := time.Now()
				if err := o.sub.Close(); err != nil {
					t.Error(err)
				}
				if waited := time.Since(start); waited != c.want {
					t.Errorf("closed after %v, want %v", waited, c.want)
				}
				if _, open := <-o.out; open {
					t.Error("the channel is open")
				}
				a1.Ack() // and nobody listens
				if tk := o.ticket(a1); tk.line() != "a" {
					t.Error("the ticket is lost")
				} else {
					tk.reached()
					tk.stumbled()
					tk.passed()
				}
				if _, err := o.sub.Subscribe(o.Context(), "orders"); !errors.Is(err, sdk.ErrClosed) {
					t.Errorf("Subscribe after Close: %v", err)
				}
			})
		})
	}
}

// refusing is a subscriber that cannot subscribe.
type refusing struct{ err error }

func (r refusing) Subscribe(context.Context, string) (<-chan *message.Message, error) {
	return nil, r.err
}
func (r refusing) Close() error { return r.err }

func TestTheInnerSubscribersErrorsComeThrough(t *testing.T) {
	e := newEnv(t, func(cfg *Config, _ *fakeStore) { orderByKey(cfg) })
	cause := errors.New("no such queue")
	sub, err := e.m.Ordered(refusing{cause})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sub.Subscribe(t.Context(), "orders"); !errors.Is(err, cause) {
		t.Errorf("Subscribe: %v", err)
	}
	if err := sub.Close(); !errors.Is(err, cause) {
		t.Errorf("Close: %v", err)
	}
}

// engineEnv is an ordered subscription over an sdk.Subscriber and the memory driver, whose router is the test.
type engineEnv struct {
	*orderEnv
	driver sdk.Driver
	broker *memory.Broker
	engine *sdk.Subscriber

	mu     sync.Mutex
	events []sdk.Event
}

func (e *engineEnv) Observe(ev sdk.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.events = append(e.events, ev)
}

func overEngine(t *testing.T, cfg sdk.SubscriberConfig, f func(e *engineEnv)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		network := memory.NewNetwork(memory.Options{})
		driver, err := network.Driver("test")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = driver.Close(context.Background()) }()
		e := &engineEnv{
			orderEnv: &orderEnv{env: newEnv(t, func(cfg *Config, _ *fakeStore) { orderByKey(cfg) })},
			driver:   driver, broker: network.Broker("test"),
		}
		cfg.Group, cfg.Observer = "billing", e
		if e.engine, err = sdk.NewSubscriber(driver, cfg); err != nil {
			t.Fatal(err)
		}
		if e.sub, err = e.m.Ordered(e.engine); err != nil {
			t.Fatal(err)
		}
		var ctx context.Context
		ctx, e.cancel = context.WithCancel(t.Context())
		defer e.cancel()
		if e.out, err = e.sub.Subscribe(ctx, "orders"); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := e.sub.Close(); err != nil {
				t.Error(err)
			}
		}()
		f(e)
	})
}

func (e *engineEnv) send(uuids ...string) {
	e.Helper()
	var batch []sdk.Message
	for _, uuid := range uuids {
		batch = append(batch, sdk.Message{ID: uuid, Key: orderKeyOf(uuid), Metadata: map[string]string{"key": orderKeyOf(uuid)}})
	}
	if err := e.driver.Send(context.Background(), "orders", batch); err != nil {
		e.Fatal(err)
	}
}

// verdicts lists what the engine settled, "+a1" acked and "-a1" requeued.
func (e *engineEnv) verdicts() []string {
	synctest.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	for _, ev := range e.events {
		switch {
		case ev.Kind != sdk.EventSettled:
		case ev.Verdict == sdk.Ack:
			out = append(out, "+"+ev.ID)
		default:
			out = append(out, "-"+ev.ID)
		}
	}
	return out
}

func TestAttemptsOfAHeldMessage(t *testing.T) {
	overEngine(t, sdk.SubscriberConfig{}, func(e *engineEnv) {
		e.send("a1", "a2")
		msg := e.wantOne("a1")
		for n := 1; n <= 3; n++ {
			info, ok := sdk.DeliveryFrom(msg.Context())
			if !ok || info.Attempt != n || info.Redelivered != (n > 1) || info.Topic != "orders" || info.Limits.MaxInFlight != 256 {
				t.Errorf("hand-out %d: %+v, %v", n, info, ok)
			}
			info.RequeueAfter(time.Duration(n) * time.Minute)
			e.fail(msg)
			msg = e.wantAfter(time.Duration(n)*time.Minute, "a1")
		}
		e.pass(msg)
		a2 := e.wantOne("a2")
		if info, _ := sdk.DeliveryFrom(a2.Context()); info.Attempt != 1 {
			t.Errorf("the one behind it: attempt %d", info.Attempt)
		}
		e.pass(a2)
		if got := e.verdicts(); !slices.Equal(got, []string{"+a1", "+a2"}) {
			t.Errorf("settled %v", got)
		}
	})
}

// MaxProcessing is for handlers. What is held, and what waits behind it, stays for as long as it takes.
func TestHeldMessagesAreNotAbandoned(t *testing.T) {
	overEngine(t, sdk.SubscriberConfig{MaxProcessing: time.Minute}, func(e *engineEnv) {
		e.send("a1", "a2", "a3")
		msg := e.wantOne("a1")
		e.reach(msg)
		a2 := e.wantOne("a2")
		e.fail(msg)
		e.sendBack(a2)
		for range 300 {
			e.fail(e.wantAfter(time.Second, "a1"))
		}
		msg = e.wantAfter(time.Second, "a1")
		time.Sleep(59 * time.Second) // its handler takes long
		e.pass(msg)
		e.pass(e.wantOne("a2"))
		a3 := e.wantOne("a3")
		time.Sleep(61 * time.Second)
		if !errors.Is(context.Cause(a3.Context()), sdk.ErrAbandoned) {
			t.Errorf("a handler that takes too long: %v", context.Cause(a3.Context()))
		}
		a3.Nack()
		time.Sleep(time.Second)
		e.pass(e.wantOne("a3"))
		if got := e.verdicts(); !slices.Equal(got, []string{"+a1", "+a2", "-a3", "+a3"}) {
			t.Errorf("settled %v", got)
		}
	})
}

// How an ordered subscription ends, over an sdk.Subscriber: at once what is not out goes back, in order; then what is out
// settles; nothing waits for a timeout.
func TestEngineSubscriptionEnds(t *testing.T) {
	for name, end := range map[string]func(e *engineEnv){
		"Close":               func(e *engineEnv) { go e.sub.Close() },                       //nolint:errcheck // overEngine looks at it
		"Stop of the engine":  func(e *engineEnv) { go e.engine.Stop(context.Background()) }, //nolint:errcheck // its channel closes
		"Close of the engine": func(e *engineEnv) { go e.engine.Close() },                    //nolint:errcheck // its channel closes
		"Subscribe context":   func(e *engineEnv) { e.cancel() },                             //
	} {
		for outcome, succeeds := range map[string]bool{"what is out succeeds": true, "what is out fails": false} {
			t.Run(name+", "+outcome, func(t *testing.T) {
				overEngine(t, sdk.SubscriberConfig{}, func(e *engineEnv) {
					e.send("a1", "a2", "a3", "b1", "b2", "c1", "c2", "-1")
					out := e.want("a1", "b1", "c1", "-1")
					e.fail(out[1])
					e.pass(out[2])
					e.pass(e.wantOne("c2"))
					e.send("c3", "-2") // c3 is offered, and nobody takes it
					synctest.Wait()
					start := time.Now()
					end(e)
					if got, want := e.verdicts(), []string{"+c1", "+c2", "-b1", "-b2", "-c3", "--2"}; !sameSet(got, want) {
						t.Errorf("settled %v, want %v", got, want)
					}
					time.Sleep(3 * time.Second)
					e.want()
					out[3].Ack()
					if succeeds {
						e.pass(out[0])
					} else {
						e.fail(out[0])
					}
					for range e.out {
						t.Error("handed out at the end")
					}
					if waited := time.Since(start); waited != 3*time.Second {
						t.Errorf("the channel closed after %v", waited)
					}
				})
				// The next consumer gets the rest, in order.
			})
		}
	}
}

// wantOutcomes is wantOutcome without regard to the order.
func (o *orderEnv) wantOutcomes(settled ...string) {
	o.Helper()
	synctest.Wait()
	if got := o.feed.outcome(); !sameSet(got, settled) {
		o.Errorf("settled %v, want %v", got, settled)
	}
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// What goes back at the end comes in order to the next consumer.
func TestTheNextConsumerFindsTheOrder(t *testing.T) {
	overEngine(t, sdk.SubscriberConfig{}, func(e *engineEnv) {
		e.send("a1", "a2", "b1", "a3", "b2", "a4")
		out := e.want("a1", "b1")
		e.reach(out[0])
		a2 := e.wantOne("a2")
		go e.sub.Close() //nolint:errcheck // overEngine looks at it
		synctest.Wait()
		e.fail(a2)
		e.fail(out[0])
		e.pass(out[1])
		for range e.out {
		}
		next, err := sdk.NewSubscriber(e.driver, sdk.SubscriberConfig{Group: "billing"})
		if err != nil {
			t.Fatal(err)
		}
		ch, err := next.Subscribe(e.Context(), "orders")
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for range 5 {
			msg := <-ch
			got = append(got, msg.UUID)
			msg.Ack()
		}
		checkOrder(t, got, []string{"a1", "a2", "a3", "a4", "b2"})
		if err := next.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A connection that is cut loses all deliveries at once. The broker brings them again, and the order stays.
func TestACutConnection(t *testing.T) {
	overEngine(t, sdk.SubscriberConfig{}, func(e *engineEnv) {
		e.send("a1", "a2", "a3", "b1")
		out := e.want("a1", "b1")
		e.reach(out[0])
		a2 := e.wantOne("a2")
		e.broker.Disconnect()
		time.Sleep(time.Second)
		again := e.want("a1", "b1")
		if n := e.engine.InFlight(); n != 7 { // four new ones; of the lost, those that handlers have
			t.Errorf("%d messages are in flight", n)
		}
		e.reach(again[0])
		a2again := e.wantOne("a2")
		for _, old := range []*message.Message{out[0], a2} {
			if tk := e.ticket(old); !tk.behind() {
				t.Errorf("the lost copy of %s may run", old.UUID)
			}
			old.Nack()
		}
		e.pass(again[0], again[1], a2again)
		e.pass(e.wantOne("a3"))
		out[1].Ack() // too late, and no harm
		if h := e.m.Report().Health; h.FailingKeys != 0 || h.Held != 0 {
			t.Errorf("health %+v", h)
		}
	})
}
