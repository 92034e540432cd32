package idempotency

import (
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func guaranteed(g Guarantee, more func(*Config, *fakeStore)) func(*Config, *fakeStore) {
	return func(c *Config, s *fakeStore) {
		c.Guarantee = g
		if more != nil {
			more(c, s)
		}
	}
}

// T32 as far as one process can show it: what a redelivery does after each ending of the first delivery.
func TestGuarantees(t *testing.T) {
	ok := func(*message.Message) error { return nil }
	bad := func(*message.Message) error { return errHandler }
	tests := []struct {
		name   string
		mode   Guarantee
		fault  func(*Config, *fakeStore)
		first  func(*message.Message) error
		err    error // of the first delivery
		effect int   // after the first delivery and a good redelivery
	}{
		{"at most once, good", AtMostOnce, nil, ok, nil, 1},
		{"at most once, failing", AtMostOnce, nil, bad, errHandler, 0},
		{"at most once, claim unknown but committed", AtMostOnce, commitLost(1, true), ok, nil, 1},
		{"at most once, claim unknown and not committed", AtMostOnce, commitLost(1, false), ok, nil, 1},
		{"at most once, claim undecided", AtMostOnce, func(c *Config, s *fakeStore) {
			commitLost(1, true)(c, s)
			s.onResolve = func(int) error { return errSQL }
		}, ok, ErrUndecided, 0},
		{"at most once, effect unknown but committed", AtMostOnce, commitLost(2, true), ok, ErrUndecided, 1},
		{"at most once, effect unknown and not committed", AtMostOnce, commitLost(2, false), ok, ErrUndecided, 0},
		{"at most once, contention around the effect", AtMostOnce, func(_ *Config, s *fakeStore) {
			s.onCommit = func(n int) commitFault {
				if n == 2 || n == 3 {
					return commitFault{err: errBusy}
				}
				return commitFault{}
			}
		}, ok, nil, 1},
		{"at least once, good", AtLeastOnce, nil, ok, nil, 2},
		{"at least once, failing", AtLeastOnce, nil, bad, errHandler, 1},
		{"at least once, unknown but committed", AtLeastOnce, commitLost(1, true), ok, ErrUndecided, 2},
		{"at least once, unknown and not committed", AtLeastOnce, commitLost(1, false), ok, ErrUndecided, 1},
		{"effectively once, good", EffectivelyOnce, nil, ok, nil, 1},
		{"effectively once, failing", EffectivelyOnce, nil, bad, errHandler, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, guaranteed(tt.mode, tt.fault), func(e *env) {
				_, err := e.acting(tt.first)(deliver("u-1", "p"))
				if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) {
					e.Errorf("first delivery: %v", err)
				}
				if IsFailure(err) != errors.Is(tt.err, errHandler) {
					e.Errorf("failure: %v", IsFailure(err))
				}
				if _, err := e.acting(ok)(deliver("u-1", "p")); err != nil {
					e.Errorf("redelivery: %v", err)
				}
				e.wantEffect(tt.effect)
				if n := len(e.store.receipts); (n == 0) != (tt.mode == AtLeastOnce) {
					e.Errorf("%d receipts", n)
				}
			})
		})
	}
}

func commitLost(call int, apply bool) func(*Config, *fakeStore) {
	return func(_ *Config, s *fakeStore) {
		s.onCommit = func(n int) commitFault { return commitFault{lost: n == call, apply: apply} }
	}
}

// Each stage of a message has its own patience with contention.
func TestContentionIsCountedByStage(t *testing.T) {
	bubble(t, guaranteed(AtMostOnce, func(c *Config, s *fakeStore) {
		c.ContentionRetries = 2
		s.onClaim = times(2, errBusy)
		s.onCommit = func(n int) commitFault {
			if n == 2 || n == 3 { // of the effect
				return commitFault{err: errBusy}
			}
			return commitFault{}
		}
		s.onDivert = times(2, errBusy)
	}), func(e *env) {
		if _, err := e.counting()(deliver("u-1", "p")); err != nil {
			e.Error(err)
		}
		e.wantEffect(1)
		e.store.onClaim = nil
		runs := 0
		_, err := e.acting(func(*message.Message) error {
			if runs++; runs <= 2 {
				return errBusy
			}
			return Permanent(errHandler)
		})(deliver("u-2", "p"))
		if err != nil {
			e.Error(err)
		}
		e.wantCounts(map[string]uint64{"Handled": 1, "Diverted": 1, "Contention": 8})
	})
}

// The claim is durable before the handler starts.
func TestAtMostOnceClaimsAhead(t *testing.T) {
	e := newEnv(t, guaranteed(AtMostOnce, nil))
	h := e.acting(func(*message.Message) error {
		if len(e.store.receipts) != 1 || len(e.store.markers) != 1 {
			t.Error("the receipt is not committed yet")
		}
		return nil
	})
	if _, err := h(deliver("u-1", "p")); err != nil {
		t.Fatal(err)
	}
	if _, err := h(deliver("u-1", "q")); err != nil {
		t.Fatal(err)
	}
	e.wantEffect(1)
	e.wantCounts(map[string]uint64{"Handled": 1, "Conflicted": 1})
}

func TestPermanentUnderTheOtherGuarantees(t *testing.T) {
	for mode, state := range map[Guarantee]int{AtMostOnce: 1, AtLeastOnce: 0} {
		bubble(t, guaranteed(mode, func(_ *Config, s *fakeStore) {
			s.onDivert = times(1, errBusy)
			s.onResolve = func(int) error { return errSQL } // nobody needs to ask: storing a dead letter twice is storing it once
			last := 1
			if mode == AtMostOnce {
				last = 2
			}
			s.onCommit = func(n int) commitFault { return commitFault{lost: n == last, apply: true} }
		}), func(e *env) {
			h := e.acting(func(*message.Message) error { return Permanent(errHandler) })
			for range 2 {
				if _, err := h(deliver("u-1", "p")); err != nil {
					e.Errorf("mode %d: %v", mode, err)
				}
			}
			if len(e.store.letters) != 1 || e.store.letters[0].Kind != receipts.KindPermanent || len(e.store.receipts) != state {
				e.Errorf("mode %d: %d dead letters, %d receipts", mode, len(e.store.letters), len(e.store.receipts))
			}
			e.wantEffect(0)
		})
	}
}

func TestOutputsAtLeastOnceGetFreshIds(t *testing.T) {
	pub := &recording{}
	e := newEnv(t, guaranteed(AtLeastOnce, withOutputs(pub)))
	h := e.shipping(message.NewMessage("", nil), message.NewMessage("mine", nil))
	for range 2 {
		if _, err := h(order("u-1")); err != nil {
			t.Fatal(err)
		}
	}
	got := pub.all()
	if len(got) != 4 || got[0].uuid == got[2].uuid || got[1].uuid != "mine" || got[3].uuid != "mine" {
		t.Errorf("published %v", got)
	}
	e.wantCounts(map[string]uint64{"Handled": 2, "OutputsSent": 4})
}

func TestOutputsAtMostOnce(t *testing.T) {
	pub := &recording{hook: func(string, []*message.Message) error { return errBroker }}
	e := newEnv(t, guaranteed(AtMostOnce, withOutputs(pub)))
	h := e.shipping(message.NewMessage("o-1", nil))
	_, _ = h(order("u-1"))
	pub.hook = nil
	if _, err := h(order("u-1")); err != nil {
		t.Fatal(err)
	}
	if got := pub.all(); len(got) != 1 {
		t.Errorf("published %v", got)
	}
	e.wantEffect(1)
}
