package idempotency

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// A failure: what came later of its key goes back uncharged, the failed one comes again alone, and the others follow in
// order once it has passed.
func TestAFailureHoldsItsKey(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "a2", "a3", "b1")
		first := o.want("a1", "b1")
		a1, b1 := first[0], first[1]
		o.reach(a1)
		a2 := o.wantOne("a2")
		o.reach(a2)
		a3 := o.wantOne("a3") // it is on its way
		o.fail(a1)
		if h := o.m.Report().Health; h.FailingKeys != 1 || h.Held != 3 || h.StandsStill {
			t.Errorf("health %+v", h)
		}
		time.Sleep(time.Second / 2)
		o.sendBack(a2)
		o.put("a4")
		again := o.wantAfter(time.Second/2, "a1")
		o.sendBack(a3) // it arrives only now, while a1 is on its way again
		o.reach(again)
		o.want() // the others wait until it has passed
		o.ticket(again).passed()
		a2 = o.wantOne("a2")
		again.Ack()
		o.reach(a2)
		a3 = o.wantOne("a3")
		o.reach(a3)
		a4 := o.wantOne("a4")
		o.pass(b1, a2, a3, a4)
		o.wantOutcome("+a1", "+b1", "+a2", "+a3", "+a4")
		if h := o.m.Report().Health; h.FailingKeys != 0 || h.Held != 0 {
			t.Errorf("health %+v", h)
		}
	})
}

// What fails again and again is tried after growing delays, also where it never reached the middleware.
func TestDelaysOfAFailingMessage(t *testing.T) {
	failing := func(o *orderEnv, msg *message.Message, how func(tk *ticket)) {
		o.Helper()
		tk := o.ticket(msg)
		how(tk)
		msg.Nack()
		synctest.Wait()
	}
	for name, c := range map[string]struct {
		how  func(tk *ticket)
		want time.Duration
	}{
		"in its handler":       {func(tk *ticket) { tk.reached(); tk.stumbled() }, time.Second},
		"outside":              {func(*ticket) {}, time.Second},
		"asked for":            {func(tk *ticket) { tk.reached(); tk.after(time.Hour); tk.stumbled() }, time.Hour},
		"asked for, and after": {func(tk *ticket) { tk.reached(); tk.stumbled(); tk.after(time.Minute) }, time.Minute},
		"asked for too little": {func(tk *ticket) { tk.reached(); tk.after(time.Nanosecond); tk.stumbled() }, time.Second},
		"asked for nothing":    {func(tk *ticket) { tk.reached(); tk.after(-time.Hour); tk.stumbled() }, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			ordered(t, nil, func(o *orderEnv) {
				o.put("a1")
				msg := o.wantOne("a1")
				for range 3 {
					failing(o, msg, c.how)
					msg = o.wantAfter(c.want, "a1")
				}
				o.pass(msg)
			})
		})
	}
	t.Run("growing", func(t *testing.T) {
		ordered(t, func(cfg *Config) { cfg.RetryBackoff = sdk.Backoff{Min: time.Second, Max: time.Hour} }, func(o *orderEnv) {
			o.put("a1")
			var longest time.Duration
			for n := 1; n <= 8; n++ {
				msg, start := o.wantOne("a1"), time.Now()
				o.fail(msg)
				for o.feed.outcome() == nil && len(o.turnsNow()) == 0 {
					time.Sleep(100 * time.Millisecond)
				}
				waited := time.Since(start)
				if limit := time.Second<<n + 100*time.Millisecond; waited < time.Second || waited > limit {
					t.Errorf("failure %d was held for %v, at most %v expected", n, waited, limit)
				}
				longest = max(longest, waited)
			}
			if longest < 10*time.Second {
				t.Errorf("the longest delay was %v", longest)
			}
			o.pass(o.wantOne("a1"))
		})
	})
}

// turnsNow looks whether something is being offered.
func (o *orderEnv) turnsNow() []*place {
	synctest.Wait()
	s := o.subscription()
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.offers.queue)
}

func (o *orderEnv) subscription() *orderedSubscription {
	o.m.order.mu.Lock()
	defer o.m.order.mu.Unlock()
	for s := range o.m.order.subs {
		return s
	}
	return nil
}

