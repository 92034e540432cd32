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
)

// batches lists the sizes of the transactions that claimed something, in their order.
func (e *env) batches() []int {
	e.store.mu.Lock()
	defer e.store.mu.Unlock()
	return slices.Clone(e.store.sizes)
}

func (e *env) wantBatches(want ...int) {
	e.Helper()
	if got := e.batches(); !slices.Equal(got, want) {
		e.Errorf("batches of %v, want %v", got, want)
	}
}

// slowCommit makes each COMMIT take d: what a disk does.
func slowCommit(s *fakeStore, d time.Duration) {
	s.onCommit = func(int) commitFault { time.Sleep(d); return commitFault{} }
}

// A lone message begins at once and waits for nobody.
func TestALoneMessageDoesNotWait(t *testing.T) {
	bubble(t, nil, func(e *env) {
		h := e.marking(nil)
		for _, msg := range messages("a b c") {
			start := time.Now()
			if _, err := h(msg); err != nil || time.Since(start) != 0 {
				e.Errorf("%v after %v", err, time.Since(start))
			}
		}
		e.wantBatches(1, 1, 1)
	})
}

// What arrives while a transaction runs shares the next one, in the order of arrival, and never more than BatchSize.
func TestNaturalBatches(t *testing.T) {
	for _, tt := range []struct {
		size, n int
		want    []int
	}{
		{0, 10, []int{1, 9}},
		{256, 300, []int{1, 256, 43}},
		{4, 10, []int{1, 4, 4, 1}},
		{1, 4, []int{1, 1, 1, 1}},
	} {
		t.Run(fmt.Sprintf("%d of at most %d", tt.n, tt.size), func(t *testing.T) {
			bubble(t, func(c *Config, s *fakeStore) {
				c.BatchSize = tt.size
				slowCommit(s, time.Second)
			}, func(e *env) {
				c := &crowd{e: e}
				c.enter(e.marking(nil), numbered(tt.n)...)
				c.wait()
				c.wantEndings()
				e.wantBatches(tt.want...)
				for i, name := range e.store.order {
					if name != fmt.Sprint("u:", i) {
						e.Errorf("%s ran as number %d", name, i)
						break
					}
				}
				r := e.m.Report().Batches
				if r.Transactions != uint64(len(tt.want)) || r.Messages != uint64(tt.n) || r.Largest != uint64(slices.Max(tt.want)) || r.Repeated != 0 {
					e.Errorf("report %+v", r)
				}
				for i, o := range c.all {
					sum, after := 0, 0
					for ; sum <= i; after++ {
						sum += tt.want[after]
					}
					if o.took != time.Duration(after)*time.Second {
						e.Errorf("message %d took %v, want %d s", i, o.took, after)
						return
					}
				}
			})
		})
	}
}

// What is left of a batch runs in it if that takes no more than half of BatchTime: to claim again would take as long.
func TestBatchTimeLetsAShortRestRun(t *testing.T) {
	for n, want := range map[int][]int{5: {5}, 6: {6, 2}} { // two of the six are claimed again
		bubble(t, nil, func(e *env) {
			slow := e.marking(func(*message.Message) error { time.Sleep(6 * time.Millisecond); return nil })
			open := e.holdLanes()
			c := &crowd{e: e}
			c.enter(slow, numbered(n)...)
			open()
			c.wait()
			c.wantEndings()
			if got := e.batches(); !slices.Equal(got, want) { // behind what held the lane
				e.Errorf("%d messages were claimed in batches of %v, want %v", n, got, want)
			}
		})
	}
}

// BatchTime ends a batch: it commits what ran, and the rest comes first in the next one, before what came later.
func TestBatchTime(t *testing.T) {
	bubble(t, nil, func(e *env) {
		slow := e.marking(func(msg *message.Message) error {
			time.Sleep(6 * time.Millisecond)
			return nil
		})
		open := e.holdLanes()
		c := &crowd{e: e}
		c.enter(slow, numbered(10)...)
		open()
		time.Sleep(8 * time.Millisecond) // in the second handler
		c.enter(slow, deliver("late", "p"))
		c.wait()
		c.wantEndings()
		if want := strings.Fields("u:0 u:1 u:2 u:3 u:4 u:5 u:6 u:7 u:8 u:9 u:late"); !slices.Equal(e.store.order, want) {
			e.Errorf("they ran as %v", e.store.order)
		}
		for i, o := range c.all[:4] { // four handlers of 6 ms are over BatchTime, three are not
			if o.took != 24*time.Millisecond {
				e.Errorf("message %d took %v", i, o.took)
			}
		}
		if o := c.all[4]; o.took <= 24*time.Millisecond {
			e.Errorf("message 4 took %v", o.took)
		}
		for _, size := range e.batches()[1:] {
			if size > 4 {
				e.Errorf("batches of %v: once handlers are known to be slow, claims are not made for nothing", e.batches())
			}
		}
	})
}

