package idempotency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// After a restart the parked messages come first, before anything of their keys, whoever the subscriber is.
func TestParkedMessagesSurviveARestart(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.parkA()
		p.close()
		p.db.set(time.Millisecond, nil)
		p.subscribe()
		time.Sleep(time.Second)
		p.want() // a foreign subscriber: nobody knows yet whose they are
		p.put("a4", "b1")
		p.want()
		time.Sleep(10 * time.Millisecond)
		got := p.take()
		slices.SortFunc(got, func(a, b *message.Message) int { return strings.Compare(a.UUID, b.UUID) })
		if uuids := uuidsOf(got); !slices.Equal(uuids, []string{"a1", "b1"}) {
			t.Fatalf("handed out %v", uuids)
		}
		p.pass(got...)
		for _, uuid := range []string{"a2", "a3", "a4"} {
			time.Sleep(10 * time.Millisecond)
			p.pass(p.wantOne(uuid))
		}
		time.Sleep(10 * time.Millisecond)
		p.wantParked()
	})
}

// Two handlers of one topic do not take each other's parked messages; a renamed one finds its own.
func TestParkedMessagesBelongToTheirHandler(t *testing.T) {
	for name, c := range map[string]struct {
		handler string
		aliases map[string]string
		topic   string
		found   bool
	}{
		"the same":         {"charge", nil, "orders", true},
		"another handler":  {"ship", nil, "orders", false},
		"renamed":          {"bill", map[string]string{"bill": "charge"}, "orders", true},
		"another topic":    {"charge", nil, "refunds", false},
		"shifted borders ": {"charge6:orders", nil, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			parking(t, nil, func(p *parkingEnv) {
				p.parkA()
				p.close()
				cfg := p.m.cfg
				cfg.Aliases = c.aliases
				m, err := New(p.db, cfg)
				if err != nil {
					t.Fatal(err)
				}
				feed := newFeed()
				sub, err := m.Ordered(feed)
				if err != nil {
					t.Fatal(err)
				}
				out, err := sub.Subscribe(p.Context(), c.topic)
				if err != nil {
					t.Fatal(err)
				}
				msg := message.NewMessage("b1", nil)
				msg.SetContext(&routed{Context: context.Background(), handler: c.handler, topic: c.topic})
				feed.ch <- msg
				got := []string{}
				for range 2 {
					synctest.Wait()
					select {
					case msg := <-out:
						got = append(got, msg.UUID)
						msg.Ack()
					default:
					}
				}
				if slices.Contains(got, "a1") != c.found || !slices.Contains(got, "b1") {
					t.Errorf("handed out %v", got)
				}
				if err := sub.Close(); err != nil {
					t.Error(err)
				}
				p.subscribe() // for the end of the test
			})
		})
	}
}

// A database that does not take what is to be parked: the subscription stands still, nothing is lost, and it goes on by
// itself.
func TestADatabaseThatDoesNotPark(t *testing.T) {
	const says = "Order: the database does not take or give parked messages; it is asked again"
	parking(t, nil, func(p *parkingEnv) {
		p.put("b0") // so that the table has been asked once
		p.pass(p.wantOne("b0"))
		p.db.set(0, errGone)
		p.put("a1", "a2", "a3")
		p.fail(p.wantOne("a1"))
		p.put("b1")
		p.want()
		time.Sleep(30 * time.Second)
		h := p.m.Report().Health
		if !h.StandsStill || h.Held != 3 || h.Parked != 0 {
			t.Errorf("health %+v", h)
		}
		p.wantOutcome("+b0")
		if n := p.logged(watermill.ErrorLogLevel, says); n != 1 {
			t.Errorf("the outage was logged %d times", n)
		}
		p.db.set(0, nil)
		time.Sleep(5 * time.Second)
		p.wantParked("a1", "a2", "a3")
		got := p.take()
		if !slices.Contains(uuidsOf(got), "b1") {
			t.Errorf("handed out %v", uuidsOf(got))
		}
		p.pass(got...)
		if h := p.m.Report().Health; h.StandsStill {
			t.Errorf("health %+v", h)
		}
	})
}

// The same for reading and deleting.
func TestADatabaseThatDoesNotGive(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.parkA()
		p.db.set(0, errGone)
		time.Sleep(10 * time.Second)
		p.want()
		p.db.set(0, nil)
		time.Sleep(5 * time.Second)
		a1 := p.wantOne("a1")
		p.db.set(0, errGone)
		p.pass(a1)
		time.Sleep(10 * time.Second)
		p.want() // nothing is read before what was handled is deleted
		p.db.set(0, nil)
		time.Sleep(5 * time.Second)
		p.pass(p.wantOne("a2"))
		p.pass(p.wantOne("a3"))
		p.wantParked()
	})
}

