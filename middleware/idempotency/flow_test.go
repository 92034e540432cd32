package idempotency

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestReplayChangesNothing(t *testing.T) {
	e := newEnv(t, nil)
	h := e.counting()
	for range 3 {
		if _, err := h(deliver("u-1", "p")); err != nil {
			t.Fatal(err)
		}
	}
	e.wantEffect(1)
	e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 2})
	if got := e.store.count("commit"); got != 1 {
		t.Errorf("%d commits: a replay writes nothing", got)
	}
	if e.m.Report().Health.LastCommit.IsZero() {
		t.Error("no last commit")
	}
}

// T09: what keeps receipts apart, and what does not.

func TestWhatSharesAReceipt(t *testing.T) {
	first := deliverTo("charge", "orders", "", "u-1", "p")
	tests := []struct {
		name   string
		second *message.Message
		effect int
	}{
		{"the same", deliverTo("charge", "orders", "", "u-1", "p"), 1},
		{"another handler of the topic", deliverTo("ship", "orders", "", "u-1", "p"), 2},
		{"a pass-through to another topic", deliverTo("charge", "paid", "", "u-1", "p"), 2},
		{"another case", deliverTo("charge", "orders", "", "U-1", "p"), 2},
		{"a trailing blank", deliverTo("charge", "orders", "", "u-1 ", "p"), 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t, nil)
			h := e.counting()
			for _, msg := range []*message.Message{first, tt.second} {
				if _, err := h(msg); err != nil {
					t.Fatal(err)
				}
			}
			e.wantEffect(tt.effect)
		})
	}
}

// T06: same identity, other payload.

func TestConflict(t *testing.T) {
	e := newEnv(t, nil)
	h := e.counting()
	for i, payload := range []string{"p", "q", "q", "r", "p"} {
		if _, err := h(deliver("u-1", payload)); err != nil {
			t.Fatalf("delivery %d: %v", i, err)
		}
	}
	e.wantEffect(1)
	e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 1, "Conflicted": 3})
	if len(e.store.letters) != 2 {
		t.Fatalf("%d dead letters, want one for each payload", len(e.store.letters))
	}
	if l := e.store.letters[0]; l.Kind != receipts.KindConflict || string(l.Key) != "u-1" || string(l.Payload) != "q" {
		t.Errorf("dead letter %+v", l)
	}
}

func TestConflictIsAcknowledgedOnlyAfterItsDeadLetter(t *testing.T) {
	e := newEnv(t, func(_ *Config, s *fakeStore) { s.onDivert = func(int) error { return errSQL } })
	h := e.counting()
	_, _ = h(deliver("u-1", "p"))
	msg, _ := withDelivery(deliver("u-1", "q"))
	if _, err := h(msg); !errors.Is(err, errSQL) || IsFailure(err) {
		t.Errorf("got %v", err)
	}
	e.wantCounts(map[string]uint64{"Handled": 1, "Returned": 1})
}

func TestHeldConflictStaysWithTheBroker(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.Conflict = HoldConflicts }, func(e *env) {
		h := e.counting()
		_, _ = h(deliver("u-1", "p"))
		start := time.Now()
		_, err := h(deliver("u-1", "q"))
		if !errors.Is(err, ErrConflict) || IsFailure(err) {
			e.Errorf("got %v", err)
		}
		if time.Since(start) < 100*time.Millisecond {
			e.Error("a foreign subscriber's message was not held")
		}
		e.wantEffect(1)
		e.wantCounts(map[string]uint64{"Handled": 1, "Conflicted": 1, "Returned": 1})
		if len(e.store.letters) != 0 {
			e.Error("it was diverted")
		}
	})
}

// T30: a torn receipt proves nothing, so its message is diverted and never replayed.

func TestTornReceipt(t *testing.T) {
	e := newEnv(t, nil)
	steal := e.acting(func(msg *message.Message) error {
		tx, _ := TxFrom[*fakeTx](msg.Context())
		tx.commitByHand()
		return nil
	})
	msg, _ := withDelivery(deliver("u-1", "p"))
	if _, err := steal(msg); !errors.Is(err, receipts.ErrTxEnded) || !IsFailure(err) {
		t.Fatalf("a handler that committed: %v", err)
	}
	for range 2 {
		if _, err := e.counting()(deliver("u-1", "p")); err != nil {
			t.Fatal(err)
		}
	}
	e.wantEffect(1)
	e.wantCounts(map[string]uint64{"Failed": 1, "Torn": 2})
	if len(e.store.letters) != 1 || e.store.letters[0].Kind != receipts.KindTorn {
		t.Errorf("dead letters %+v", e.store.letters)
	}
}

// T07, T08: what a handler may do, and what becomes of it.

// A handler that stands still keeps its own goroutine, not the lane of the others.

// T20: shutdown is nobody's failed attempt.

