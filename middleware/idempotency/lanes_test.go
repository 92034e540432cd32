package idempotency

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// serverModel is a database server and its client, in virtual time: each statement is work for one of a few cores, and a way
// there and back.
type serverModel struct {
	cores            int
	work, trip       time.Duration // of a statement
	flush            time.Duration // of a commit
	handler          time.Duration // what a handler waits for elsewhere
	lanes            int
	window, messages int
}

// run handles all messages and tells how many that were in a second, and in a transaction.
func (d serverModel) run(t *testing.T) (perSecond, batch float64) {
	synctest.Test(t, func(t *testing.T) {
		cores := make(chan struct{}, d.cores)
		statements := func(n int) {
			for range n {
				cores <- struct{}{}
				time.Sleep(d.work)
				<-cores
				time.Sleep(d.trip)
			}
		}
		e := newEnv(t, func(_ *Config, s *fakeStore) {
			s.several(d.lanes)
			s.info.Parts = false
			s.onBegin = func(int) error { statements(2); return nil }
			s.onClaim = func(int) error { statements(4); return nil }
			s.onCommit = func(int) commitFault { statements(2); time.Sleep(d.flush); return commitFault{} }
		})
		h := e.marking(func(*message.Message) error { statements(1); time.Sleep(d.handler); return nil })
		next := make(chan int)
		var wg sync.WaitGroup
		start := time.Now()
		for range d.window {
			wg.Go(func() {
				for i := range next {
					if _, err := h(deliver(fmt.Sprint(i), "p")); err != nil {
						t.Error(err)
					}
				}
			})
		}
		for i := range d.messages {
			next <- i
		}
		close(next)
		wg.Wait()
		e.wantNothingLeft()
		perSecond = float64(d.messages) / time.Since(start).Seconds()
		batch = float64(d.messages) / float64(e.store.count("commit"))
	})
	return perSecond, batch
}

const us = time.Microsecond

// Lanes do not take small batches from each other: each takes at least its share. Where they took what was there, the batches
// were of 2 to 3 messages in the first two cases, and half as many messages were handled in a second. Their number is found: with
// eight, which was the rule before, it was 11,700, 13,400 and 18,000 messages a second.
func TestLanesTakeTheirShare(t *testing.T) {
	for name, c := range map[string]struct {
		model     serverModel
		batch     float64
		perSecond float64
	}{
		"a server on this machine": {serverModel{cores: 2, work: 70 * us, trip: 20 * us, flush: 500 * us, window: 64}, 6, 10_000},
		"a server elsewhere":       {serverModel{cores: 16, work: 30 * us, trip: 200 * us, flush: 500 * us, window: 64}, 5, 14_000},
		"a wide window":            {serverModel{cores: 16, work: 30 * us, trip: 200 * us, flush: 500 * us, window: 512}, 25, 22_000},
	} {
		t.Run(name, func(t *testing.T) {
			c.model.lanes, c.model.messages = 16, 40_000
			perSecond, batch := c.model.run(t)
			if batch < c.batch || perSecond < c.perSecond {
				t.Errorf("%.0f messages a second in batches of %.1f, want %.0f and %.1f at least", perSecond, batch, c.perSecond, c.batch)
			}
		})
	}
}

// Fast handlers leave lanes alone that slow ones use.
func TestLanesOfSlowHandlers(t *testing.T) {
	slow := serverModel{cores: 16, work: 30 * us, trip: 200 * us, flush: 500 * us, handler: 20 * time.Millisecond, lanes: 16, window: 16, messages: 6400}
	alone := 16 / (slow.handler + slow.flush + 9*(slow.work+slow.trip)).Seconds()
	if perSecond, _ := slow.run(t); perSecond < 0.9*alone {
		t.Errorf("%.0f messages a second, want nearly %.0f: each handler in a lane of its own", perSecond, alone)
	}
	fast := slow
	fast.handler, fast.window = 0, 64
	if _, batch := fast.run(t); batch < 5 {
		t.Errorf("batches of %.1f where handlers are fast: they take too many lanes", batch)
	}
}

// A message does not wait for others to come: where there are no more of them than lanes, each begins at once.
func TestFewMessagesDoNotWait(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.several(8) }, func(e *env) {
		c := &crowd{e: e}
		h := e.marking(func(*message.Message) error { time.Sleep(15 * time.Millisecond); return nil })
		for i := range 8 {
			c.enter(h, deliver(fmt.Sprint(i), "p"))
			time.Sleep(time.Millisecond)
		}
		c.wait()
		for _, o := range c.all {
			if o.took != 15*time.Millisecond {
				e.Errorf("%s took %v", o.msg.UUID, o.took)
			}
		}
	})
}

// A transaction that stands still is not waited for, for longer than two batches may take.
func TestStuckTransactionsAreNotWaitedFor(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.several(4) }, func(e *env) {
		c := &crowd{e: e}
		h := e.marking(only("0", func(*message.Message) error { time.Sleep(5 * time.Second); return nil }))
		c.enter(h, deliver("0", "p"))
		for i := range 3 { // less than a share of all that are here
			c.enter(h, deliver(fmt.Sprint(i+1), "p"))
		}
		c.wait()
		for _, o := range c.all[1:] {
			if o.took > 2*e.m.cfg.BatchTime {
				e.Errorf("%s took %v beside one that stands still", o.msg.UUID, o.took)
			}
		}
	})
}