// A database that is away when the subscription begins: nothing is handed out before it is known what is parked.
func TestTheBeginningWaitsForTheDatabase(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.db.set(0, errGone)
		p.put("a1", "b1")
		time.Sleep(time.Minute)
		p.want()
		if n := p.feed.unread(); n != 1 {
			t.Errorf("%d messages are unread, want 1", n)
		}
		p.db.set(0, nil)
		time.Sleep(5 * time.Second)
		p.pass(p.want("a1", "b1")...)
	})
}

// How it ends: what is being stored is stored and acknowledged, the rest goes back; parked messages that are handled are
// waited for, and their rows go.
func TestTheEndWhileParking(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.put("b0")
		p.pass(p.wantOne("b0"))
		p.db.set(3*time.Second, nil)
		p.put("a1", "a2", "a3")
		p.fail(p.wantOne("a1"))
		p.put("a4")
		time.Sleep(time.Second)
		start := time.Now()
		p.cancel()
		for range p.out {
			t.Error("handed out at the end")
		}
		if d := time.Since(start); d > 3*time.Second {
			t.Errorf("the end took %v", d)
		}
		p.wantParked("a1", "a2", "a3")
		p.wantOutcomes("+b0", "+a1", "+a2", "+a3") // a4 was left to the subscriber
	})
}

func TestTheEndWhileReplaying(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.parkA()
		a1 := p.wantAfter(time.Second, "a1")
		p.pass(a1)
		a2 := p.wantOne("a2")
		p.reach(a2)
		p.cancel()
		synctest.Wait()
		start := time.Now()
		time.Sleep(5 * time.Second)
		p.want()
		p.pass(a2)
		for range p.out {
			t.Error("handed out at the end")
		}
		if d := time.Since(start); d != 5*time.Second {
			t.Errorf("the end took %v", d)
		}
		p.wantParked("a3")
	})
}

// A parked message whose handler does not end: it is waited for as long as others are, then its context ends.
func TestTheEndOfAReplayIsBounded(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.parkA()
		a1 := p.wantAfter(time.Second, "a1")
		start := time.Now()
		p.cancel()
		for range p.out {
			t.Error("handed out at the end")
		}
		if d := time.Since(start); d != sdk.DefaultDrainTimeout {
			t.Errorf("the end took %v", d)
		}
		synctest.Wait()
		if !errors.Is(context.Cause(a1.Context()), sdk.ErrDrainTimeout) {
			t.Errorf("its context: %v", context.Cause(a1.Context()))
		}
		p.wantParked("a1", "a2", "a3")
	})
}

// A process that dies between storing and acknowledging gets the messages again: they are not stored twice.
func TestWhatIsParkedAndComesAgain(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.parkA()
		p.put("a1", "a2", "a3") // the broker never learned of it
		p.wantParked("a1", "a2", "a3")
		p.wantOutcomes("+a1", "+a2", "+a3", "+a1", "+a2", "+a3")
		p.pass(p.wantAfter(time.Second, "a1"))
		p.pass(p.wantOne("a2"))
		p.pass(p.wantOne("a3"))
		p.wantParked()
		if h := p.m.Report().Health; h.ParkedKeys != 0 || h.Parked != 0 {
			t.Errorf("health %+v", h)
		}
	})
}

// Rows that somebody else has handled meanwhile are not missed.
func TestRowsThatAreGone(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.parkA()
		p.db.mu.Lock()
		p.db.rows = nil
		p.db.mu.Unlock()
		p.put("a4")
		synctest.Wait()
		p.db.mu.Lock()
		p.db.rows = nil
		p.db.mu.Unlock()
		time.Sleep(time.Second)
		p.want()
		if h := p.m.Report().Health; h.ParkedKeys != 0 || h.Parked != 0 {
			t.Errorf("health %+v", h)
		}
		p.put("a5")
		p.pass(p.wantOne("a5"))
	})
}

