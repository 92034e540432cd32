package sdk

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var errUndecodable = errors.New("header x-death is not a string")

func undecodable(id string) Delivery {
	return Delivery{Message: Message{ID: id, Payload: []byte{0xff}}, Err: errUndecodable}
}

func TestPoisonFunction(t *testing.T) { // D16
	for name, c := range map[string]struct {
		poison func(call int) error
		calls  int64
	}{
		"taken": {func(int) error { return nil }, 1},
		"error": {func(n int) error { return map[bool]error{true: errCut}[n == 1] }, 2},
		"panic": {func(n int) error {
			return map[bool]func() error{true: func() error { panic("ouch") }, false: func() error { return nil }}[n == 1]()
		}, 2},
		"goexit":    {func(n int) error { exit(n == 1); return nil }, 2},
		"many fail": {func(n int) error { return map[bool]error{true: errCut}[n < 5] }, 5},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(confirming())
				var calls atomic.Int64
				poison := func(ctx context.Context, got Delivery) error {
					if got.Payload[0] != 0xff || !errors.Is(got.Err, errUndecodable) || ctx.Err() != nil {
						t.Errorf("poison called with %+v", got)
					}
					if info, ok := DeliveryFrom(ctx); !ok || info.Attempt != int(calls.Load())+1 {
						t.Errorf("delivery info %+v", info)
					}
					return c.poison(int(calls.Add(1)))
				}
				r := subscribed(t, d, SubscriberConfig{MaxInFlight: 2, Poison: poison})
				d.put("t", "g", undecodable("x"))
				d.putIDs("t", "g", "a", "b", "c")
				for _, want := range []string{"a", "b", "c"} { // blocks nobody
					msg := r.next()
					if msg.UUID != want {
						t.Errorf("came %q, want %q", msg.UUID, want)
					}
					msg.Ack()
				}
				time.Sleep(time.Minute)
				if n := calls.Load(); n != c.calls {
					t.Errorf("%d calls, want %d", n, c.calls)
				}
				if n := len(d.settlements(Ack)); n != 4 {
					t.Errorf("%d acks, want 4", n)
				}
				events := r.rec.of(EventPoison)
				if len(events) != int(c.calls) || !errors.Is(events[0].Err, errUndecodable) {
					t.Errorf("events %+v", events)
				}
				r.close()
			})
		})
	}
}

func exit(really bool) {
	if really {
		runtime.Goexit()
	}
}

func TestWithoutPoisonFunction(t *testing.T) {
	rejecting, both := confirming(), delaying()
	rejecting.Reject, both.Reject = true, true
	lent := lending()
	for name, c := range map[string]struct {
		caps     Capabilities
		noExtend bool
		refuse   bool // Reject is declared, but refused
		verdict  Verdict
		delay    time.Duration
		at       time.Duration
	}{
		"rejects":                {both, false, false, Reject, 0, 0},
		"reject refused, delays": {both, false, true, Requeue, time.Minute, 0},
		"reject refused, cannot": {rejecting, false, true, Requeue, 0, time.Minute},
		"delays":                 {delaying(), false, false, Requeue, time.Minute, 0},
		"can do nothing":         {confirming(), false, false, Requeue, 0, time.Minute},
		"lent":                   {lent, false, false, Requeue, 0, time.Minute},
		"lent without extending": {lent, true, false, Requeue, 0, 27 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(c.caps)
				d.noExtend = c.noExtend
				d.onSettle = func(_ context.Context, _ int, batch []Settlement) (error, bool) {
					return &BatchError{Entries: map[int]error{0: ErrUnsupported}}, c.refuse && batch[0].Verdict == Reject
				}
				r := subscribed(t, d, SubscriberConfig{})
				start := time.Now()
				d.put("t", "g", undecodable("x"))
				d.putIDs("t", "g", "a")
				r.next().Ack()
				time.Sleep(90 * time.Second)
				got := d.settlements(c.verdict)
				if len(got) == 0 {
					t.Fatalf("settled %+v", d.settled)
				}
				if got[0].Delay != c.delay || got[0].At.Sub(start) != c.at {
					t.Errorf("%v with delay %v after %v", got[0].Verdict, got[0].Delay, got[0].At.Sub(start))
				}
				if n := len(r.rec.of(EventPoison)); n == 0 {
					t.Error("not reported")
				}
				r.close()
			})
		})
	}
}

