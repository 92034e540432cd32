package idempotency

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// A delivery that is lost is never handed out again; the one that the broker brings instead takes its place.
func TestALostMessageComesAgainToItsPlace(t *testing.T) {
	for name, c := range map[string]struct {
		lose  func(o *orderEnv) // a2 of a1, a2, a3
		left  []string
		alone bool // it failed before: it goes alone
	}{
		"while it waits": {
			func(o *orderEnv) {
				a1 := o.wantOne("a1")
				o.fed["a2"].lose(sdk.ErrDeliveryLost)
				o.reach(a1)
				o.want()
				o.pass(a1)
			},
			[]string{"+a1"},
			false,
		},
		"while it is out": {
			func(o *orderEnv) {
				a1 := o.wantOne("a1")
				o.reach(a1)
				a2 := o.wantOne("a2")
				o.fed["a2"].lose(sdk.ErrDeliveryLost)
				synctest.Wait()
				if a2.Context().Err() == nil || !errors.Is(context.Cause(a2.Context()), sdk.ErrDeliveryLost) {
					o.Errorf("the copy's context: %v", context.Cause(a2.Context()))
				}
				if !o.ticket(a2).behind() {
					o.Error("a lost copy may run")
				}
				o.pass(a1)
				a2.Nack()
			},
			[]string{"+a1"},
			false,
		},
		"while it is held": {
			func(o *orderEnv) {
				a1 := o.wantOne("a1")
				o.reach(a1)
				o.fail(o.wantOne("a2"))
				o.fed["a2"].lose(sdk.ErrDeliveryLost)
				o.pass(a1)
				time.Sleep(100 * time.Millisecond)
			},
			[]string{"+a1"},
			true,
		},
		"while it is offered, and nobody takes it": {
			func(o *orderEnv) {
				a1 := o.wantOne("a1")
				o.reach(a1)
				synctest.Wait()
				o.fed["a2"].lose(sdk.ErrDeliveryLost)
				synctest.Wait()
				o.want()
				o.pass(a1)
			},
			[]string{"+a1"},
			false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			ordered(t, nil, func(o *orderEnv) {
				o.put("a1", "a2", "a3")
				c.lose(o)
				o.want()
				o.put("a4", "a2", "a5")
				again := o.wantOne("a2")
				o.reach(again)
				if c.alone {
					o.want()
					o.pass(again)
					o.pass(o.wantOne("a3"))
				} else {
					a3 := o.wantOne("a3")
					o.pass(again)
					o.pass(a3)
				}
				o.pass(o.wantOne("a4"))
				o.pass(o.wantOne("a5"))
				o.wantOutcome(append(c.left, "+a2", "+a3", "+a4", "+a5")...)
				if h := o.m.Report().Health; h.FailingKeys != 0 || h.Held != 0 {
					t.Errorf("health %+v", h)
				}
			})
		})
	}
}

// One that does not come again holds the others up for the longest backoff, or as long as a lost connection may need; not
// for ever.
func TestALostMessageIsNotWaitedForForEver(t *testing.T) {
	for name, c := range map[string]struct {
		put   []string
		cause error
		alone bool // nothing of its key was there when it was lost
		waits bool
	}{
		"something is behind it":                 {[]string{"a1", "a2"}, sdk.ErrDeliveryLost, false, true},
		"nothing is behind it":                   {[]string{"a1"}, sdk.ErrDeliveryLost, true, false},
		"nothing, but its source lives":          {[]string{"a1"}, sdk.ErrAbandoned, true, true},
		"its source lives, something is behind":  {[]string{"a1", "a2"}, sdk.ErrAbandoned, false, true},
		"a foreign subscriber does not say why ": {[]string{"a1", "a2"}, context.Canceled, false, true},
	} {
		for longest, wait := range map[time.Duration]time.Duration{40 * time.Second: 40 * time.Second, 60 * time.Millisecond: lostFor} {
			t.Run(name+", "+longest.String(), func(t *testing.T) {
				change := func(cfg *Config) { cfg.RetryBackoff = sdk.Backoff{Min: 5 * time.Millisecond, Max: longest} }
				ordered(t, change, func(o *orderEnv) {
					o.put(c.put...)
					a1 := o.wantOne("a1")
					o.fed["a1"].lose(c.cause)
					synctest.Wait()
					if c.alone {
						o.put("a2")
					}
					if !c.waits {
						o.pass(o.wantOne("a2"))
						return
					}
					o.pass(o.wantAfter(wait, "a2"))
					o.put("a1") // late: it only comes after a2 now
					o.pass(o.wantOne("a1"))
					a1.Ack()
				})
			})
		}
	}
}