func TestParkKeysNeedsAStoreThatParks(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"no parker":      {orderByKey, "receipts.Parker"},
		"no order key":   {func(*Config) {}, "OrderKey"},
		"unknown policy": {func(cfg *Config) { orderByKey(cfg); cfg.OrderPolicy = ParkKeys + 1 }, "use StandStill or ParkKeys"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Consumer: "billing", OrderPolicy: ParkKeys}
			c.change(&cfg)
			if _, err := New(newFakeStore(), cfg); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// Names that are too long for the tables still work.
func TestLongNames(t *testing.T) {
	long := strings.Repeat("x", 600)
	change := func(cfg *Config) {
		cfg.OrderKey = func(msg *message.Message) string { return msg.Metadata.Get("key") + long }
		cfg.Scope = "short"
	}
	parking(t, change, func(p *parkingEnv) {
		p.put("a1", "a2", "a3", "b1")
		p.fail(p.want("a1", "b1")[0])
		p.wantParked("a1", "a2", "a3")
		for _, row := range p.db.rows {
			if len(row.OrderKey) > receipts.MaxKey || len(row.Scope) > receipts.MaxScope {
				t.Errorf("order key of %d bytes, scope of %d", len(row.OrderKey), len(row.Scope))
			}
		}
	})
}

// Over an sdk.Subscriber the parked messages come at once after a restart: it greets the decorator with the handler's name.
func TestParkedMessagesComeWithoutTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		driver, err := memory.NewNetwork(memory.Options{}).Driver("test")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = driver.Close(context.Background()) }()
		store := &parkingStore{fakeStore: newFakeStore()}
		broken := true
		var handled []string
		var attempts []int
		var mu sync.Mutex
		life := func(uuids ...string) {
			cfg := Config{Consumer: "billing", OrderPolicy: ParkKeys}
			orderByKey(&cfg)
			m, err := New(store, cfg)
			if err != nil {
				t.Fatal(err)
			}
			sub, err := sdk.NewSubscriber(driver, sdk.SubscriberConfig{Group: "billing", MaxInFlight: 4})
			if err != nil {
				t.Fatal(err)
			}
			router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			router.AddSubscriberDecorators(m.Ordered)
			router.AddConsumerHandler("charge", "orders", sub, m.Handle(func(_ context.Context, tx *fakeTx, msg *message.Message) error {
				info, ok := sdk.DeliveryFrom(msg.Context())
				if !ok || info.Topic != "orders" || info.Group != "billing" {
					t.Errorf("delivery of %s: %+v, %v", msg.UUID, info, ok)
				}
				mu.Lock()
				defer mu.Unlock()
				if broken && orderKeyOf(msg.UUID) == "a" {
					return errUnreliable
				}
				handled = append(handled, msg.UUID)
				attempts = append(attempts, info.Attempt)
				tx.add(msg.UUID, 1)
				return nil
			}))
			ctx, cancel := context.WithCancel(context.Background())
			ran := make(chan error, 1)
			go func() { ran <- sdk.Run(ctx, router, sub) }()
			<-router.Running()
			send(t, driver, uuids)
			time.Sleep(10 * time.Second)
			start := time.Now()
			cancel()
			if err := <-ran; err != nil {
				t.Error(err)
			}
			if d := time.Since(start); d > time.Second {
				t.Errorf("the end took %v", d)
			}
		}
		life("a1", "a2", "a3", "a4", "b1", "a5", "a6", "b2")
		if got := store.parked(); !slices.Equal(got, []string{"a1", "a2", "a3", "a4", "a5", "a6"}) {
			t.Errorf("parked %v", got)
		}
		mu.Lock()
		broken = false
		mu.Unlock()
		life()
		if want := []string{"b1", "b2", "a1", "a2", "a3", "a4", "a5", "a6"}; !slices.Equal(handled, want) {
			t.Errorf("handled %v, want %v; attempts %v", handled, want, attempts)
		}
		if got := store.parked(); len(got) != 0 {
			t.Errorf("parked %v", got)
		}
		if n := store.effect("a6"); n != 1 {
			t.Errorf("the effect of a6 was applied %d times", n)
		}
	})
}

// All keys fail at once, many more than fit: nothing is lost, memory stays bounded, and each comes in order when the handler
// recovers.
func TestEverythingFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &parkingStore{fakeStore: newFakeStore()}
		p := newParkingEnv(t, store, func(cfg *Config) { cfg.Limits.MaxInFlight = 8 })
		var want []string
		for n := range 10 {
			for key := range 20 {
				want = append(want, fmt.Sprintf("%c%d", 'a'+key, n))
			}
		}
		var mu sync.Mutex
		broken, done := true, []string(nil)
		c := newStandIn(p.m, func(msg *message.Message) error {
			mu.Lock()
			defer mu.Unlock()
			if broken {
				return errUnreliable
			}
			done = append(done, msg.UUID)
			return nil
		})
		p.put(want...)
		go func() {
			for msg := range p.out {
				go func() {
					if c.handler(msg) == nil {
						msg.Ack()
					} else {
						msg.Nack()
					}
				}()
			}
		}()
		time.Sleep(time.Minute)
		if n := p.feed.unread(); n != 0 {
			t.Errorf("%d messages are left to the subscriber", n)
		}
		s := p.subscription()
		s.mu.Lock()
		if s.lot.loaded > s.window || s.waiting > s.window {
			t.Errorf("%d parked messages are in memory, %d others wait", s.lot.loaded, s.waiting)
		}
		s.mu.Unlock()
		if h := p.m.Report().Health; h.Parked+h.Held != len(want) {
			t.Errorf("health %+v", h)
		}
		mu.Lock()
		broken = false
		mu.Unlock()
		time.Sleep(10 * time.Minute)
		mu.Lock()
		checkOrder(t, done, want)
		mu.Unlock()
		p.wantParked()
	})
}

