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

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// T14: duplicates of what is in flight take its outcome from memory: nothing is asked of the database for them.
func TestDuplicatesInFlight(t *testing.T) {
	for _, mode := range []Guarantee{EffectivelyOnce, AtMostOnce} {
		for _, lanes := range []int{1, 4} {
			t.Run(fmt.Sprintf("guarantee %d, %d lanes", mode, lanes), func(t *testing.T) {
				bubble(t, guaranteed(mode, func(_ *Config, s *fakeStore) { s.several(lanes) }), func(e *env) {
					c := e.share(e.marking(nil), messages("a b a c b a a")...)
					c.wantEndings()
					e.wantApplied("a b c")
					e.wantCounts(map[string]uint64{"Handled": 3, "Replayed": 4})
					if !slices.Equal(e.store.sizes, []int{3}) {
						e.Errorf("claims of %v receipts: the copies asked the database", e.store.sizes)
					}
				})
			})
		}
	}
}

// A batch of only duplicates, whose first copies are done already, writes nothing.
func TestABatchOfReplaysWritesNothing(t *testing.T) {
	bubble(t, nil, func(e *env) {
		c := e.share(e.marking(nil), messages("a b c")...)
		commits := e.store.count("commit")
		open := e.holdLanes()
		c.enter(e.marking(nil), messages("a b c a b c")...)
		open()
		c.wait()
		c.wantEndings()
		e.wantCounts(map[string]uint64{"Handled": 3, "Replayed": 6})
		if e.store.count("commit") != commits || !slices.Equal(e.store.sizes, []int{3, 3}) {
			e.Errorf("%d commits, claims %v", e.store.count("commit"), e.store.sizes)
		}
	})
}

// What becomes of a copy when its first one does not end well. The first one is alone, or in the middle of a batch.
func TestCopiesOfAFirstThat(t *testing.T) {
	fails := func(*message.Message) error { return errHandler }
	tests := []struct {
		name        string
		change      func(c *Config, s *fakeStore)
		act         func(msg *message.Message) error // of the first runs
		acts        int
		first, copy string
		runs        int
		effect      int
	}{
		{"fails", nil, fails, 1, "failed", "returned", 1, 0},
		{"panics", nil, func(*message.Message) error { panic("by hand") }, 1, "panicked", "done", 2, 1},
		{"is given up", nil, func(*message.Message) error { return Permanent(errHandler) }, 1, "done", "done", 1, 0},
		{"outlives its budget", nil, func(*message.Message) error { time.Sleep(defaultTxBudget + time.Second); return nil }, 1, "failed", "returned", 1, 0},
		{"stays undecided", func(_ *Config, s *fakeStore) {
			s.onCommit = func(n int) commitFault { return commitFault{lost: n == 1, apply: true} }
			s.onResolve = func(int) error { return errSQL }
		}, nil, 0, "returned", "done", 1, 1},
		{
			"meets contention for too long", func(c *Config, _ *fakeStore) { c.ContentionRetries = 1 },
			func(*message.Message) error { return errBusy }, 2, "returned", "done", 3, 1,
		},
		{"fails at most once", func(c *Config, _ *fakeStore) { c.Guarantee = AtMostOnce }, fails, 1, "failed", "returned", 1, 0},
	}
	for _, tt := range tests {
		for _, company := range []string{"u", "a u b"} {
			t.Run(tt.name+", as "+company, func(t *testing.T) {
				bubble(t, tt.change, func(e *env) {
					runs, acts := 0, tt.acts
					if tt.first == "panicked" && company != "u" {
						acts++ // it runs once more, alone
					}
					h := e.marking(only("u", func(msg *message.Message) error {
						if runs++; runs <= acts {
							return tt.act(msg)
						}
						return nil
					}))
					c := e.share(h, append(messages(company), messages("u")...)...)
					last := c.all[len(c.all)-1]
					if c.of("u").String() != tt.first || last.String() != tt.copy {
						e.Errorf("first: %s (%v), copy: %s (%v)", c.of("u"), c.of("u").err, last, last.err)
					}
					if want := tt.runs + acts - tt.acts; runs != want {
						e.Errorf("%d runs, want %d", runs, want)
					}
					if got := e.store.effect("u:u"); got != tt.effect {
						e.Errorf("effect %d, want %d", got, tt.effect)
					}
					if tt.first == "failed" && !strings.Contains(last.err.Error(), "another delivery of the same message failed") {
						e.Errorf("the copy goes back without a reason: %v", last.err)
					}
				})
			})
		}
	}
}

