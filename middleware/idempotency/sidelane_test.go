package idempotency

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// numbered makes n deliveries with the UUIDs 0, 1, 2 …
func numbered(n int) []*message.Message {
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = deliver(fmt.Sprint(i), "p")
	}
	return msgs
}

// T29: an identity that a transaction of another process keeps claimed keeps nobody but its own message waiting, however
// many share its batch and wherever in it that message is.
func TestBlockedClaimDelaysNobodyElse(t *testing.T) {
	for _, n := range []int{1, 2, 3, 15, 16, 17, 100, 256} {
		for _, at := range []int{0, n / 2, n - 1} {
			for _, lanes := range []int{1, 2, 4} {
				t.Run(fmt.Sprintf("%d of %d in %d lanes", at, n, lanes), func(t *testing.T) {
					bubble(t, func(c *Config, s *fakeStore) {
						s.several(4)
						c.Lanes = lanes
					}, func(e *env) {
						e.claimElsewhere(fmt.Sprint(at), 5*time.Second)
						c := e.share(e.marking(nil), numbered(n)...)
						c.wantEndings()
						for i, o := range c.all {
							if i == at && (o.took < 5*time.Second || o.took > 5*time.Second+100*time.Millisecond) || i != at && o.took >= time.Second {
								e.Errorf("message %d took %v", i, o.took)
							}
						}
						if r := e.m.Report(); r.Handled != uint64(n) {
							e.Errorf("report %+v", r)
						}
					})
				})
			}
		}
	}
}

// Two that are blocked wait for the one side lane, one after the other; nobody else waits for either.
func TestTwoBlockedClaims(t *testing.T) {
	for _, lanes := range []int{1, 3} {
		bubble(t, func(c *Config, s *fakeStore) {
			s.several(3)
			c.Lanes = lanes
		}, func(e *env) {
			e.claimElsewhere("3", 5*time.Second)
			e.claimElsewhere("90", 8*time.Second)
			c := e.share(e.marking(nil), numbered(100)...)
			c.wantEndings()
			for i, o := range c.all {
				want, latest := map[int]time.Duration{3: 5 * time.Second, 90: 8 * time.Second}[i], time.Second
				if want > 0 {
					latest = 9 * time.Second
				}
				if o.took < want || o.took > latest {
					e.Errorf("message %d took %v", i, o.took)
				}
			}
			if e.store.mostOpen > lanes+1+2 {
				e.Errorf("%d transactions at a time, two of them elsewhere, in %d lanes", e.store.mostOpen, lanes)
			}
		})
	}
}

// What becomes of one that is blocked.
func TestBlockedMessage(t *testing.T) {
	tests := []struct {
		name    string
		held    time.Duration
		cancel  time.Duration // after which its context ends; 0: never
		act     func() error
		change  func(c *Config, s *fakeStore)
		ends    string
		err     error
		took    time.Duration
		applied string
	}{
		{"goes on", 5 * time.Second, 0, nil, nil, "done", nil, 5 * time.Second, "a b c"},
		{"for longer than its budget", time.Minute, 0, nil, nil, "returned", ErrContention, defaultTxBudget, "a c"},
		{"its context ends", 5 * time.Second, 3 * time.Second, nil, nil, "returned", context.Canceled, 3 * time.Second, "a c"},
		{"and fails", 5 * time.Second, 0, func() error { return errHandler }, nil, "failed", errHandler, 5 * time.Second, "a c"},
		{"and panics", 5 * time.Second, 0, func() error { panic("by hand") }, nil, "panicked", nil, 5 * time.Second, "a c"},
		{"and exits", 5 * time.Second, 0, howToEnd()["exits"], nil, "exited", nil, 5 * time.Second, "a c"},
		{"and is given up", 5 * time.Second, 0, func() error { return Permanent(errHandler) }, nil, "done", nil, 5 * time.Second, "a c"},
		{"at most once", 5 * time.Second, 0, nil, func(c *Config, _ *fakeStore) { c.Guarantee = AtMostOnce }, "done", nil, 5 * time.Second, "a b c"},
		{"and an unknown COMMIT", 5 * time.Second, 0, nil, func(_ *Config, s *fakeStore) {
			s.onCommit = func(n int) commitFault { return commitFault{lost: n == 2, apply: true} }
		}, "done", nil, 5 * time.Second, "a b c"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(c *Config, s *fakeStore) {
				if s.several(2); tt.change != nil {
					tt.change(c, s)
				}
			}, func(e *env) {
				free := e.claimElsewhere("b", tt.held)
				msgs := messages("a b c")
				blocked, cancel := withCancel(msgs[1])
				defer cancel()
				msgs[1], _ = withDelivery(blocked) // it is not held
				if tt.cancel > 0 {
					time.AfterFunc(tt.cancel, cancel)
				}
				c := &crowd{e: e}
				open := e.holdLanes()
				c.enter(e.marking(only("b", func(*message.Message) error {
					if tt.act != nil {
						return tt.act()
					}
					return nil
				})), msgs...)
				open()
				c.wg.Wait()
				free()
				c.wait()
				c.wantEndings("b:" + tt.ends)
				o := c.of("b")
				if tt.err != nil && !errors.Is(o.err, tt.err) {
					e.Errorf("got %v", o.err)
				}
				if o.took < tt.took || o.took > tt.took+time.Second {
					e.Errorf("it took %v", o.took)
				}
				e.wantApplied(tt.applied)
			})
		})
	}
}

