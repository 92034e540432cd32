package idempotency

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// Every call of the store that a batch makes fails once, in every way. Nothing is lost or applied twice, everybody is counted
// once, and nobody is charged whose doing it cannot have been.
func TestStoreFailsOnceInABatch(t *testing.T) {
	charged := map[string]string{ // whose handler the call follows, where the error is neither contention nor an outage
		"keep": "a", "addOutputs": "out",
	}
	for place, put := range placeFault() {
		for _, fault := range []error{errBusy, errGone, errSQL, receipts.ErrTxEnded} {
			for _, mode := range []Guarantee{EffectivelyOnce, AtLeastOnce, AtMostOnce} {
				if place == "unclaim" && mode != EffectivelyOnce {
					continue // no claims beside handlers
				}
				t.Run(fmt.Sprintf("%s: %v, guarantee %d", place, fault, mode), func(t *testing.T) {
					pub := &recording{}
					bubble(t, guaranteed(mode, func(c *Config, s *fakeStore) {
						withEverything(c, pub)
						put(s, times(1, fault))
					}), func(e *env) {
						if place == "claim" && mode == AtLeastOnce {
							return // there are none
						}
						c := e.everything()
						ends, done := []string{"bad:failed"}, "a b out c"
						if bad := charged[place]; bad != "" && !errors.Is(fault, errBusy) && !errors.Is(fault, errGone) {
							ends = append(ends, bad+":failed")
							done = without(bad, done)
							if mode == AtMostOnce && errors.Is(fault, receipts.ErrTxEnded) && place == "addOutputs" {
								done = "a b c"
							}
						}
						if mode == AtMostOnce && errors.Is(fault, receipts.ErrTxEnded) {
							wantAtMostOnce(e, c)
							return
						}
						c.wantEndings(ends...)
						e.wantApplied(done)
						wantBlame(e, fault)
						if e.store.count(place) == 0 {
							e.Error("the fault did not fire")
						}
						if got := sentOf(pub); got != "o-1" && slices.Contains(ends, "out:failed") == (got != "") {
							e.Errorf("sent %q", got)
						}
					})
				})
			}
		}
	}
}

// wantBlame checks what the report says about whose failure it was.
func wantBlame(e *env, fault error) {
	e.Helper()
	r := e.m.Report()
	if contention := errors.Is(fault, errBusy); contention != (r.Contention > 0) {
		e.Errorf("%d times contention", r.Contention)
	}
	if outage := errors.Is(fault, errGone); outage != (r.Outages == 1) {
		e.Errorf("%d outages", r.Outages)
	}
	if r.Refused != 1 || len(e.store.letters) != 1 || r.Returned != 0 {
		e.Errorf("report %+v, %d dead letters", r, len(e.store.letters))
	}
}

// wantAtMostOnce checks that nothing was applied twice: where somebody may have committed, what ran goes back.
func wantAtMostOnce(e *env, c *crowd) {
	e.Helper()
	for uuid, n := range e.store.effects {
		if n > 1 {
			e.Errorf("effect %d of %s", n, uuid)
		}
	}
	if got := c.of("bad").String(); got != "failed" && got != "returned" {
		e.Errorf("the failing one is %s", got)
	}
}