func TestPoisonForEverNeverSpins(t *testing.T) {
	for name, poison := range map[string]func(context.Context, Delivery) error{
		"function fails": func(context.Context, Delivery) error { return errCut }, "no function": nil,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(confirming())
				r := subscribed(t, d, SubscriberConfig{Poison: poison})
				d.put("t", "g", undecodable("x"))
				time.Sleep(time.Hour)
				if n := len(r.rec.of(EventPoison)); n < 50 || n > 200 {
					t.Errorf("%d times in an hour", n)
				}
				r.close()
			})
		})
	}
}

// A poison function that hangs is cancelled by MaxProcessing and at the end of DrainTimeout, and never waited for longer.
func TestAPoisonFunctionThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		release := make(chan struct{})
		causes := make(chan error, 10)
		poison := func(ctx context.Context, _ Delivery) error {
			<-ctx.Done()
			causes <- context.Cause(ctx)
			<-release
			return nil
		}
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 1, Poison: poison, MaxProcessing: time.Minute})
		d.put("t", "g", undecodable("x"))
		time.Sleep(70 * time.Second)
		if n := len(r.rec.of(EventAbandoned)); n != 1 {
			t.Errorf("%d abandoned", n)
		}
		start := time.Now()
		r.close()
		if took := time.Since(start); took != DefaultDrainTimeout {
			t.Errorf("closing took %v", took)
		}
		if _, open := <-r.out; open {
			t.Error("the channel is open")
		}
		close(release)
		synctest.Wait()
		if len(causes) != 2 {
			t.Fatalf("%d calls ended", len(causes))
		}
		if first, second := <-causes, <-causes; !errors.Is(first, ErrAbandoned) || !errors.Is(second, ErrDrainTimeout) {
			t.Errorf("causes %v, %v", first, second)
		}
		if n := len(d.settlements(Ack)); n != 0 {
			t.Errorf("late answers were settled: %d", n)
		}
	})
}

// The answer about an abandoned attempt must not count for the next one.
func TestALatePoisonAnswerIsNotTakenForTheNextAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSettle = func(_ context.Context, _ int, batch []Settlement) (error, bool) {
			return ErrUnsupported, batch[0].Verdict == Requeue
		}
		calls := make(chan chan error, 10)
		poison := func(context.Context, Delivery) error {
			answer := make(chan error)
			calls <- answer
			return <-answer
		}
		r := subscribed(t, d, SubscriberConfig{Poison: poison, MaxProcessing: time.Minute})
		d.put("t", "g", undecodable("x"))
		first := <-calls
		second := <-calls
		first <- nil
		synctest.Wait()
		if n := len(d.settlements(Ack)); n != 0 {
			t.Errorf("%d acks by a late answer", n)
		}
		second <- nil
		synctest.Wait()
		if n := len(d.settlements(Ack)); n != 1 {
			t.Errorf("%d acks", n)
		}
		r.close()
	})
}

func TestPoisonOfALostSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		var calls atomic.Int64
		poison := func(ctx context.Context, _ Delivery) error {
			if calls.Add(1) == 1 {
				<-ctx.Done()
			}
			return nil
		}
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 2, Poison: poison})
		d.put("t", "g", undecodable("x"))
		synctest.Wait()
		d.cut()
		time.Sleep(time.Minute)
		if calls.Load() != 2 || len(d.settlements(Ack)) != 1 || r.sub.InFlight() != 0 {
			t.Errorf("%d calls, %d acks, %d in flight", calls.Load(), len(d.settlements(Ack)), r.sub.InFlight())
		}
		r.close()
	})
}
