package sdk

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var errRejected = &OutcomeError{Kind: OutcomeRejected, Err: errors.New("broker is busy")}

func TestSettleOutcomes(t *testing.T) {
	permanent := &OutcomeError{Kind: OutcomePermanent, Err: errors.New("not yours")}
	entry := func(err error) error { return &BatchError{Entries: map[int]error{0: err}} }
	for name, c := range map[string]struct {
		boundary SettleBoundary
		answers  []error // of the first calls; nil afterwards, and nil for "really settle"
		always   error
		outcome  SettleOutcome
		calls    int
	}{
		"confirmed":             {SettleConfirmed, nil, nil, SettleOutcomeConfirmed, 1},
		"sent":                  {SettleSent, nil, nil, SettleOutcomeSent, 1},
		"undeclared":            {SettleUnknown, nil, nil, SettleOutcomeSent, 1},
		"second try":            {SettleConfirmed, []error{entry(errRejected)}, nil, SettleOutcomeConfirmed, 2},
		"unknown, then settled": {SettleConfirmed, []error{errCut, errCut}, nil, SettleOutcomeConfirmed, 3},
		"stale":                 {SettleConfirmed, nil, entry(ErrStaleToken), SettleOutcomeFailed, 1},
		"permanent":             {SettleConfirmed, nil, entry(permanent), SettleOutcomeFailed, 1},
		"rejected for ever":     {SettleConfirmed, nil, entry(errRejected), SettleOutcomeFailed, settleTries},
		"unknown for ever":      {SettleConfirmed, nil, entry(errCut), SettleOutcomeUnknown, settleTries},
		"ack unsupported once":  {SettleConfirmed, []error{entry(ErrUnsupported)}, nil, SettleOutcomeConfirmed, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(Capabilities{Settle: c.boundary})
				d.onSettle = func(_ context.Context, n int, _ []Settlement) (error, bool) {
					if n <= len(c.answers) {
						return c.answers[n-1], true
					}
					return c.always, c.always != nil
				}
				r := subscribed(t, d, SubscriberConfig{})
				d.putIDs("t", "g", "a")
				msg := r.next()
				msg.Ack()
				<-msg.Context().Done()
				synctest.Wait()
				events := r.rec.of(EventSettled)
				if len(events) != 1 || events[0].Outcome != c.outcome || events[0].Verdict != Ack || events[0].ID != "a" {
					t.Errorf("events %+v, want one %v", events, c.outcome)
				}
				if (events[0].Err == nil) != (c.outcome <= SettleOutcomeSent) {
					t.Errorf("error %v with outcome %v", events[0].Err, c.outcome)
				}
				if n := d.counted("settle"); n != c.calls {
					t.Errorf("%d calls of Settle, want %d", n, c.calls)
				}
				if n := r.sub.InFlight(); n != 0 {
					t.Errorf("the slot is still taken: %d in flight", n)
				}
				r.close()
			})
		})
	}
}

func TestSettlementsAreBatchedWhileTheDriverIsBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		var sizes []int
		d.onSettle = func(_ context.Context, _ int, batch []Settlement) (error, bool) {
			sizes = append(sizes, len(batch))
			time.Sleep(time.Second)
			return nil, false
		}
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", ids(100)...)
		for range 100 {
			r.next().Ack()
			synctest.Wait()
		}
		r.close()
		if len(sizes) != 2 || sizes[0] != 1 || sizes[1] != 99 {
			t.Errorf("batches of %v", sizes)
		}
	})
}

// A broker that accepts and never answers: each call has its deadline, and when the broker wakes up all is settled (F03).
func TestSettleNeverAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		var stalled atomic.Bool
		stalled.Store(true)
		d.onSettle = func(ctx context.Context, _ int, _ []Settlement) (error, bool) {
			if !stalled.Load() {
				return nil, false
			}
			<-ctx.Done()
			return ctx.Err(), true
		}
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a", "b")
		start := time.Now()
		a := r.next()
		a.Ack()
		time.Sleep(15 * time.Second)
		if n := d.counted("settle"); n != 2 {
			t.Errorf("%d calls within 15 s, want 2: each is bounded by 10 s", n)
		}
		b := r.next() // the window is not full: nothing else waits for the stalled call
		stalled.Store(false)
		<-a.Context().Done()
		if took := time.Since(start); took > 25*time.Second {
			t.Errorf("settled after %v", took)
		}
		b.Ack()
		r.close()
		if got := len(d.settlements(Ack)); got != 2 {
			t.Errorf("%d settled", got)
		}
	})
}

