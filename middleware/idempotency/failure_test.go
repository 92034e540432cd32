package idempotency

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
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
func TestOutagePausesAndResumes(t *testing.T) {
	places := map[string]func(s *fakeStore, fault func(int) error){
		"begin": func(s *fakeStore, fault func(int) error) { s.onBegin = fault },
		"claim": func(s *fakeStore, fault func(int) error) { s.onClaim = fault },
		"commit": func(s *fakeStore, fault func(int) error) {
			s.onCommit = func(n int) commitFault { return commitFault{err: fault(n)} }
		},
	}
	for name, place := range places {
		t.Run(name, func(t *testing.T) {
			bubble(t, nil, func(e *env) {
				var mu sync.Mutex
				away := true
				gone := func() bool {
					mu.Lock()
					defer mu.Unlock()
					return away
				}
				place(e.store, func(int) error {
					if !gone() {
						return nil
					}
					time.Sleep(10 * time.Millisecond) // so that the others queue for the lane
					return errGone
				})
				h := e.counting()
				start := time.Now()
				var wg sync.WaitGroup
				errs := make([]error, 50)
				infos := make([]*sdk.DeliveryInfo, 50)
				for i := range errs {
					wg.Go(func() {
						msg, info := withDelivery(deliver(fmt.Sprint(i), "p"))
						infos[i] = info
						_, errs[i] = h(msg)
					})
				}
				time.Sleep(20 * time.Millisecond)
				if r := e.m.Report(); !r.Health.Paused || r.Health.PausedSince.Before(start) || !strings.Contains(r.Health.Reason, errGone.Error()) {
					e.Errorf("health %+v", r.Health)
				}
				wg.Wait()
				if d := time.Since(start); d > patience+time.Second {
					e.Errorf("the messages waited for %v", d)
				}
				for i, err := range errs {
					if !errors.Is(err, ErrDatabaseAway) || IsFailure(err) {
						e.Errorf("message %d: %v", i, err)
					}
					if requeueDelay(infos[i]) < time.Second {
						e.Errorf("message %d is requeued after %v", i, requeueDelay(infos[i]))
					}
				}
				if tries := e.store.count("begin"); tries < 2 || tries > 15 {
					e.Errorf("%d transactions were tried: one message at a time should probe", tries)
				}
				e.wantEffect(0)
				e.wantCounts(map[string]uint64{"Returned": 50, "Outages": 1})

				mu.Lock()
				away = false
				mu.Unlock()
				time.Sleep(time.Minute) // nobody comes: nothing probes
				for i := range errs {
					wg.Go(func() {
						if _, err := h(deliver(fmt.Sprint(i), "p")); err != nil {
							e.Error(err)
						}
					})
				}
				wg.Wait()
				e.wantEffect(50)
				e.wantCounts(map[string]uint64{"Handled": 50, "Returned": 50, "Outages": 1})
				if e.m.Report().Health.Paused || len(e.store.letters) != 0 {
					e.Error("still paused, or diverted")
				}
			})
		})
	}
}

func TestShortOutageIsNotSeenOutside(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.onBegin = times(3, errGone) }, func(e *env) {
		h := e.counting()
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				if _, err := h(deliver(fmt.Sprint(i), "p")); err != nil {
					e.Error(err)
				}
			})
		}
		wg.Wait()
		e.wantEffect(20)
		e.wantCounts(map[string]uint64{"Handled": 20, "Outages": 1})
	})
}

func TestOutageInsideTheHandlerDivertsNothing(t *testing.T) {
	bubble(t, nil, func(e *env) {
		_, err := e.acting(func(*message.Message) error { return Permanent(errGone) })(deliver("u-1", "p"))
		if !errors.Is(err, ErrDatabaseAway) || !errors.Is(err, errGone) && IsFailure(err) {
			e.Errorf("got %v", err)
		}
		e.wantCounts(map[string]uint64{"Returned": 1, "Outages": 1})
	})
}

func TestOutageOfOneHandlersOwnDatabaseStopsNobodyForLong(t *testing.T) {
	bubble(t, nil, func(e *env) {
		bad := e.acting(func(*message.Message) error { return errGone })
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					start := time.Now()
					if _, err := bad(deliver("bad", "p")); !errors.Is(err, ErrDatabaseAway) || time.Since(start) > patience+time.Second {
						e.Errorf("%v after %v", err, time.Since(start))
					}
				}
			}
		})
		for i := range 20 {
			for {
				if _, err := e.counting()(deliver(fmt.Sprint(i), "p")); err == nil {
					break
				}
			}
			time.Sleep(300 * time.Millisecond)
		}
		close(stop)
		wg.Wait()
		e.wantEffect(20)
	})
}

func TestCancelledWhileTheDatabaseIsAway(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.onBegin = func(int) error { return errGone } }, func(e *env) {
		msg, cancel := withCancel(deliver("u-1", "p"))
		start := time.Now()
		time.AfterFunc(time.Second, cancel)
		_, err := e.counting()(msg)
		if !errors.Is(err, context.Canceled) || IsFailure(err) || time.Since(start) > time.Second {
			e.Errorf("got %v after %v", err, time.Since(start))
		}
	})
}

func TestExhaustedPoolIsAnOutage(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.TxBudget = time.Second }, func(e *env) {
		e.store.writer <- struct{}{} // somebody else has the only connection
		_, err := e.counting()(deliver("u-1", "p"))
		if !errors.Is(err, ErrDatabaseAway) || IsFailure(err) || !e.m.Report().Health.Paused {
			e.Errorf("got %v", err)
		}
		<-e.store.writer
		if _, err := e.counting()(deliver("u-1", "p")); err != nil {
			e.Error(err)
		}
		e.wantEffect(1)
	})
}

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

