package idempotency

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// T15: contention is tried again in a fresh transaction, wherever it shows.

func TestContention(t *testing.T) {
	tests := []struct {
		name  string
		fault func(s *fakeStore)
	}{
		{"begin", func(s *fakeStore) { s.onBegin = times(3, errBusy) }},
		{"claim", func(s *fakeStore) { s.onClaim = times(3, errBusy) }},
		{"commit", func(s *fakeStore) {
			s.onCommit = func(n int) commitFault {
				if n <= 3 {
					return commitFault{err: errBusy}
				}
				return commitFault{}
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(_ *Config, s *fakeStore) { tt.fault(s) }, func(e *env) {
				if _, err := e.counting()(deliver("u-1", "p")); err != nil {
					e.Fatal(err)
				}
				e.wantEffect(1)
				e.wantCounts(map[string]uint64{"Handled": 1, "Contention": 3})
			})
		})
	}
	for _, wrap := range []func(error) error{
		func(err error) error { return err },
		func(err error) error { return fmt.Errorf("update account: %w", err) },
		func(err error) error { return errors.Join(errHandler, err) },
		Permanent,
		func(err error) error { return RetryAfter(err, time.Hour) },
	} {
		t.Run("handler: "+wrap(errBusy).Error(), func(t *testing.T) {
			bubble(t, nil, func(e *env) {
				runs := 0
				h := e.acting(func(*message.Message) error {
					if runs++; runs <= 3 {
						return wrap(errBusy)
					}
					return nil
				})
				if _, err := h(deliver("u-1", "p")); err != nil {
					e.Fatal(err)
				}
				e.wantEffect(1)
				e.wantCounts(map[string]uint64{"Handled": 1, "Contention": 3})
				if len(e.store.letters) != 0 {
					e.Error("diverted")
				}
			})
		})
	}
}

// T05: the same identity is open in another process: that is contention, not an outage.

func TestClaimedElsewhere(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.heldElsewhere = 2 }, func(e *env) {
		if _, err := e.counting()(deliver("u-1", "p")); err != nil {
			e.Error(err)
		}
		e.wantEffect(1)
		e.wantCounts(map[string]uint64{"Handled": 1, "Contention": 2})
	})
	bubble(t, func(_ *Config, s *fakeStore) { s.heldElsewhere = 1 }, func(e *env) {
		msg, cancel := withCancel(deliver("u-1", "p"))
		time.AfterFunc(time.Second, cancel)
		if _, err := e.counting()(msg); !errors.Is(err, context.Canceled) || IsFailure(err) {
			e.Errorf("got %v", err)
		}
		e.wantEffect(0)
	})
}

func TestContentionWithoutEnd(t *testing.T) {
	bubble(t, func(c *Config, s *fakeStore) {
		c.ContentionRetries = 2
		s.onClaim = func(int) error { return errBusy }
	}, func(e *env) {
		_, err := e.counting()(deliver("u-1", "p"))
		if !errors.Is(err, ErrContention) || !errors.Is(err, errBusy) || IsFailure(err) {
			e.Errorf("got %v", err)
		}
		e.wantEffect(0)
		e.wantCounts(map[string]uint64{"Contention": 3, "Returned": 1})
	})
}

// A handler that meets contention although its transaction is the only writer is probably in its own way.
func TestContentionInsideTheHandler(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.ContentionRetries = 1 }, func(e *env) {
		_, err := e.acting(func(*message.Message) error { return errBusy })(deliver("u-1", "p"))
		if !errors.Is(err, ErrContention) || !errors.Is(err, errBusy) || !strings.Contains(err.Error(), "another handle") {
			e.Errorf("got %v", err)
		}
		if n := len(e.log.Captured()[watermill.ErrorLogLevel]); n != 1 { // at the first, not after all tries
			e.Errorf("%d error lines", n)
		}
	})
}

// A handler that ends its transaction and then gives up leaves a torn receipt; why it gave up is not lost with it.
func TestPermanentAfterTheHandlerCommitted(t *testing.T) {
	e := newEnv(t, nil)
	h := e.acting(func(msg *message.Message) error {
		tx, _ := TxFrom[*fakeTx](msg.Context())
		tx.commitByHand()
		return Permanent(errHandler)
	})
	if _, err := h(deliver("u-1", "p")); err != nil {
		t.Fatal(err)
	}
	if len(e.store.letters) != 1 || e.store.letters[0].Kind != receipts.KindTorn ||
		!strings.Contains(e.store.letters[0].Reason, errHandler.Error()) {
		t.Errorf("dead letters %+v", e.store.letters)
	}
}