// The same, for ever: everybody goes back with the reason, within bounded time, and charged only where a handler had run.
func TestStoreFailsAlwaysInABatch(t *testing.T) {
	for _, tt := range []struct {
		place string
		fault error
		ends  string
		err   error
	}{
		{"begin", errBusy, "returned", ErrContention},
		{"begin", errGone, "returned", ErrDatabaseAway},
		{"begin", errSQL, "returned", errSQL},
		{"claim", errBusy, "returned", ErrContention},
		{"claim", errGone, "returned", ErrDatabaseAway},
		{"claim", errSQL, "returned", errSQL},
		{"commit", errBusy, "returned", ErrContention},
		{"commit", errGone, "returned", ErrDatabaseAway},
		{"commit", errSQL, "failed", errSQL},
		{"commit", receipts.ErrTxEnded, "failed", receipts.ErrTxEnded},
		{"commit", receipts.ErrBudgetEnded, "failed", receipts.ErrBudgetEnded},
		{"part", errSQL, "done", nil}, // alone there is no part
	} {
		t.Run(fmt.Sprintf("%s: %v", tt.place, tt.fault), func(t *testing.T) {
			bubble(t, func(c *Config, s *fakeStore) {
				c.ContentionRetries = 3
				placeFault()[tt.place](s, func(int) error { return tt.fault })
			}, func(e *env) {
				c := &crowd{e: e}
				open := e.holdLanes()
				for _, msg := range messages("a b c d e f g") {
					msg, _ = withDelivery(msg)
					c.enter(e.marking(nil), msg)
				}
				h := e.marking(nil)
				for _, msg := range messages("h i j k l m n") {
					msg, _ = withDelivery(msg)
					c.enter(h, msg)
				}
				start := time.Now()
				open()
				c.wait()
				if took := time.Since(start); took > patience+5*time.Second {
					e.Errorf("it took %v", took)
				}
				for _, o := range c.all {
					if o.String() != tt.ends || tt.err != nil && !errors.Is(o.err, tt.err) {
						e.Errorf("%s is %s: %v", o.msg.UUID, o, o.err)
					}
				}
				if tt.ends != "done" {
					e.wantApplied("")
				}
			})
		})
	}
}

// A COMMIT without an answer is resolved once for all of a batch; nobody is acknowledged on unknown.
func TestUnknownCommitOfABatch(t *testing.T) {
	const all = "a b c d"
	for _, tt := range []struct {
		name    string
		mode    Guarantee
		commit  int // which of the COMMITs
		apply   bool
		decided bool
		ends    string
		applied string // at once
		again   string // after another delivery of each
	}{
		{"committed", EffectivelyOnce, 1, true, true, "done", all, all},
		{"not committed", EffectivelyOnce, 1, false, true, "done", all, all},
		{"undecided, committed", EffectivelyOnce, 1, true, false, "returned", all, all},
		{"undecided, not committed", EffectivelyOnce, 1, false, false, "returned", "", all},
		{"at most once, claims committed", AtMostOnce, 1, true, true, "done", all, all},
		{"at most once, claims not committed", AtMostOnce, 1, false, true, "done", all, all},
		{"at most once, claims undecided", AtMostOnce, 1, true, false, "returned", "", ""},
		{"at most once, committed", AtMostOnce, 2, true, true, "returned", all, all},
		{"at most once, not committed", AtMostOnce, 2, false, true, "returned", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, guaranteed(tt.mode, func(_ *Config, s *fakeStore) {
				s.onCommit = func(n int) commitFault { return commitFault{lost: n == tt.commit, apply: tt.apply} }
				s.onResolve = func(int) error {
					if tt.decided {
						return nil
					}
					return errSQL
				}
			}), func(e *env) {
				h := e.marking(nil)
				c := e.share(h, messages(all)...)
				for _, o := range c.all {
					if o.String() != tt.ends || tt.ends == "returned" && !errors.Is(o.err, ErrUndecided) {
						e.Errorf("%s is %s: %v", o.msg.UUID, o, o.err)
					}
				}
				e.wantApplied(tt.applied)
				r := e.m.Report()
				if r.UnknownCommits != 1 || tt.decided && e.store.count("resolve") > 1 {
					e.Errorf("%d unknown, resolved %d times", r.UnknownCommits, e.store.count("resolve"))
				}
				open := e.holdLanes()
				c.enter(h, messages(all)...)
				open()
				c.wait()
				e.wantApplied(tt.again)
			})
		})
	}
	t.Run("at least once", func(t *testing.T) {
		bubble(t, guaranteed(AtLeastOnce, commitLost(1, true)), func(e *env) {
			c := e.share(e.marking(nil), messages(all)...)
			c.wantEndings("a:returned", "b:returned", "c:returned", "d:returned")
			if e.store.count("resolve") != 0 {
				e.Error("there is nothing to ask for")
			}
		})
	})
}

