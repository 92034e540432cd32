package idempotency

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

func TestOrderedNeedsAKeyAndASubscriber(t *testing.T) {
	plain := newEnv(t, nil)
	if _, err := plain.m.Ordered(newFeed()); err == nil || !strings.Contains(err.Error(), "Config.OrderKey") {
		t.Errorf("without OrderKey: %v", err)
	}
	e := newEnv(t, func(cfg *Config, _ *fakeStore) { orderByKey(cfg) })
	for name, sub := range map[string]message.Subscriber{"nil": nil, "nil pointer": (*feed)(nil)} {
		if _, err := e.m.Ordered(sub); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestOnlyKeyedDeliveriesNeedATicket(t *testing.T) {
	keyed := deliver("a1", "")
	keyed.Metadata.Set("key", "a")
	for name, c := range map[string]struct {
		order  bool
		change func(cfg *Config)
		msg    *message.Message
		want   error
		text   string
	}{
		"no OrderKey":         {order: false, msg: keyed},
		"no key":              {order: true, msg: deliver("-1", "")},
		"key, not by Ordered": {order: true, msg: keyed, want: ErrNotOrdered},
		"OrderKey panics": {
			order: true, msg: keyed, text: "OrderKey panicked: no such field",
			change: func(cfg *Config) { cfg.OrderKey = func(*message.Message) string { panic("no such field") } },
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, func(cfg *Config, _ *fakeStore) {
				if c.order {
					orderByKey(cfg)
				}
				if c.change != nil {
					c.change(cfg)
				}
			})
			tk, err := e.m.ticketFor(c.msg)
			switch {
			case tk != nil:
				t.Error("a ticket without Ordered")
			case c.text != "":
				if err == nil || !strings.Contains(err.Error(), c.text) {
					t.Errorf("error %v", err)
				}
			case !errors.Is(err, c.want):
				t.Errorf("error %v, want %v", err, c.want)
			}
		})
	}
}

func TestNoTicketIsNoOrder(t *testing.T) {
	var tk *ticket
	tk.reached()
	tk.stumbled()
	tk.passed()
	tk.after(time.Second)
	if tk.behind() || tk.line() != "" {
		t.Error("a nil ticket is behind, or has a line")
	}
}

// The next of a key comes when the one before it has its place in the queue; everything else comes at once.
func TestTheNextOfAKeyWaitsAtTheSource(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "a2", "b1", "-1", "a3", "b2", "-2")
		first := o.want("a1", "b1", "-1", "-2")
		o.reach(first[0])
		a2 := o.wantOne("a2")
		o.reach(first[1])
		b2 := o.wantOne("b2")
		o.want()
		o.reach(a2)
		a3 := o.wantOne("a3")
		// All of them are running now, and settle as they like.
		o.pass(a3, b2, a2, first[1], first[0])
		first[2].Ack()
		synctest.Wait()
		first[3].Nack() // and the foreign subscriber's own way goes on
		o.wantOutcome("+a3", "+b2", "+a2", "+b1", "+a1", "+-1", "--2")
		o.put("a4")
		o.pass(o.wantOne("a4"))
	})
}

// A middleware outside may acknowledge a message that never reaches ours: a filter, a poison queue.
func TestWhatIsAcknowledgedOutsideLetsTheNextGo(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "a2", "a3", "a4")
		o.wantOne("a1").Ack()
		a2 := o.wantOne("a2")
		o.reach(a2)
		o.wantOne("a3").Ack() // in the middle
		a4 := o.wantOne("a4")
		o.reach(a4)
		tk := o.ticket(a2)
		tk.stumbled()
		if !o.ticket(a4).behind() {
			t.Error("a4 is not behind a2, which failed")
		}
		a2.Ack() // poisoned: the error was swallowed
		synctest.Wait()
		if o.ticket(a4).behind() {
			t.Error("a4 is behind a message that was poisoned")
		}
		o.pass(a4)
		o.wantOutcome("+a1", "+a3", "+a2", "+a4")
	})
}

func TestTheRouterGetsCopies(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "-1")
		out := o.want("a1", "-1")
		a := out[0]
		original := o.fed["a1"].Message
		if a == original || out[1] != o.fed["-1"].Message {
			t.Error("not a copy, or a copy without need")
		}
		if a.UUID != "a1" || string(a.Payload) != "payload of a1" || a.Metadata.Get("key") != "a" {
			t.Errorf("the copy is %q %q %v", a.UUID, a.Payload, a.Metadata)
		}
		if a.Context().Value(feedKey{}) != "a1" || message.HandlerNameFromCtx(a.Context()) != "charge" {
			t.Error("the copy's context lost what the original's holds")
		}
		if o.ticket(a).line() != "a" {
			t.Errorf("line %q", o.ticket(a).line())
		}
		if tk, err := o.m.ticketFor(out[1]); tk != nil || err != nil {
			t.Errorf("ticket of a message without key: %v, %v", tk, err)
		}
		a.Metadata.Set("spoiled", "yes")
		o.fail(a)
		again := o.wantAfter(time.Second, "a1")
		if again == a || again.Metadata.Get("spoiled") != "" {
			t.Error("the second copy shows what was done to the first")
		}
		if a.Context().Err() == nil || again.Context().Err() != nil {
			t.Errorf("contexts: first %v, second %v", a.Context().Err(), again.Context().Err())
		}
		o.pass(again)
		if again.Context().Err() == nil {
			t.Error("the context goes on after the message was settled")
		}
	})
}

