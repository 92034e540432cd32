package idempotency

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// parkingEnv is an orderEnv whose store can park.
type parkingEnv struct {
	*orderEnv
	db *parkingStore
}

// parking runs a test over an ordered subscription with ParkKeys, a window of four and a backoff of one second.
func parking(t *testing.T, change func(*Config), f func(p *parkingEnv)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f(newParkingEnv(t, &parkingStore{fakeStore: newFakeStore()}, change))
	})
}

func newParkingEnv(t *testing.T, store *parkingStore, change func(*Config)) *parkingEnv {
	t.Helper()
	cfg := Config{Consumer: "billing", OrderPolicy: ParkKeys, Logger: watermill.NewCaptureLogger()}
	orderByKey(&cfg)
	cfg.Limits.MaxInFlight = 4
	if change != nil {
		change(&cfg)
	}
	m, err := New(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	log, _ := cfg.Logger.(*watermill.CaptureLoggerAdapter)
	p := &parkingEnv{orderEnv: &orderEnv{env: &env{T: t, store: store.fakeStore, m: m, log: log}}, db: store}
	p.subscribe()
	return p
}

// subscribe begins a subscription, which the test's end closes.
func (p *parkingEnv) subscribe() {
	p.Helper()
	p.feed, p.fed = newFeed(), map[string]fed{}
	var err error
	if p.sub, err = p.m.Ordered(p.feed); err != nil {
		p.Fatal(err)
	}
	var ctx context.Context
	ctx, p.cancel = context.WithCancel(p.Context())
	if p.out, err = p.sub.Subscribe(ctx, "orders"); err != nil {
		p.Fatal(err)
	}
	p.Cleanup(p.close)
}

func (p *parkingEnv) close() {
	p.Helper()
	for _, m := range p.fed {
		m.lose(nil)
	}
	if err := p.sub.Close(); err != nil {
		p.Error(err)
	}
}

func (p *parkingEnv) wantParked(uuids ...string) {
	p.Helper()
	synctest.Wait()
	if got := p.db.parked(); !slices.Equal(got, uuids) {
		p.Errorf("parked %v, want %v", got, uuids)
	}
}

// parkA parks a1, a2 and a3; a1 comes again after a second.
func (p *parkingEnv) parkA() {
	p.Helper()
	p.put("a1", "a2", "a3")
	p.fail(p.wantOne("a1"))
	p.wantParked("a1", "a2", "a3")
	p.wantOutcomes("+a1", "+a2", "+a3")
}

func TestAKeyIsParked(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.put("a1", "a2")
		p.fail(p.wantOne("a1")) // half of the window
		p.wantParked()
		if h := p.m.Report().Health; h.Held != 2 || h.ParkedKeys != 0 || h.Parked != 0 {
			t.Errorf("health %+v", h)
		}
		p.put("a3", "b1", "a4", "b2") // a3 is too much
		b1 := p.wantOne("b1")
		p.wantParked("a1", "a2", "a3", "a4")
		p.wantOutcomes("+a1", "+a2", "+a3", "+a4")
		h := p.m.Report().Health
		if h.Held != 0 || h.FailingKeys != 0 || h.ParkedKeys != 1 || h.Parked != 4 || h.StandsStill {
			t.Errorf("health %+v", h)
		}
		p.pass(b1)
		p.pass(p.wantOne("b2"))

		a1 := p.wantAfter(time.Second, "a1")
		if a1.UUID != "a1" || string(a1.Payload) != "payload of a1" || a1.Metadata.Get("key") != "a" {
			t.Errorf("out of the database came %q %q %v", a1.UUID, a1.Payload, a1.Metadata)
		}
		if message.HandlerNameFromCtx(a1.Context()) != "charge" || message.SubscribeTopicFromCtx(a1.Context()) != "orders" {
			t.Error("it does not know its handler")
		}
		p.reach(a1)
		p.want() // it failed before: it goes alone
		p.pass(a1)
		p.wantParked("a2", "a3", "a4")
		a2 := p.wantOne("a2")
		p.reach(a2)
		a3 := p.wantOne("a3")
		p.pass(a2)
		p.pass(a3)
		p.pass(p.wantOne("a4"))
		p.wantParked()
		if h := p.m.Report().Health; h.ParkedKeys != 0 || h.Parked != 0 {
			t.Errorf("health %+v", h)
		}
		p.put("a5")
		p.pass(p.wantOne("a5")) // as ever
		p.wantOutcomes("+a1", "+a2", "+a3", "+a4", "+a5", "+b1", "+b2")
		for text, n := range map[string]int{
			"Order: messages are parked in the database": p.logged(watermill.ErrorLogLevel, "Order: messages are parked in the database"),
			"Order: no message is parked any more":       p.logged(watermill.InfoLogLevel, "Order: no message is parked any more"),
		} {
			if n != 1 {
				t.Errorf("%q was logged %d times", text, n)
			}
		}
	})
}

// What comes while a key is parked goes behind what is parked; once all of that is in memory it only waits behind it.
func TestWhatComesLaterOfAParkedKey(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.parkA()
		p.put("a4", "a5")
		p.wantParked("a1", "a2", "a3", "a4", "a5")
		p.pass(p.wantAfter(time.Second, "a1"))
		a2 := p.wantOne("a2") // all others are read now
		p.put("a6", "a7")
		p.wantParked("a2", "a3", "a4", "a5")
		p.reach(a2)
		a3 := p.wantOne("a3")
		p.put("a8")
		p.pass(a2)
		p.pass(a3)
		for _, uuid := range []string{"a4", "a5", "a6", "a7", "a8"} {
			p.pass(p.wantOne(uuid))
		}
		p.wantParked()
		p.wantOutcomes("+a1", "+a2", "+a3", "+a4", "+a5", "+a6", "+a7", "+a8")
	})
}