// While an unknown COMMIT is resolved its lane is free for others.
func TestResolvingABatchHoldsNoLane(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) {
		s.onCommit = func(n int) commitFault { return commitFault{lost: n == 1, apply: true} }
		s.onResolve = func(n int) error {
			if n == 1 {
				time.Sleep(3 * time.Second)
			}
			return nil
		}
	}, func(e *env) {
		c := &crowd{e: e}
		open := e.holdLanes()
		h := e.marking(nil)
		c.enter(h, messages("a b c")...)
		open()
		time.Sleep(time.Second)
		c.enter(h, messages("d")...)
		c.wait()
		c.wantEndings()
		if took := c.of("d").took; took != 0 {
			e.Errorf("the other one took %v", took)
		}
		if took := c.of("a").took; took != 3*time.Second {
			e.Errorf("it was resolved after %v", took)
		}
		e.wantApplied("a b c d")
	})
}

// Contention halves a handler's batches, and each one without it lets them grow by a sixteenth of BatchSize. What met it
// comes first again after its pause; what came later goes on meanwhile.
func TestContentionHalvesBatches(t *testing.T) {
	bubble(t, func(c *Config, s *fakeStore) {
		c.BatchSize = 64
		s.onCommit = func(n int) commitFault {
			if n <= 3 {
				return commitFault{err: errBusy}
			}
			return commitFault{}
		}
	}, func(e *env) {
		c := e.share(e.marking(nil), numbered(64)...)
		c.wantEndings()
		sizes, sum := e.batches(), 0
		for _, n := range sizes[3:] {
			sum += n
		}
		if !slices.Equal(sizes[:4], []int{64, 32, 16, 8}) || sum != 64 || slices.Max(sizes[4:]) < 12 {
			e.Errorf("batches of %v", sizes)
		}
		r := e.m.Report()
		if r.Contention != 3 || r.Batches.Repeated != 64+32+16 {
			e.Errorf("report %+v", r)
		}
	})
}

// A message that meets contention alone says nothing about how large batches may be.
func TestContentionOfALoneMessage(t *testing.T) {
	bubble(t, func(c *Config, s *fakeStore) { c.BatchSize = 64 }, func(e *env) {
		h := e.marking(failingTimes("bad", 6, func() error { return errBusy }))
		c := &crowd{e: e}
		c.enter(h, messages("bad")...)
		open := e.holdLanes()
		c.enter(h, numbered(64)...)
		open()
		c.wait()
		c.wantEndings()
		if got := e.batches(); slices.Max(got) != 64 {
			e.Errorf("batches of %v", got)
		}
	})
}

// A message has its ContentionRetries to itself, whoever shares its transactions, and the first of them counts.
func TestContentionRetriesInABatch(t *testing.T) {
	for _, parts := range []bool{true, false} {
		t.Run(fmt.Sprintf("parts %v", parts), func(t *testing.T) {
			bubble(t, func(c *Config, s *fakeStore) {
				c.ContentionRetries = 4
				s.info.Parts = parts
			}, func(e *env) {
				runs := map[string]int{}
				c := e.share(e.marking(func(msg *message.Message) error {
					if runs[msg.UUID]++; msg.UUID == "b" {
						return errBusy
					}
					return nil
				}), messages("a b c d")...)
				c.wantEndings("b:returned")
				if !errors.Is(c.of("b").err, ErrContention) || runs["b"] != 5 || runs["c"] != 1 {
					e.Errorf("runs %v: %v", runs, c.of("b").err)
				}
				e.wantApplied("a c d")
				if got := e.m.Report().Contention; got != 5 {
					e.Errorf("contention %d times", got)
				}
			})
		})
	}
}

// What met contention in its handler runs alone from then on, though others wait with it: perhaps they hold what it needs.
func TestContentionInAHandlerIsTriedAlone(t *testing.T) {
	bubble(t, nil, func(e *env) {
		h := e.marking(func(msg *message.Message) error {
			tx, _ := TxFrom[*fakeTx](msg.Context())
			if msg.UUID == "b" && len(tx.fresh) > 1 {
				return errBusy
			}
			return nil
		})
		c := &crowd{e: e}
		open := e.holdLanes()
		c.enter(h, messages("a b c d")...)
		c.enter(e.marking(func(*message.Message) error { time.Sleep(time.Second); return nil }), messages("slow")...)
		open()
		synctest.Wait()
		c.enter(h, messages("e f")...) // behind the slow one, as the one that tries again
		c.wait()
		c.wantEndings()
		e.wantBatches(4, 1, 1, 2)
		e.wantCounts(map[string]uint64{"Handled": 7, "Contention": 1})
	})
}