// A copy that is acknowledged although its delivery was lost has been handled: nothing waits for it.
func TestALostMessageThatWasHandledAfterAll(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "a2")
		a1 := o.wantOne("a1")
		o.fed["a1"].lose(sdk.ErrDeliveryLost)
		o.want()
		a1.Ack()
		o.pass(o.wantOne("a2"))
		o.put("a1")
		o.pass(o.wantOne("a1")) // a replay
	})
}

// A message whose delivery is lost before it is read takes a place only if its source lives on.
func TestLostBeforeItIsRead(t *testing.T) {
	for name, c := range map[string]struct {
		cause error
		waits bool
	}{"abandoned": {sdk.ErrAbandoned, true}, "lost with its source": {sdk.ErrDeliveryLost, false}} {
		t.Run(name, func(t *testing.T) {
			ordered(t, func(cfg *Config) { cfg.Limits.MaxInFlight = 2 }, func(o *orderEnv) {
				o.put("b1", "b2", "b3", "a1", "a2")
				o.fail(o.wantOne("b1"))
				if n := o.feed.unread(); n != 2 {
					t.Fatalf("%d messages are unread, want 2", n)
				}
				o.fed["a1"].lose(c.cause)
				synctest.Wait()
				o.pass(o.wantAfter(time.Second, "b1"))
				if c.waits {
					o.pass(o.wantOne("b2"))
					o.pass(o.wantOne("b3"))
					o.put("a1")
					a1 := o.wantOne("a1")
					o.pass(a1)
					o.pass(o.wantOne("a2"))
					return
				}
				out := o.want("b2", "a2")
				o.pass(out...)
				o.pass(o.wantOne("b3"))
			})
		})
	}
}

// While a lost message is waited for, the subscription does not stand still: the message could not come.
func TestALostMessageMayComeAlthoughTooManyAreHeld(t *testing.T) {
	ordered(t, func(cfg *Config) { cfg.Limits.MaxInFlight = 4 }, func(o *orderEnv) {
		o.put("a1", "a2", "a3")
		o.fail(o.wantOne("a1"))
		if !o.m.Report().Health.StandsStill {
			t.Fatal("three of four are held, and it does not stand still")
		}
		o.fed["a1"].lose(sdk.ErrDeliveryLost)
		o.want()
		o.put("a1")
		o.pass(o.wantOne("a1"))
		o.pass(o.wantOne("a2"))
		o.pass(o.wantOne("a3"))
	})
}

// A lost message comes behind others that wait, more of them than usually find room.
func TestALostMessageFindsRoom(t *testing.T) {
	ordered(t, func(cfg *Config) { cfg.Limits.MaxInFlight = 2 }, func(o *orderEnv) {
		o.put("a1", "a2", "b1", "b2", "c1")
		out := o.want("a1", "b1") // a2 and b2 wait
		if n := o.feed.unread(); n != 1 {
			t.Fatalf("%d messages are unread, want c1", n)
		}
		o.fed["a1"].lose(sdk.ErrDeliveryLost)
		o.put("b3", "b4", "a1")
		again := o.want("c1", "a1")
		o.pass(again...)
		o.pass(o.wantOne("a2"))
		o.pass(out[1])
		for _, uuid := range []string{"b2", "b3", "b4"} {
			o.pass(o.wantOne(uuid))
		}
	})
}