// The time of a handler that did not return counts as well.
func TestBatchTimeOfHandlersThatPanic(t *testing.T) {
	bubble(t, nil, func(e *env) {
		c := e.share(e.marking(only("b", func(*message.Message) error {
			time.Sleep(25 * time.Millisecond)
			panic("by hand")
		})), messages("a b c d")...)
		c.wantEndings("b:panicked")
		e.wantApplied("a c d")
		if b := e.m.Report().Batches; b.Largest > 2 || b.Transactions < 2 {
			e.Errorf("%+v: the first transaction should end with the slow one", b)
		}
	})
}

// Handlers that take longer than BatchTime run one in each transaction, in all lanes at a time.
func TestSlowHandlersDegradeToOneEach(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.several(4) }, func(e *env) {
		c := &crowd{e: e}
		start := time.Now()
		c.enter(e.marking(func(*message.Message) error { time.Sleep(50 * time.Millisecond); return nil }), numbered(40)...)
		c.wait()
		c.wantEndings()
		if took := time.Since(start); took > 600*time.Millisecond { // 40 * 50 ms in 4 lanes is 500 ms
			e.Errorf("they took %v", took)
		}
		if e.store.mostOpen != 4 {
			e.Errorf("%d transactions at a time", e.store.mostOpen)
		}
		if b := e.m.Report().Batches; b.Transactions < 38 {
			e.Errorf("%+v", b)
		}
	})
}

// A handler that was slow once does not make batches small for long.
func TestBatchesGrowAfterASlowHandler(t *testing.T) {
	bubble(t, nil, func(e *env) {
		h := e.marking(only("slow", func(*message.Message) error { time.Sleep(5 * time.Second); return nil }))
		e.share(h, messages("slow")...)
		open := e.holdLanes()
		c := &crowd{e: e}
		c.enter(h, numbered(200)...)
		open()
		c.wg.Wait()
		synctest.Wait()
		sizes := e.batches()
		if len(sizes) > 20 || slices.Max(sizes) < 20 {
			e.Errorf("batches of %v", sizes)
		}
	})
}

// Several handlers share a lane: each has its turn after the others, however much is pending for one of them.
func TestHandlersTakeTurns(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.BatchSize = 2 }, func(e *env) {
		var mu sync.Mutex
		var turns []string
		handler := func(name string) message.HandlerFunc {
			return e.marking(func(*message.Message) error {
				mu.Lock()
				defer mu.Unlock()
				if len(turns) == 0 || turns[len(turns)-1] != name {
					turns = append(turns, name)
				}
				return nil
			})
		}
		open := e.holdLanes()
		c := &crowd{e: e}
		busy, quiet, other := handler("busy"), handler("quiet"), handler("other")
		for i := range 20 {
			c.enter(busy, deliverTo("busy", "t", "", fmt.Sprint(i), "p"))
		}
		for i := range 3 {
			c.enter(quiet, deliverTo("quiet", "t", "", fmt.Sprint(i), "p"))
		}
		c.enter(other, deliverTo("other", "t", "", "0", "p"))
		open()
		c.wait()
		if want := strings.Fields("busy quiet other busy quiet busy"); !slices.Equal(turns, want) {
			e.Errorf("turns %v, want %v", turns, want)
		}
	})
}

// Whoever writes without being a delivery, as what marks outputs does, waits for no more than its turn, and its context.
func TestAcquireTakesItsTurn(t *testing.T) {
	bubble(t, func(c *Config, s *fakeStore) {
		c.BatchSize = 2
		slowCommit(s, time.Second)
	}, func(e *env) {
		open := e.holdLanes()
		c := &crowd{e: e}
		c.enter(e.marking(nil), numbered(10)...)
		var wg sync.WaitGroup
		start := time.Now()
		wg.Go(func() {
			l, err := e.m.lanes.acquire(context.Background())
			if err != nil || time.Since(start) > time.Second {
				e.Errorf("%v after %v", err, time.Since(start))
				return
			}
			l.release()
			l.release() // again: nothing
		})
		synctest.Wait()
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			defer cancel()
			if _, err := e.m.lanes.acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
				e.Errorf("got %v", err)
			}
		})
		synctest.Wait()
		time.Sleep(2 * time.Millisecond)
		start = time.Now()
		open()
		wg.Wait()
		c.wait()
		c.wantEndings()
	})
}