// Where no handler ran, an error of COMMIT is nobody's failed attempt.
func TestCommitFailsWithoutAHandler(t *testing.T) {
	bubble(t, func(c *Config, s *fakeStore) {
		withEverything(c, nil)
		c.Outputs = nil
		s.onCommit = func(int) commitFault { return commitFault{err: errSQL} }
	}, func(e *env) {
		msg, _ := withDelivery(deliver("refused", "p"))
		if _, err := e.marking(nil)(msg); !errors.Is(err, errSQL) || IsFailure(err) {
			e.Errorf("got %v", err)
		}
		e.wantCounts(map[string]uint64{"Returned": 1})
	})
}

// A batch that waited while somebody found the database away does not try the same again: one message at a time probes.
func TestAPendingBatchHeedsTheGate(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) {
		back := time.Now().Add(400 * time.Millisecond)
		s.onBegin = func(int) error {
			if time.Now().Before(back) {
				return errGone
			}
			return nil
		}
	}, func(e *env) {
		c := &crowd{e: e}
		open := e.holdLanes()
		c.enter(e.marking(nil), numbered(20)...)
		e.m.databaseAway(errGone)
		open()
		synctest.Wait()
		if got := e.store.count("begin"); got != 0 {
			e.Errorf("%d transactions were tried at once", got)
		}
		time.Sleep(350 * time.Millisecond)
		if got := e.store.count("begin"); got == 0 || got > 4 {
			e.Errorf("%d transactions were tried meanwhile", got)
		}
		c.wait()
		c.wantEndings()
	})
}

// What contention makes run again waits without the lane: others go on during the pause.
func TestOthersGoOnDuringThePause(t *testing.T) {
	bubble(t, nil, func(e *env) {
		other := e.marking(nil)
		c := &crowd{e: e}
		open := e.holdLanes()
		c.enter(e.marking(failingTimes("a", 6, func() error { return errBusy })), messages("a b c")...)
		c.enter(other, messages("x")...)
		open()
		c.wait()
		c.wantEndings()
		if c.of("a").took == 0 || c.of("b").took != 0 || c.of("x").took != 0 {
			e.Errorf("they took %v, %v and %v", c.of("a").took, c.of("b").took, c.of("x").took)
		}
	})
}

// Claims that came to nothing are given up before the others commit: nothing is said to be done that is not.
func TestUnclaimedMessagesComeAgainFresh(t *testing.T) {
	for _, parts := range []bool{true, false} {
		bubble(t, func(_ *Config, s *fakeStore) { s.info.Parts = parts }, func(e *env) {
			times := 1
			if !parts {
				times = 2 // once more, alone
			}
			h := e.marking(failingTimes("b", times, func() error { return errHandler }))
			c := e.share(h, messages("a b c")...)
			c.wantEndings("b:failed")
			e.wantApplied("a c")
			open := e.holdLanes()
			c.enter(h, messages("a b c")...)
			open()
			c.wait()
			e.wantApplied("a b c")
			e.wantCounts(map[string]uint64{"Handled": 3, "Replayed": 2, "Failed": 1})
		})
	}
}

// Contention in a handler that has ended the transaction, as a deadlock does on MySQL, leaves nothing to undo. It is contention
// all the same, of all: counted, tried again after a pause, and not for ever.
func TestContentionThatEndsTheTransaction(t *testing.T) {
	for _, tt := range []struct {
		busy int
		ends string
	}{{3, "done"}, {1000, "returned"}} {
		bubble(t, func(c *Config, s *fakeStore) {
			c.ContentionRetries = 4
			s.onUndo = func(int) error { return receipts.ErrTxEnded }
		}, func(e *env) {
			runs := 0
			start := time.Now()
			c := e.share(e.marking(only("b", func(*message.Message) error {
				if runs++; runs <= tt.busy {
					return errBusy
				}
				return nil
			})), messages("a b c")...)
			c.wantEndings("b:" + tt.ends)
			if runs > 10 || e.m.Report().Contention < 3 || time.Since(start) < 10*time.Millisecond {
				e.Errorf("%d runs in %v, contention %d times", runs, time.Since(start), e.m.Report().Contention)
			}
		})
	}
}