// A first copy that goes away lets the next one take its place.
func TestCopiesOfAFirstThatIsCancelled(t *testing.T) {
	bubble(t, nil, func(e *env) {
		open := e.holdLanes()
		first, cancel := withCancel(deliver("u", "p"))
		c := &crowd{e: e}
		c.enter(e.marking(nil), first)
		c.enter(e.marking(nil), messages("u u")...)
		cancel()
		synctest.Wait()
		if got := c.all[0].String(); got != "returned" {
			e.Errorf("the cancelled one is %s while no lane is free", got)
		}
		open()
		c.wait()
		c.all = c.all[1:]
		c.wantEndings()
		e.wantApplied("u")
		e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 1, "Returned": 1})
	})
}

// A copy with another payload is a conflict once its first one is done; one with the right payload is a replay although its
// first one was the conflict.
func TestConflictsInFlight(t *testing.T) {
	bubble(t, nil, func(e *env) {
		c := e.share(e.marking(nil), deliver("u", "p"), deliver("u", "q"), deliver("u", "p"), deliver("v", "p"))
		c.wantEndings()
		e.wantApplied("u v")
		e.wantCounts(map[string]uint64{"Handled": 2, "Replayed": 1, "Conflicted": 1})
		open := e.holdLanes()
		c.enter(e.marking(nil), deliver("u", "r"), deliver("u", "p"), deliver("u", "r"))
		open()
		c.wait()
		c.wantEndings()
		e.wantCounts(map[string]uint64{"Handled": 2, "Replayed": 2, "Conflicted": 3})
		if len(e.store.letters) != 2 {
			e.Errorf("%d dead letters, want one for each payload", len(e.store.letters))
		}
	})
}

// A conflict that was refused is none for the next copy: there is no receipt.
func TestCopiesOfARefusedFirst(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) {
		c.Validate = func(msg *message.Message) error {
			if string(msg.Payload) == "bad" {
				return errSQL
			}
			return nil
		}
	}, func(e *env) {
		c := e.share(e.marking(nil), deliver("u", "bad"), deliver("u", "p"), deliver("u", "bad"), deliver("u", "p"))
		c.wantEndings()
		e.wantApplied("u")
		e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 1, "Refused": 2})
	})
}

// A copy does not wait for ever: not beyond its own context, and not for longer than two transactions may last.
func TestCopiesDoNotWaitForEver(t *testing.T) {
	for _, tt := range []struct {
		name  string
		after time.Duration
		err   error
	}{
		{"its context ends", time.Second, context.Canceled},
		{"it gives up", 2 * defaultTxBudget, ErrContention},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, nil, func(e *env) {
				free := make(chan struct{})
				c := &crowd{e: e}
				h := e.marking(func(*message.Message) error { <-free; return nil })
				c.enter(h, deliver("u", "p"))
				msg, cancel := withCancel(deliver("u", "p"))
				if tt.after < defaultTxBudget {
					time.AfterFunc(tt.after, cancel)
				}
				msg, _ = withDelivery(msg) // it is not held
				c.enter(h, msg)
				time.Sleep(tt.after + time.Millisecond)
				synctest.Wait()
				o := c.all[1]
				if !o.returned || !errors.Is(o.err, tt.err) || IsFailure(o.err) || o.took != tt.after {
					e.Errorf("%s after %v: %v", o, o.took, o.err)
				}
				close(free)
				cancel()
				c.wait()
				c.wantCounted()
			})
		})
	}
}