func TestCancelledContext(t *testing.T) {
	tests := []struct {
		name   string
		sdk    bool
		mode   Guarantee
		act    func(ctx context.Context) error
		effect int
	}{
		{"the handler stops", false, EffectivelyOnce, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, 0},
		{"the handler's statement is interrupted", false, EffectivelyOnce, func(ctx context.Context) error { <-ctx.Done(); return errSQL }, 0},
		{"the handler gives up for good", false, EffectivelyOnce, func(ctx context.Context) error { <-ctx.Done(); return Permanent(errSQL) }, 0},
		{"the handler finishes, at least once", false, AtLeastOnce, func(ctx context.Context) error { <-ctx.Done(); return nil }, 1},
		{"the handler finishes", false, EffectivelyOnce, func(ctx context.Context) error { <-ctx.Done(); return nil }, 1},
		{"it finishes a lost delivery", true, EffectivelyOnce, func(ctx context.Context) error { <-ctx.Done(); return nil }, 0},
		{"it finishes a lost delivery, at least once", true, AtLeastOnce, func(ctx context.Context) error { <-ctx.Done(); return nil }, 0},
		{"it finishes a lost delivery, at most once", true, AtMostOnce, func(ctx context.Context) error { <-ctx.Done(); return nil }, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(c *Config, _ *fakeStore) { c.Guarantee = tt.mode }, func(e *env) {
				msg, cancel := withCancel(deliver("u-1", "p"))
				if tt.sdk {
					msg, _ = withDelivery(msg)
				}
				_, err := e.acting(func(msg *message.Message) error {
					cancel()
					return tt.act(msg.Context())
				})(msg)
				e.wantEffect(tt.effect)
				if len(e.store.letters) != 0 {
					e.Error("diverted")
				}
				if tt.effect == 1 {
					if err != nil {
						e.Error(err)
					}
					return
				}
				if !errors.Is(err, context.Canceled) || IsFailure(err) {
					e.Errorf("got %v", err)
				}
				e.wantCounts(map[string]uint64{"Returned": 1})
			})
		})
	}
}

func TestCancelledWhileWaitingForALane(t *testing.T) {
	bubble(t, nil, func(e *env) {
		free := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _ = e.acting(func(*message.Message) error { <-free; return nil })(deliver("slow", "p"))
		})
		synctest.Wait()
		msg, cancel := withCancel(deliver("u-1", "p"))
		wg.Go(func() {
			_, err := e.counting()(msg)
			if !errors.Is(err, context.Canceled) || IsFailure(err) {
				e.Errorf("got %v", err)
			}
		})
		synctest.Wait()
		if h := e.m.Report().Health; h.Pending != 2 || h.LanesBusy != 1 || h.OldestPending.IsZero() {
			e.Errorf("health %+v", h)
		}
		cancel()
		synctest.Wait()
		close(free)
		wg.Wait()
		e.wantEffect(1)
		e.wantCounts(map[string]uint64{"Handled": 1, "Returned": 1})
	})
}

func TestOneTransactionALane(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) {
		s.info.Lanes, s.info.Pool, s.writer = 3, 10, make(chan struct{}, 100)
	}, func(e *env) {
		h := e.acting(func(*message.Message) error { time.Sleep(time.Second); return nil })
		var wg sync.WaitGroup
		for i := range 9 {
			wg.Go(func() { _, _ = h(deliver(string(rune('a'+i)), "p")) })
		}
		wg.Wait()
		e.wantEffect(9)
		if e.store.mostOpen != 3 {
			e.Errorf("%d transactions at a time, want 3", e.store.mostOpen)
		}
	})
}

// T05, in one process.

func TestConcurrentCopies(t *testing.T) {
	e := newEnv(t, func(_ *Config, s *fakeStore) { s.info.Lanes = 1 })
	h := e.counting()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := h(deliver("u-1", "p")); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	e.wantEffect(1)
	e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 19})
}

func TestFingerprints(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) {
		c.Fingerprint = func(msg *message.Message) []byte { return msg.Payload[:min(1, len(msg.Payload))] }
	}, func(e *env) {
		h := e.counting()
		for _, payload := range []string{"a1", "a2", "b1"} {
			if _, err := h(deliver("u-1", payload)); err != nil {
				e.Fatal(err)
			}
		}
		e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 1, "Conflicted": 1})
		if _, err := h(deliver("u-2", "")); err == nil || IsFailure(err) || !strings.Contains(err.Error(), "between 1 and 64") {
			e.Errorf("an empty fingerprint: %v", err)
		}
		e.wantEffect(1)
	})
}

func TestDeliveryWithAShortLease(t *testing.T) {
	e := newEnv(t, nil)
	msg, info := withDelivery(deliver("u-1", "p"))
	info.Limits.Lease = defaultTxBudget
	if _, err := e.counting()(msg); !errors.Is(err, ErrLease) || IsFailure(err) || !strings.Contains(err.Error(), "lower TxBudget or raise") {
		t.Errorf("got %v", err)
	}
	e.wantEffect(0)
	info.Limits.Lease++
	if _, err := e.counting()(msg); err != nil {
		t.Error(err)
	}
	e.wantEffect(1)
}