// One that waits for the side lane, behind another one, leaves when its context ends.
func TestBlockedAndCancelledBeforeTheSideLane(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.several(2) }, func(e *env) {
		e.claimElsewhere("a", 8*time.Second)
		e.claimElsewhere("b", 8*time.Second)
		second, cancel := withCancel(deliver("b", "p"))
		time.AfterFunc(2*time.Second, cancel)
		c := &crowd{e: e}
		c.enter(e.marking(nil), deliver("a", "p"))
		time.Sleep(time.Second)
		c.enter(e.marking(nil), second)
		c.wait()
		c.wantEndings("b:returned")
		if took := c.of("b").took; took != time.Second {
			e.Errorf("it left after %v", took)
		}
	})
}

// A handler in the side lane that stands still keeps its goroutine, not the side lane.
func TestHandlerThatStandsStillInTheSideLane(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.several(2) }, func(e *env) {
		e.claimElsewhere("a", time.Second)
		e.claimElsewhere("b", 2*time.Second)
		c := e.share(e.marking(only("a", func(*message.Message) error { time.Sleep(time.Hour); return nil })), messages("a b c")...)
		c.wantEndings("a:failed")
		if took := c.of("b").took; took > defaultTxBudget+2*time.Second {
			e.Errorf("the next one took %v", took)
		}
	})
}

// After a message was in the side lane it is one like the others: when its database was away meanwhile, and its identity is
// claimed elsewhere again, its neighbours do not wait with it.
func TestBlockedAgainAfterAnOutage(t *testing.T) {
	bubble(t, func(c *Config, s *fakeStore) { s.several(2); c.Lanes = 1 }, func(e *env) {
		e.claimElsewhere("b", time.Second)
		e.store.onCommit = func(n int) commitFault {
			if n != 1 {
				return commitFault{}
			}
			e.claimElsewhereLater("b", 5*time.Second) // as soon as this transaction has ended
			return commitFault{err: errGone}
		}
		c := &crowd{e: e}
		h := e.marking(nil)
		c.enter(h, deliver("b", "p"))
		time.Sleep(1050 * time.Millisecond) // in the side lane it found the database away
		e.m.databaseBack()                  // as somebody else finds out
		open := e.holdLanes()
		time.Sleep(time.Second) // it waits for a lane, the first one in the queue
		c.enter(h, messages("x y z")...)
		open()
		c.wait()
		c.wantEndings()
		for _, uuid := range []string{"x", "y", "z"} {
			if took := c.of(uuid).took; took > time.Second {
				e.Errorf("%s took %v", uuid, took)
			}
		}
		e.wantApplied("b x y z")
	})
}

// One that probes whether the database is back, and is blocked, has found out: the others do not wait until it is free.
func TestABlockedProbeOpensTheGate(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.several(2) }, func(e *env) {
		e.claimElsewhere("b", 5*time.Second)
		e.m.databaseAway(errGone)
		time.Sleep(time.Second) // the next one probes
		c := &crowd{e: e}
		h := e.marking(nil)
		c.enter(h, messages("b x y z")...)
		c.wait()
		c.wantEndings()
		for _, uuid := range []string{"x", "y", "z"} {
			if took := c.of(uuid).took; took > time.Second {
				e.Errorf("%s took %v", uuid, took)
			}
		}
	})
}

// At most once, the claim that was waited for is committed before the handler runs. What its handler's transaction meets then
// is no reason to lose it.
func TestBlockedAtMostOnceMeetsContention(t *testing.T) {
	bubble(t, guaranteed(AtMostOnce, func(_ *Config, s *fakeStore) { s.several(2) }), func(e *env) {
		e.claimElsewhere("b", 2*time.Second)
		runs := 0
		c := e.share(e.marking(only("b", func(*message.Message) error {
			if runs++; runs <= 3 {
				return errBusy
			}
			return nil
		})), messages("a b c")...)
		c.wantEndings()
		e.wantApplied("a b c")
	})
}