func TestHoldingForeignFailures(t *testing.T) {
	backoff := sdk.Backoff{Min: time.Second, Max: 8 * time.Second}
	bubble(t, func(c *Config, _ *fakeStore) { c.RetryBackoff = backoff }, func(e *env) {
		h := e.acting(func(*message.Message) error { return errHandler })
		took := func(msg *message.Message) time.Duration {
			start := time.Now()
			_, _ = h(msg)
			return time.Since(start)
		}
		for n := 1; n <= 6; n++ {
			if d := took(deliver("u-1", "p")); d < backoff.Min || d > backoff.Ceiling(n) {
				e.Errorf("failure %d was held for %v", n, d)
			}
		}
		if d := took(deliver("u-2", "p")); d > backoff.Ceiling(1) {
			e.Errorf("another identity was held for %v", d)
		}

		msg := deliver("u-3", "p")
		_ = took(msg)
		if d := took(msg); d != 0 {
			e.Errorf("an outer Retry of the same delivery was slowed by %v", d)
		}

		if _, err := e.counting()(deliver("u-1", "p")); err != nil {
			e.Fatal(err)
		}
		if n, _ := e.m.failures.note((&pending[*fakeTx]{scope: "x", msg: msg}).hash(e.m.seed), msg); n != 1 {
			e.Errorf("count %d", n)
		}
		if got := len(e.m.failures.entries); got != 3 { // u-2, u-3 and the one just noted
			e.Errorf("%d identities are remembered as failing", got)
		}
	})
}

func TestHoldingEndsWithTheContext(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.RetryBackoff.Min = time.Hour }, func(e *env) {
		msg, cancel := withCancel(deliver("u-1", "p"))
		time.AfterFunc(time.Second, cancel)
		start := time.Now()
		_, err := e.acting(func(*message.Message) error { return errHandler })(msg)
		if !errors.Is(err, errHandler) || !IsFailure(err) || time.Since(start) != time.Second {
			e.Errorf("got %v after %v", err, time.Since(start))
		}
	})
}

func TestRetryAfter(t *testing.T) {
	h := func(e *env) message.HandlerFunc {
		return e.acting(func(*message.Message) error { return fmt.Errorf("limited: %w", RetryAfter(errHandler, time.Minute)) })
	}
	t.Run("foreign", func(t *testing.T) {
		bubble(t, nil, func(e *env) {
			for range 2 {
				start := time.Now()
				_, err := h(e)(deliver("u-1", "p"))
				if !errors.Is(err, errHandler) || !IsFailure(err) || time.Since(start) != time.Minute {
					e.Errorf("got %v after %v", err, time.Since(start))
				}
			}
		})
	})
	t.Run("foreign with a known lease", func(t *testing.T) {
		bubble(t, func(c *Config, _ *fakeStore) { c.Limits.Lease = 30 * time.Second }, func(e *env) {
			start := time.Now()
			_, _ = h(e)(deliver("u-1", "p"))
			if d := time.Since(start); d != 15*time.Second {
				e.Errorf("held for %v", d)
			}
		})
	})
	t.Run("sdk", func(t *testing.T) {
		bubble(t, nil, func(e *env) {
			msg, info := withDelivery(deliver("u-1", "p"))
			start := time.Now()
			_, err := h(e)(msg)
			if !IsFailure(err) || time.Since(start) != 0 || requeueDelay(info) != time.Minute {
				e.Errorf("got %v after %v, requeued after %v", err, time.Since(start), requeueDelay(info))
			}
		})
	})
}

func TestSdkFailuresAreLeftToTheEngine(t *testing.T) {
	bubble(t, nil, func(e *env) {
		msg, info := withDelivery(deliver("u-1", "p"))
		start := time.Now()
		_, err := e.acting(func(*message.Message) error { return errHandler })(msg)
		if !errors.Is(err, errHandler) || time.Since(start) != 0 || requeueDelay(info) != 0 {
			e.Errorf("got %v after %v, requeued after %v", err, time.Since(start), requeueDelay(info))
		}
	})
}

func TestFailuresAreCountedByDelivery(t *testing.T) {
	var f failing
	for want := 1; want <= 3; want++ {
		msg := message.NewMessage("", nil)
		for try := range 3 {
			if n, first := f.note(7, msg); n != want || first != (try == 0) {
				t.Errorf("delivery %d, try %d: %d, %v", want, try, n, first)
			}
		}
	}
	f.forget(7)
	if n, first := f.note(7, message.NewMessage("", nil)); n != 1 || !first {
		t.Errorf("after success: %d, %v", n, first)
	}
}

func TestFailingIdentitiesAreBounded(t *testing.T) {
	var f failing
	for i := range 3 * maxFailing {
		f.note(uint64(i), message.NewMessage("", nil))
	}
	if len(f.entries) != maxFailing {
		t.Errorf("%d entries", len(f.entries))
	}
}

func TestIsFailure(t *testing.T) {
	p := pending[*fakeTx]{msg: deliver("u", "p")}
	tests := []struct {
		err  error
		want bool
	}{
		{nil, false},
		{errHandler, true},
		{context.Canceled, false},
		{fmt.Errorf("retry: %w", context.Canceled), false},
		{context.DeadlineExceeded, true},
		{p.failed(context.Canceled, true), true},
		{p.failed(errHandler, false), false},
		{fmt.Errorf("outer: %w", p.failed(errHandler, false)), false},
		{errors.Join(errors.New("poison queue is down"), p.failed(errHandler, true)), true},
	}
	for _, tt := range tests {
		if got := IsFailure(tt.err); got != tt.want {
			t.Errorf("%v: %v", tt.err, got)
		}
	}
	if Permanent(nil) != nil || RetryAfter(nil, time.Second) != nil {
		t.Error("nil is no error")
	}
}