// A source that cannot settle at all is given up, so that the broker gets its deliveries back.
func TestASourceThatDoesNotSettleIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSettle = func(_ context.Context, n int, _ []Settlement) (error, bool) { return errCut, n <= settleTries }
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		first := r.next()
		first.Ack()
		second := r.next()
		if mustInfo(t, second).Token == mustInfo(t, first).Token || second.UUID != "a" {
			t.Errorf("came %q %+v", second.UUID, mustInfo(t, second))
		}
		if lost := r.rec.of(EventSourceLost); len(lost) != 1 || !errors.Is(lost[0].Err, errCut) {
			t.Errorf("lost %+v", lost)
		}
		second.Ack()
		r.close()
		if n := d.counted("source close"); n != 2 {
			t.Errorf("%d sources closed, want 2", n)
		}
	})
}

// Single acks that the broker refuses are left to it: their neighbours go on, until half the window is lost that way.
func TestStrandedAcksDoNotDisturbNeighbours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSettle = func(_ context.Context, _ int, batch []Settlement) (error, bool) {
			entries := map[int]error{}
			for i := range batch {
				entries[i] = &OutcomeError{Kind: OutcomePermanent, Err: errCut}
			}
			return &BatchError{Entries: entries}, true
		}
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 6})
		d.putIDs("t", "g", ids(6)...)
		neighbour := r.next()
		for range 2 {
			r.next().Ack()
		}
		time.Sleep(time.Minute)
		if len(r.rec.of(EventSourceLost)) != 0 || neighbour.Context().Err() != nil {
			t.Error("two of six stranded acks ended the source")
		}
		r.next().Ack()
		synctest.Wait()
		if len(r.rec.of(EventSourceLost)) != 1 || !errors.Is(contextCause(neighbour), ErrDeliveryLost) {
			t.Errorf("three of six did not: %v", contextCause(neighbour))
		}
		d.onSettle = nil
		neighbour.Ack()
		r.close()
	})
}

// With a lease the broker takes stranded deliveries back by itself.
func TestStrandedAcksOfALeasingSourceAreLeftToIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(lending())
		d.onSettle = func(context.Context, int, []Settlement) (error, bool) {
			return &BatchError{Entries: map[int]error{0: &OutcomeError{Kind: OutcomePermanent, Err: errCut}}}, true
		}
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 2})
		d.putIDs("t", "g", ids(2)...)
		for range 2 {
			r.next().Ack()
			synctest.Wait()
		}
		time.Sleep(time.Minute)
		if lost := r.rec.of(EventSourceLost); len(lost) != 0 || r.sub.InFlight() != 0 {
			t.Errorf("lost %+v, %d in flight", lost, r.sub.InFlight())
		}
		r.close()
	})
}

func TestSettlementOfALostSourceIsReportedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSettle = func(ctx context.Context, n int, _ []Settlement) (error, bool) {
			if n == 1 {
				<-ctx.Done() // until the source is lost
				return nil, true
			}
			return nil, false
		}
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a", "b")
		a, b := r.next(), r.next()
		a.Ack()
		synctest.Wait() // a is with the driver
		b.Ack()
		synctest.Wait() // b waits for the settler
		d.cut()
		synctest.Wait()
		events := r.rec.of(EventSettled)
		if len(events) != 2 {
			t.Fatalf("events %+v", events)
		}
		for _, e := range events {
			want := map[string]SettleOutcome{"a": SettleOutcomeConfirmed, "b": SettleOutcomeFailed}[e.ID]
			if e.Outcome != want {
				t.Errorf("%s is %v, want %v", e.ID, e.Outcome, want)
			}
		}
		r.close()
	})
}