// A parked message that fails: it goes back into the database, with what is behind it, and backs off; what the broker brought
// meanwhile is parked behind it.
func TestAParkedMessageFailsAgain(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.parkA()
		for n := 1; n <= 3; n++ {
			msg := p.wantAfter(time.Second, "a1")
			p.fail(msg)
			p.wantParked("a1", "a2", "a3")
		}
		p.pass(p.wantAfter(time.Second, "a1"))
		a2 := p.wantOne("a2")
		p.put("a4", "a5")
		p.reach(a2)
		a3 := p.wantOne("a3")
		p.reach(a3)
		a4 := p.wantOne("a4")
		p.wantParked("a2", "a3")
		p.fail(a2)
		p.sendBack(a3)
		p.wantParked("a2", "a3") // a4 is still out
		p.sendBack(a4)
		p.wantParked("a2", "a3", "a4", "a5")
		p.wantOutcomes("+a1", "+a2", "+a3", "+a4", "+a5")
		a2 = p.wantAfter(time.Second, "a2")
		p.reach(a2)
		p.put("a6") // and with it what is parked is looked at
		p.want()    // a2 failed: it goes alone
		p.wantParked("a2", "a3", "a4", "a5", "a6")
		p.pass(a2)
		for _, uuid := range []string{"a3", "a4", "a5", "a6"} {
			p.pass(p.wantOne(uuid))
		}
		p.wantParked()
	})
}

// The backoff of a parked message goes on from where it was.
func TestTheBackoffOfAParkedMessageGrows(t *testing.T) {
	change := func(cfg *Config) { cfg.RetryBackoff = sdk.Backoff{Min: time.Second, Max: time.Hour} }
	parking(t, change, func(p *parkingEnv) {
		p.parkA()
		for n := 1; n <= 6; n++ {
			s := p.subscription()
			s.mu.Lock()
			k := s.lot.keys["a"]
			if k.failures != n || time.Until(k.due) > time.Second<<n {
				t.Errorf("after failure %d: %d counted, due in %v", n, k.failures, time.Until(k.due))
			}
			due := k.due
			s.mu.Unlock()
			time.Sleep(time.Until(due))
			p.fail(p.wantOne("a1"))
		}
	})
}

// Of what is parked no more than a window, and what is read at a time, comes into memory.
func TestReplaysAreBounded(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		var rows []receipts.Parked
		for key := range 20 {
			for n := range 3 {
				uuid := fmt.Sprintf("%c%d", 'a'+key, n)
				rows = append(rows, receipts.Parked{Scope: "7:billing6:charge6:orders", OrderKey: uuid[:1], UUID: uuid})
			}
		}
		if err := p.db.Park(context.Background(), rows); err != nil {
			t.Fatal(err)
		}
		p.put("-1")
		var all []*message.Message
		for len(p.db.parked()) > 0 {
			out := p.take()
			for _, msg := range out {
				if orderKeyOf(msg.UUID) != "" {
					p.reach(msg)
				}
			}
			all = append(all, out...)
			s := p.subscription()
			s.mu.Lock()
			if n := s.lot.loaded; n > s.window+readAhead {
				t.Errorf("%d parked messages are in memory", n)
			}
			s.mu.Unlock()
			if len(out) > 0 {
				continue
			}
			for _, msg := range all {
				if orderKeyOf(msg.UUID) != "" {
					p.pass(msg)
				}
			}
			all = nil
		}
	})
}

// Nothing is parked while one of it is out, and what passes meanwhile need not be.
func TestAKeyThatRecoversIsNotParked(t *testing.T) {
	parking(t, nil, func(p *parkingEnv) {
		p.put("a1", "a2", "a3")
		a1 := p.wantOne("a1")
		tk := p.ticket(a1)
		tk.reached()
		tk.stumbled() // and an outer Retry has it
		a2 := p.take()
		if h := p.m.Report().Health; h.Held != 3 {
			t.Errorf("health %+v", h)
		}
		p.wantParked()
		tk.reached()
		tk.passed()
		a1.Ack()
		if len(a2) == 0 {
			a2 = p.want("a2")
		}
		p.pass(a2...)
		p.pass(p.wantOne("a3"))
		p.wantParked()
		p.wantOutcomes("+a1", "+a2", "+a3")
	})
}

// The longest failing line is parked; one is enough, where that brings what is held into the half.
func TestTheLongestKeyIsParked(t *testing.T) {
	parking(t, func(cfg *Config) { cfg.Limits.MaxInFlight = 8 }, func(p *parkingEnv) {
		p.put("a1", "b1", "b2", "b3")
		out := p.want("a1", "b1")
		p.fail(out[0])
		p.fail(out[1])
		p.wantParked()
		p.put("a2")
		p.wantParked("b1", "b2", "b3")
		if h := p.m.Report().Health; h.Held != 2 || h.FailingKeys != 1 || h.ParkedKeys != 1 {
			t.Errorf("health %+v", h)
		}
		time.Sleep(time.Second)
		for _, msg := range p.take() {
			p.pass(msg)
		}
		for range 3 {
			for _, msg := range p.take() {
				p.pass(msg)
			}
		}
		p.wantParked()
	})
}