// A ticket is its own middleware's: of two on one router each sees its own.
func TestTwoMiddlewaresKeepTheirTicketsApart(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		other := newEnv(o.T, func(cfg *Config, _ *fakeStore) { orderByKey(cfg) })
		o.put("a1")
		a := o.wantOne("a1")
		if tk, err := other.m.ticketFor(a); tk != nil || !errors.Is(err, ErrNotOrdered) {
			t.Errorf("the other middleware sees %v, %v", tk, err)
		}
		// A context that somebody put on top still leads to the ticket.
		a.SetContext(context.WithValue(a.Context(), feedKey{}, "changed"))
		o.pass(a)
	})
}

func TestAPanicOfOrderKeyIsTheMessagesTrouble(t *testing.T) {
	change := func(cfg *Config) {
		cfg.OrderKey = func(msg *message.Message) string {
			if msg.UUID == "b1" {
				panic("no such field")
			}
			return orderKeyOf(msg.UUID)
		}
	}
	ordered(t, change, func(o *orderEnv) {
		o.put("a1", "b1", "a2")
		out := o.want("a1", "b1")
		if tk, err := o.m.ticketFor(out[1]); tk != nil || err == nil || !strings.Contains(err.Error(), "no such field") {
			t.Errorf("ticket %v, error %v", tk, err)
		}
		out[1].Nack()
		o.pass(out[0])
		o.pass(o.wantOne("a2"))
	})
}

// Half of the window: as long as what is held fits into it, everything else flows.
func TestStandStill(t *testing.T) {
	const stands, goesOn = "Order: the subscription stands still until they are handled; what failed goes on being tried", "Order: the subscription goes on"
	change := func(cfg *Config) { cfg.Limits.MaxInFlight = 8 }
	ordered(t, change, func(o *orderEnv) {
		o.put("a1", "a2", "a3")
		o.fail(o.wantOne("a1"))
		o.put("a4", "b1") // half of the window is held now
		o.pass(o.wantOne("b1"))
		if h := o.m.Report().Health; h.StandsStill || h.Held != 4 || h.FailingKeys != 1 {
			t.Errorf("half of the window is held: %+v", h)
		}
		start := time.Now()
		o.put("a5", "b2", "c1")
		o.want()
		if h := o.m.Report().Health; !h.StandsStill || !h.StandsStillSince.Equal(start) || h.Held != 5 {
			t.Errorf("more than half of the window is held: %+v", h)
		}
		if n := o.feed.unread(); n != 2 {
			t.Errorf("%d messages are left to the subscriber, want b2 and c1", n)
		}
		again := o.wantAfter(time.Second, "a1") // what failed goes on being tried
		o.fail(again)
		again = o.wantAfter(time.Second, "a1")
		if n := o.logged(watermill.ErrorLogLevel, stands); n != 1 {
			t.Errorf("the standstill was logged %d times", n)
		}
		o.pass(again)
		out := o.want("a2", "b2", "c1")
		if h := o.m.Report().Health; h.StandsStill || h.Held != 0 || h.FailingKeys != 0 || !h.StandsStillSince.IsZero() {
			t.Errorf("everything flows again: %+v", h)
		}
		if n := o.logged(watermill.InfoLogLevel, goesOn); n != 1 {
			t.Errorf("the end of the standstill was logged %d times", n)
		}
		o.pass(out...)
		for _, uuid := range []string{"a3", "a4", "a5"} {
			o.pass(o.wantOne(uuid))
		}
	})
}

// Several keys share the half, and what is already out counts too.
func TestStandStillCountsAllFailingKeys(t *testing.T) {
	change := func(cfg *Config) { cfg.Limits.MaxInFlight = 8 }
	ordered(t, change, func(o *orderEnv) {
		o.put("a1", "a2", "b1", "b2", "c1")
		out := o.want("a1", "b1", "c1")
		o.reach(out[0], out[1])
		followers := o.want("a2", "b2")
		o.fail(out[0])
		o.fail(out[1])
		if h := o.m.Report().Health; h.StandsStill || h.Held != 4 || h.FailingKeys != 2 {
			t.Errorf("health %+v", h)
		}
		o.fail(out[2])
		if h := o.m.Report().Health; !h.StandsStill || h.Held != 5 || h.FailingKeys != 3 {
			t.Errorf("health %+v", h)
		}
		o.put("d1")
		o.want()
		o.sendBack(followers...)
		time.Sleep(time.Second)
		again := o.take() // their timers end in the same moment
		slices.SortFunc(again, func(a, b *message.Message) int { return strings.Compare(a.UUID, b.UUID) })
		if got := uuidsOf(again); !slices.Equal(got, []string{"a1", "b1", "c1"}) {
			t.Fatalf("handed out %v", got)
		}
		o.pass(again[2])
		o.wantOne("d1").Ack() // four are held
		o.pass(again[:2]...)
		o.pass(o.want("a2", "b2")...)
	})
}

// Without a window that anybody knows, 256 is taken for it. What waits behind something slow is bounded by it as well.
func TestReadAheadIsBounded(t *testing.T) {
	for name, c := range map[string]struct{ configured, bound int }{
		"unknown": {0, unknownWindow}, "configured": {10, 10}, "one": {1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			ordered(t, func(cfg *Config) { cfg.Limits.MaxInFlight = c.configured }, func(o *orderEnv) {
				for range 400 {
					o.put("a1")
				}
				a1 := o.wantOne("a1")
				if read := 400 - o.feed.unread() - 1; read != c.bound {
					t.Errorf("%d messages wait, want %d", read, c.bound)
				}
				o.pass(a1)
				for range 399 {
					o.pass(o.wantOne("a1"))
				}
			})
		})
	}
}