// T21: while one message waits for its next try, the lane is free for others.
func TestLaneIsFreeWhileWaiting(t *testing.T) {
	waits := map[string]struct {
		err error
		cfg func(*Config, *fakeStore)
	}{
		"contention": {err: errBusy},
		"failure":    {err: errHandler},
		"RetryAfter": {err: RetryAfter(errHandler, time.Hour), cfg: func(c *Config, _ *fakeStore) { c.RetryBackoff.Min = time.Second }},
	}
	for name, tt := range waits {
		t.Run(name, func(t *testing.T) {
			bubble(t, tt.cfg, func(e *env) {
				ctx, cancel := withCancel(deliver("bad", "p"))
				go func() { _, _ = e.acting(func(*message.Message) error { return tt.err })(ctx) }()
				synctest.Wait()
				if e.store.openNow() != 0 || e.m.Report().Health.LanesBusy != 0 {
					e.Error("a transaction or lane is held while waiting")
				}
				start := time.Now()
				if _, err := e.counting()(deliver("good", "p")); err != nil {
					e.Error(err)
				}
				if time.Since(start) != 0 {
					e.Errorf("the neighbour waited for %v", time.Since(start))
				}
				cancel()
				synctest.Wait()
				e.wantEffect(1)
			})
		})
	}
}

// T04: the answer to COMMIT is lost.

func TestUnknownCommit(t *testing.T) {
	lost := func(apply bool) func(int) commitFault {
		return func(n int) commitFault { return commitFault{lost: n == 1, apply: apply} }
	}
	tests := []struct {
		name   string
		fault  func(s *fakeStore)
		effect int
		counts map[string]uint64
		err    error
	}{
		{
			"it committed", func(s *fakeStore) { s.onCommit = lost(true) }, 1,
			map[string]uint64{"Handled": 1, "UnknownCommits": 1},
			nil,
		},
		{
			"it did not", func(s *fakeStore) { s.onCommit = lost(false) }, 1,
			map[string]uint64{"Handled": 1, "UnknownCommits": 1, "Contention": 1},
			nil,
		},
		{
			"it committed, told late", func(s *fakeStore) { s.onCommit, s.onResolve = lost(true), times(3, errGone) }, 1,
			map[string]uint64{"Handled": 1, "UnknownCommits": 1},
			nil,
		},
		{
			"undecided though committed", func(s *fakeStore) { s.onCommit, s.onResolve = lost(true), func(int) error { return errGone } }, 1,
			map[string]uint64{"Returned": 1, "UnknownCommits": 1, "Outages": 1},
			ErrUndecided,
		},
		{
			"undecided and not committed", func(s *fakeStore) { s.onCommit, s.onResolve = lost(false), func(int) error { return errSQL } }, 0,
			map[string]uint64{"Returned": 1, "UnknownCommits": 1},
			ErrUndecided,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(_ *Config, s *fakeStore) { tt.fault(s) }, func(e *env) {
				msg, cancel := withCancel(deliver("u-1", "p"))
				start := time.Now()
				_, err := e.acting(func(*message.Message) error { cancel(); return nil })(msg) // asking goes on though the message is cancelled
				if tt.name == "it did not" {
					if !errors.Is(err, context.Canceled) {
						e.Errorf("got %v", err)
					}
					_, err = e.counting()(deliver("u-1", "p"))
					tt.counts["Returned"] = 1
				}
				if !errors.Is(err, tt.err) || IsFailure(err) || (err == nil) != (tt.err == nil) {
					e.Errorf("got %v", err)
				}
				if d := time.Since(start); d > defaultTxBudget+time.Second {
					e.Errorf("it took %v", d)
				}
				e.wantEffect(tt.effect)
				e.wantCounts(tt.counts)
			})
		})
	}
}

// After "undecided" the redelivery tells: one effect in the end, whatever happened.

func TestUndecidedIsDecidedByTheRedelivery(t *testing.T) {
	for _, committed := range []bool{true, false} {
		bubble(t, func(_ *Config, s *fakeStore) {
			s.onCommit = func(n int) commitFault { return commitFault{lost: n == 1, apply: committed} }
			s.onResolve = func(int) error { return errSQL }
		}, func(e *env) {
			if _, err := e.counting()(deliver("u-1", "p")); !errors.Is(err, ErrUndecided) {
				e.Fatalf("got %v", err)
			}
			if _, err := e.counting()(deliver("u-1", "p")); err != nil {
				e.Fatal(err)
			}
			e.wantEffect(1)
		})
	}
}

// A lane is not held while the database is asked about a COMMIT.

func TestResolvingHoldsNoLane(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) {
		s.onCommit = func(n int) commitFault { return commitFault{lost: n == 1, apply: true} }
		s.onResolve = times(2, errSQL)
	}, func(e *env) {
		go func() { _, _ = e.counting()(deliver("u-1", "p")) }()
		synctest.Wait()
		start := time.Now()
		if _, err := e.counting()(deliver("u-2", "p")); err != nil || time.Since(start) != 0 {
			e.Errorf("%v after %v", err, time.Since(start))
		}
		time.Sleep(time.Minute)
		e.wantEffect(2)
	})
}

// T26: the database goes away under load, and comes back.