// Watermill's Retry outside calls the middleware again with the same message: it is not behind itself, what follows it is.
func TestARetryInPlaceKeepsItsPlace(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "a2", "a3")
		a1 := o.wantOne("a1")
		o.reach(a1)
		a2 := o.wantOne("a2")
		o.reach(a2)
		a3 := o.wantOne("a3")
		t1, t2, t3 := o.ticket(a1), o.ticket(a2), o.ticket(a3)
		t1.stumbled()
		if !t2.behind() {
			t.Fatal("a2 may run although a1 failed")
		}
		t2.stumbled()
		if t1.behind() {
			t.Fatal("a1 is behind itself")
		}
		t1.reached() // again in the queue
		if !t3.behind() {
			t.Fatal("a3 may run although a2 is out of its place")
		}
		t3.stumbled()
		if t2.behind() {
			t.Fatal("a2 is behind, although a1 has its place again")
		}
		t2.reached()
		t1.passed()
		a1.Ack()
		synctest.Wait()
		if t3.behind() || t2.behind() {
			t.Fatal("they are behind, although all before them are in their places")
		}
		t3.reached()
		o.pass(a2, a3)
		o.wantOutcome("+a1", "+a2", "+a3")
		if h := o.m.Report().Health; h.FailingKeys != 0 || h.Held != 0 {
			t.Errorf("health %+v", h)
		}
	})
}

// One that took its place again stands behind the others in the queue: those that belong after it have to leave.
func TestARetryInPlaceDisplacesWhatIsQueued(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "a2", "a3")
		a1 := o.wantOne("a1")
		o.reach(a1)
		a2 := o.wantOne("a2")
		o.reach(a2)
		a3 := o.wantOne("a3")
		o.reach(a3)
		t1, t2, t3 := o.ticket(a1), o.ticket(a2), o.ticket(a3)
		t1.stumbled()
		o.put("a4")
		t1.reached()
		if !t2.behind() {
			t.Fatal("a2 may run before a1, which is behind it in the queue")
		}
		t2.stumbled()
		t1.passed()
		a1.Ack()
		synctest.Wait()
		t2.reached()
		a4 := o.wantOne("a4")
		if t2.behind() || !t3.behind() {
			t.Fatalf("a2 behind: %v, a3, which is before it in the queue: %v", t2.behind(), t3.behind())
		}
		t2.passed()
		if t3.behind() {
			t.Fatal("a3 is behind a message that is durable")
		}
		t3.passed()
		a3.Ack()
		a2.Ack()
		o.pass(a4)
	})
}

// While one retries in place nothing more of its key is handed out.
func TestNothingFollowsAMessageThatStumbled(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1")
		a1 := o.wantOne("a1")
		o.reach(a1)
		tk := o.ticket(a1)
		tk.stumbled()
		o.put("a2")
		o.want()
		tk.reached()
		o.want()
		tk.passed()
		a2 := o.wantOne("a2")
		a1.Ack()
		o.pass(a2)
	})
}

// A message that failed after its effect was durable (its outputs could not be published) comes again alone as well.
func TestAFailureAfterItPassed(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "a2")
		a1 := o.wantOne("a1")
		tk := o.ticket(a1)
		tk.reached()
		tk.passed()
		a1.Nack()
		a2 := o.wantOne("a2")
		o.sendBack(a2)
		again := o.wantAfter(time.Second, "a1")
		o.pass(again)
		o.pass(o.wantOne("a2"))
	})
}

// A copy that was settled already, by a middleware outside, and then comes in: nacked, it is handed out again and must not run
// now; acked, nothing is known against it.
func TestSettledBeforeItArrives(t *testing.T) {
	ordered(t, nil, func(o *orderEnv) {
		o.put("a1", "b1")
		out := o.want("a1", "b1")
		a, b := out[0], out[1]
		a.Nack()
		b.Ack()
		synctest.Wait()
		ta, tb := o.ticket(a), o.ticket(b)
		if !ta.behind() {
			t.Error("a nacked copy may run")
		}
		if tb.behind() {
			t.Error("an acked copy is behind")
		}
		for _, tk := range []*ticket{ta, tb} { // and none of these does anything any more
			tk.reached()
			tk.stumbled()
			tk.passed()
			tk.after(time.Hour)
		}
		o.pass(o.wantAfter(time.Second, "a1"))
	})
}