// At least once, each delivery is on its own: the handler's outputs and effects come with each.
func TestAtLeastOnceDoesNotWaitForACopy(t *testing.T) {
	bubble(t, guaranteed(AtLeastOnce, nil), func(e *env) {
		c := e.share(e.marking(nil), messages("a b a")...)
		c.wantEndings()
		e.wantCounts(map[string]uint64{"Handled": 3})
		if a, b := e.store.effect("u:a"), e.store.effect("u:b"); a != 2 || b != 1 {
			e.Errorf("effects %d and %d", a, b)
		}
	})
}

// A router publishes what a copy returns, too: nobody knows whether the first one's delivery is still the broker's.
func TestCopiesGiveTheirOutputsToTheRouter(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.OutputsThroughRouter = true }, func(e *env) {
		h := e.shipping(message.NewMessage("o-1", nil))
		c := e.share(h, order("u"), order("u"), order("u"))
		c.wantEndings()
		for i, o := range c.all {
			if len(o.outputs) != 1 || o.outputs[0].UUID != "o-1" {
				e.Errorf("delivery %d gives %v", i, o.outputs)
			}
		}
	})
}

// Many copies from many goroutines: one effect, and nothing is left of any of them.
func TestManyCopies(t *testing.T) {
	for _, lanes := range []int{1, 4} {
		e := newEnv(t, func(_ *Config, s *fakeStore) { s.several(lanes) })
		h := e.marking(nil)
		var wg sync.WaitGroup
		for i := range 400 {
			wg.Go(func() {
				if _, err := h(deliver(fmt.Sprint(i%20), "p")); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for i := range 20 {
			if got := e.store.effect(fmt.Sprint("u:", i)); got != 1 {
				t.Errorf("effect %d of message %d", got, i)
			}
		}
		e.wantEffect(0) // and no lane is held
		e.wantNothingLeft()
		e.wantCounts(map[string]uint64{"Handled": 20, "Replayed": 380})
	}
}

// A follower whose first copy is torn asks for itself.
func TestCopiesOfATornFirst(t *testing.T) {
	bubble(t, nil, func(e *env) {
		msg, _ := withDelivery(deliver("u", "p"))
		_, _ = e.marking(stealing(nil))(msg)
		h := e.marking(nil)
		open := e.holdLanes()
		c := &crowd{e: e}
		c.enter(h, messages("u a u")...)
		open()
		c.wg.Wait()
		synctest.Wait()
		c.wantEndings()
		e.wantCounts(map[string]uint64{"Failed": 1, "Torn": 2, "Handled": 1})
		if len(e.store.letters) != 1 || e.store.letters[0].Kind != receipts.KindTorn {
			e.Errorf("dead letters %+v", e.store.letters)
		}
	})
}

// A copy waits as long as the line before its first one is, and gives up only on one that has begun and does not end.
func TestCopiesWaitForTheLine(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.TxBudget, c.BatchSize = time.Second, 1 }, func(e *env) {
		c := &crowd{e: e}
		slow := e.marking(func(*message.Message) error { time.Sleep(900 * time.Millisecond); return nil })
		c.enter(slow, messages("a b c d e f")...) // f begins after 4.5 s
		c.enter(slow, messages("f")...)
		c.wait()
		c.wantEndings()
		e.wantApplied("a b c d e f")
		e.wantCounts(map[string]uint64{"Handled": 6, "Replayed": 1})
	})
	bubble(t, func(c *Config, _ *fakeStore) { c.TxBudget = time.Second }, func(e *env) {
		c := &crowd{e: e}
		stuck := e.marking(func(*message.Message) error { time.Sleep(time.Minute); return nil })
		c.enter(stuck, messages("a a")...)
		c.wg.Wait()
		if second := c.all[1]; second.String() != "returned" || second.took > 3*time.Second {
			e.Errorf("the copy of a message that stands still is %s after %v", second, second.took)
		}
	})
}