// A process that dies between the commit of a parked message and the deletion of its row handles it again, as a replay.
func TestAHandledRowThatStayed(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		runs := 0
		h := p.m.Handle(func(_ context.Context, tx *fakeTx, _ *message.Message) error {
			runs++
			tx.add("done", 1)
			return nil
		})
		p.put("a1")
		msg := p.wantOne("a1")
		if err := h(msg); err != nil {
			t.Fatal(err)
		}
		msg.Ack()
		p.close()
		row := receipts.Parked{Scope: "7:billing6:charge6:orders", OrderKey: "a", UUID: "a1", Payload: []byte("payload of a1")}
		if err := p.db.Park(context.Background(), []receipts.Parked{row}); err != nil {
			t.Fatal(err)
		}
		p.subscribe()
		p.put("b1")
		out := p.take()
		if got := uuidsOf(out); !sameSet(got, []string{"a1", "b1"}) {
			t.Errorf("handed out %v", got)
		}
		for _, msg := range out {
			if msg.UUID == "a1" {
				if err := h(msg); err != nil {
					t.Error(err)
				}
			}
			msg.Ack()
		}
		p.wantParked()
		if r := p.m.Report(); runs != 1 || r.Handled != 1 || r.Replayed != 1 {
			t.Errorf("the handler ran %d times; report %+v", runs, r)
		}
	})
}

// One key whose rows cannot be read does not keep the others from being read.
func TestAKeyThatCannotBeRead(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.db.unreadable = "a"
		p.parkA()
		p.put("b1", "b2", "b3")
		p.fail(p.wantOne("b1"))
		p.wantParked("a1", "a2", "a3", "b1", "b2", "b3")
		time.Sleep(10 * time.Second)
		p.pass(p.wantOne("b1"))
		time.Sleep(10 * time.Second)
		p.pass(p.wantOne("b2"))
		p.db.mu.Lock()
		p.db.unreadable = ""
		p.db.mu.Unlock()
		time.Sleep(10 * time.Second)
		for len(p.db.parked()) > 0 {
			for _, msg := range p.take() {
				p.pass(msg)
			}
			time.Sleep(time.Second)
		}
	})
}

// A key whose first message fails while more of it is being read: what was read is not what comes next.
func TestAFailureWhileItsKeyIsRead(t *testing.T) {
	parking(t, func(cfg *Config) { cfg.Limits.MaxInFlight = 100 }, func(p *parkingEnv) {
		var rows []receipts.Parked
		var want []string
		for n := range 40 {
			uuid := fmt.Sprintf("a%02d", n)
			want = append(want, uuid)
			rows = append(rows, receipts.Parked{Scope: "7:billing6:charge6:orders", OrderKey: "a", UUID: uuid})
		}
		if err := p.db.Park(context.Background(), rows); err != nil {
			t.Fatal(err)
		}
		var got []string
		p.put("-1")
		out := p.take()
		for n := 0; len(got) < len(want); n++ {
			if n > 1000 {
				t.Fatalf("held for ever after %v", got)
			}
			p.db.set(100*time.Millisecond, nil)
			for _, msg := range out {
				switch {
				case orderKeyOf(msg.UUID) == "":
				case msg.UUID == "a08" && n < 30: // half of what was read is done: the rows go, then more is read
					time.Sleep(150 * time.Millisecond)
					p.fail(msg)
				case p.ticket(msg).behind():
					p.sendBack(msg)
				default:
					p.pass(msg)
					got = append(got, msg.UUID)
				}
			}
			time.Sleep(50 * time.Millisecond)
			out = p.take()
		}
		if !slices.Equal(got, want) {
			t.Errorf("handled %v", got)
		}
	})
}

// A key that fails makes room for others at once, not when its backoff is over.
func TestAFailingKeyMakesRoom(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		var rows []receipts.Parked
		for n := range 20 {
			rows = append(rows, receipts.Parked{Scope: "7:billing6:charge6:orders", OrderKey: "a", UUID: fmt.Sprintf("a%02d", n)})
		}
		rows = append(rows, receipts.Parked{Scope: "7:billing6:charge6:orders", OrderKey: "b", UUID: "b00"})
		if err := p.db.Park(context.Background(), rows); err != nil {
			t.Fatal(err)
		}
		p.put("-1")
		out := p.take()
		slices.SortFunc(out, func(a, b *message.Message) int { return strings.Compare(a.UUID, b.UUID) })
		if got := uuidsOf(out); !slices.Equal(got, []string{"-1", "a00"}) {
			t.Fatalf("handed out %v", got)
		}
		p.fail(out[1])
		p.pass(p.wantOne("b00"))
		p.fail(p.wantAfter(time.Second, "a00"))
	})
}