// A context that ends in the moment in which the lane is granted gives it back.
func TestAcquireGivesBackWhatItCannotUse(t *testing.T) {
	e := newEnv(t, func(_ *Config, s *fakeStore) { s.several(2) })
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(context.Background())
			go cancel()
			if l, err := e.m.lanes.acquire(ctx); err == nil {
				l.release()
			}
		})
	}
	wg.Wait()
	e.wantNothingLeft()
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := e.m.lanes.acquire(over); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// Never more transactions than lanes, whatever comes, and all lanes are used.
func TestLanesBoundTransactions(t *testing.T) {
	for _, lanes := range []int{1, 2, 5} {
		bubble(t, func(c *Config, s *fakeStore) {
			s.several(5)
			c.Lanes, c.BatchSize = lanes, 3
			slowCommit(s, time.Millisecond)
		}, func(e *env) {
			c := &crowd{e: e}
			first, second := e.marking(nil), e.marking(nil)
			for i := range 60 {
				h, name := first, "first"
				if i%2 == 0 {
					h, name = second, "second"
				}
				c.enter(h, deliverTo(name, "t", "", fmt.Sprint(i), "p"))
			}
			c.wait()
			c.wantEndings()
			if e.store.mostOpen != lanes {
				e.Errorf("%d transactions at a time in %d lanes", e.store.mostOpen, lanes)
			}
		})
	}
}

// MaxPending is a door: what is beyond it waits outside, and comes in when somebody leaves, or goes away with its context.
func TestTheDoor(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.MaxPending = 3 }, func(e *env) {
		open := e.holdLanes()
		c := &crowd{e: e}
		h := e.marking(nil)
		c.enter(h, messages("a b c d e")...)
		impatient, cancel := withCancel(deliver("f", "p"))
		c.enter(h, impatient)
		if n := len(e.m.inside.door); n != 3 {
			e.Errorf("%d are taken up", n)
		}
		if h := e.m.Report().Health; h.Pending != 6 {
			e.Errorf("health %+v", h)
		}
		cancel()
		synctest.Wait()
		if got := c.of("f").String(); got != "returned" || !errors.Is(c.of("f").err, context.Canceled) {
			e.Errorf("at the door: %s (%v)", got, c.of("f").err)
		}
		open()
		c.wait()
		c.wantEndings("f:returned")
		e.wantApplied("a b c d e")
		if got := e.batches(); got[0] != 3 {
			e.Errorf("batches of %v", got)
		}
	})
}

// Shutdown: when all contexts end, all leave at once, whatever they are waiting for.
func TestAllLeaveWhenTheirContextsEnd(t *testing.T) {
	for _, lanes := range []int{1, 3} {
		bubble(t, func(c *Config, s *fakeStore) {
			s.several(3)
			c.Lanes, c.MaxPending = lanes, 500
		}, func(e *env) {
			elsewhere := e.claimElsewhere("7", time.Hour)
			ctx, cancel := context.WithCancel(context.Background())
			c := &crowd{e: e}
			free := make(chan struct{})
			blocker := e.marking(func(*message.Message) error { <-free; return nil })
			c.enter(blocker, deliver("7", "p")) // waits for its claim
			for i := range lanes {
				c.enter(blocker, deliverTo("blocker", "t", "", fmt.Sprint(i), "p"))
			}
			time.Sleep(time.Second) // until they have their lanes
			h := e.marking(nil)
			for i := range 600 { // copies, pending ones, and those at the door
				msg := deliver(fmt.Sprint(100+i%400), "p")
				msg.SetContext(&routed{Context: ctx, handler: "charge", topic: "orders"})
				c.enter(h, msg)
			}
			time.Sleep(time.Second)
			start := time.Now()
			cancel()
			synctest.Wait()
			for _, o := range c.all[lanes+1:] {
				if o.String() != "returned" || time.Since(start) != 0 {
					e.Errorf("%s is %s", o.msg.UUID, o)
					break
				}
			}
			close(free)
			elsewhere()
			c.wait()
		})
	}
}

// Those who share a transaction leave when it ends without them, not after the next one of somebody else.
func TestCancelledDuringContention(t *testing.T) {
	for _, after := range []time.Duration{100 * time.Millisecond, 1002 * time.Millisecond} { // in COMMIT, in the pause that follows
		bubble(t, func(_ *Config, s *fakeStore) {
			s.onCommit = func(n int) commitFault {
				if n > 1 {
					return commitFault{}
				}
				time.Sleep(time.Second)
				return commitFault{err: errBusy}
			}
		}, func(e *env) {
			open := e.holdLanes()
			c := &crowd{e: e}
			ctx, cancel := context.WithCancel(context.Background())
			h := e.marking(nil)
			for _, msg := range messages("a b c") {
				msg.SetContext(&routed{Context: ctx, handler: "charge", topic: "orders"})
				c.enter(h, msg)
			}
			c.enter(e.marking(func(*message.Message) error { time.Sleep(5 * time.Second); return nil }), messages("slow")...)
			time.AfterFunc(after, cancel)
			open()
			c.wait()
			c.wantEndings("a:returned", "b:returned", "c:returned")
			e.wantApplied("slow")
			for _, uuid := range []string{"a", "b", "c"} {
				if took := c.of(uuid).took; took > time.Second+100*time.Millisecond {
					e.Errorf("%s left after %v", uuid, took)
				}
			}
		})
	}
}