func TestOtherErrorsOfTheStore(t *testing.T) {
	tests := []struct {
		name    string
		fault   func(s *fakeStore)
		failure bool
	}{
		{"begin", func(s *fakeStore) { s.onBegin = func(int) error { return receipts.ErrSchemaMissing } }, false},
		{"claim", func(s *fakeStore) { s.onClaim = func(int) error { return errSQL } }, false},
		{"commit", func(s *fakeStore) {
			s.onCommit = func(int) commitFault { return commitFault{err: receipts.ErrTxEnded} }
		}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(_ *Config, s *fakeStore) { tt.fault(s) }, func(e *env) {
				start := time.Now()
				_, err := e.counting()(deliver("u-1", "p"))
				if err == nil || IsFailure(err) != tt.failure || time.Since(start) < 100*time.Millisecond {
					e.Errorf("got %v after %v", err, time.Since(start))
				}
				e.wantEffect(0)
			})
		})
	}
}

// T17 in part: Permanent diverts at once, receipt and dead letter together.

func TestPermanent(t *testing.T) {
	bubble(t, nil, func(e *env) {
		runs := 0
		h := e.acting(func(*message.Message) error { runs++; return fmt.Errorf("charge: %w", Permanent(errHandler)) })
		for range 3 {
			if _, err := h(deliver("u-1", "p")); err != nil {
				e.Fatal(err)
			}
		}
		if _, err := h(deliver("u-1", "q")); err != nil {
			e.Fatal(err)
		}
		if runs != 1 {
			e.Errorf("the handler ran %d times", runs)
		}
		e.wantEffect(0)
		e.wantCounts(map[string]uint64{"Diverted": 1, "Replayed": 2, "Conflicted": 1})
		l := e.store.letters[0]
		if len(e.store.letters) != 2 || l.Kind != receipts.KindPermanent || string(l.Key) != "u-1" || !strings.Contains(l.Reason, errHandler.Error()) {
			e.Errorf("dead letters %+v", e.store.letters)
		}
		for _, r := range e.store.receipts {
			if r.State != receipts.StateDiverted || !e.store.markers[r.Nonce] {
				e.Errorf("receipt %+v", r)
			}
		}
	})
}

func TestPermanentWhoseDivertingFails(t *testing.T) {
	tests := []struct {
		name   string
		fault  func(s *fakeStore)
		err    error
		counts map[string]uint64
	}{
		{"error", func(s *fakeStore) { s.onDivert = func(int) error { return errSQL } }, errSQL, map[string]uint64{"Returned": 1}},
		{"contention", func(s *fakeStore) { s.onDivert = times(2, errBusy) }, nil, map[string]uint64{"Diverted": 1, "Contention": 2}},
		{"unknown, committed", func(s *fakeStore) {
			s.onCommit = func(int) commitFault { return commitFault{lost: true, apply: true} }
		}, nil, map[string]uint64{"Diverted": 1, "UnknownCommits": 1}},
		{"unknown, not committed", func(s *fakeStore) {
			s.onCommit = func(n int) commitFault { return commitFault{lost: n == 1} }
		}, nil, map[string]uint64{"Diverted": 1, "UnknownCommits": 1, "Contention": 1}},
		{"done by another process meanwhile", func(s *fakeStore) {
			s.onClaim = func(n int) error {
				if n == 2 {
					s.mu.Lock()
					defer s.mu.Unlock()
					nonce := receipts.NewNonce()
					p := pending[*fakeTx]{msg: deliver("u-1", "p")}
					_ = (&Middleware[*fakeTx]{}).takeFingerprint(&p)
					s.receipts[receiptKey("7:billing6:charge6:orders", []byte("u-1"))] = receipts.Receipt{Fingerprint: p.fingerprint, Nonce: nonce, State: receipts.StateDone}
					s.markers[nonce] = true
				}
				return nil
			}
		}, nil, map[string]uint64{"Replayed": 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(_ *Config, s *fakeStore) { tt.fault(s) }, func(e *env) {
				msg, _ := withDelivery(deliver("u-1", "p"))
				_, err := e.acting(func(*message.Message) error { return Permanent(errHandler) })(msg)
				if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) || IsFailure(err) {
					e.Errorf("got %v", err)
				}
				e.wantEffect(0)
				e.wantCounts(tt.counts)
				if err != nil && len(e.store.receipts)+len(e.store.letters) != 0 {
					e.Error("a receipt or dead letter without the other")
				}
			})
		})
	}
}

// Dead letters without receipt are stored again where the answer to COMMIT is lost: that adds no row.

func TestUnknownCommitOfADeadLetter(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) {
		s.onCommit = func(n int) commitFault { return commitFault{lost: n == 1, apply: true} }
	}, func(e *env) {
		if _, err := e.counting()(deliver("", "p")); err != nil {
			e.Error(err)
		}
		if len(e.store.letters) != 1 || e.store.count("resolve") != 0 {
			e.Errorf("%d dead letters, %d times asked", len(e.store.letters), e.store.count("resolve"))
		}
		e.wantCounts(map[string]uint64{"Refused": 1, "UnknownCommits": 1, "Contention": 1})
	})
}
