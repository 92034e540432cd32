package sdk

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// F01 and D12: resuming does not wait for running handlers, whose contexts end and whose decisions are ignored.
func TestALostSourceIsReplacedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 3})
		d.putIDs("t", "g", "a", "b", "c", "d")
		a, b := r.next(), r.next()
		time.Sleep(time.Second)
		start := time.Now()
		d.cut() // c is being offered, d is with the broker
		for _, msg := range []*message.Message{a, b} {
			<-msg.Context().Done()
			if cause := contextCause(msg); !errors.Is(cause, ErrDeliveryLost) {
				t.Errorf("cause %v", cause)
			}
		}
		again := []*message.Message{r.next(), r.next(), r.next()}
		if waited := time.Since(start); waited > 100*time.Millisecond {
			t.Errorf("resumed after %v", waited)
		}
		for i, want := range []string{"a", "b", "c"} {
			info := mustInfo(t, again[i])
			if again[i].UUID != want || !info.Redelivered || info.Attempt != 2 {
				t.Errorf("came %q %+v", again[i].UUID, info)
			}
		}
		a.Ack()
		b.Nack()
		synctest.Wait()
		if n := d.counted("settle"); n != 0 {
			t.Errorf("late decisions were settled %d times", n)
		}
		late := r.rec.of(EventSettled)
		if len(late) != 2 || late[0].Outcome != SettleOutcomeFailed || !errors.Is(late[0].Err, ErrDeliveryLost) {
			t.Errorf("late decisions are reported as %+v", late)
		}
		if lost := r.rec.of(EventSourceLost); len(lost) != 1 || !errors.Is(lost[0].Err, errCut) {
			t.Errorf("lost %+v", lost)
		}
		for _, msg := range again {
			msg.Ack()
		}
		r.next().Ack()
		r.close()
		if n := d.counted("source close"); n != 2 {
			t.Errorf("%d sources closed, want 2", n)
		}
	})
}

// Handlers that ignore their context must not let memory grow with every cut: two windows are the most.
func TestOrphansAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 4, MaxProcessing: time.Hour})
		d.putIDs("t", "g", ids(40)...)
		var mu sync.Mutex
		var taken []*message.Message
		count := func() int { mu.Lock(); defer mu.Unlock(); return len(taken) }
		go func() {
			for msg := range r.out {
				mu.Lock()
				taken = append(taken, msg)
				mu.Unlock()
			}
		}()
		for range 10 {
			time.Sleep(time.Minute)
			d.cut()
		}
		time.Sleep(time.Minute)
		if n := count(); n != 8 {
			t.Errorf("%d messages were handed out, want two windows", n)
		}
		if n := r.sub.InFlight(); n != 8 {
			t.Errorf("%d in flight, want 8", n)
		}
		taken[0].Ack() // one handler ends
		time.Sleep(time.Minute)
		if n := count(); n != 9 {
			t.Errorf("%d after one ended, want 9", n)
		}
		time.Sleep(time.Hour) // MaxProcessing frees the rest
		if n := count(); n < 12 {
			t.Errorf("%d after MaxProcessing", n)
		}
		if n := len(r.rec.of(EventAbandoned)); n < 7 {
			t.Errorf("%d abandoned", n)
		}
		r.close()
		if n := r.sub.InFlight(); n != 0 {
			t.Errorf("%d in flight after Close", n)
		}
	})
}

// F05: the consumer stands still.
func TestMemoryIsBoundedWhileTheConsumerStandsStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 16})
		d.putIDs("t", "g", ids(10_000)...)
		time.Sleep(time.Minute)
		if n := r.sub.InFlight(); n != 16 {
			t.Errorf("%d in flight", n)
		}
		got := map[string]bool{}
		for range 10_000 {
			msg := r.next()
			got[msg.UUID] = true
			msg.Ack()
		}
		if len(got) != 10_000 || d.maxUnset > 16 {
			t.Errorf("%d distinct messages, at most %d unsettled", len(got), d.maxUnset)
		}
		r.close()
	})
}

func TestReopeningBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		down := make(chan struct{})
		var reachable atomic.Bool
		reachable.Store(true)
		d.onOpen = func(context.Context, int) error {
			if reachable.Load() {
				return nil
			}
			return errCut
		}
		r := subscribed(t, d, SubscriberConfig{})
		close(down)
		reachable.Store(false)
		time.Sleep(time.Second)
		d.cut()
		time.Sleep(time.Hour)
		failed := r.rec.of(EventOpenFailed)
		if len(failed) < 60 || len(failed) > 200 {
			t.Errorf("%d tries in an hour", len(failed))
		}
		for i, e := range failed {
			if e.Attempt != i+1 || !errors.Is(e.Err, errCut) {
				t.Fatalf("event %d: %+v", i, e)
			}
		}
		reachable.Store(true)
		d.putIDs("t", "g", "a")
		r.next().Ack()
		if opened := r.rec.of(EventSourceOpened); len(opened) != 2 || opened[1].Attempt != len(failed)+1 {
			t.Errorf("opened %+v", opened)
		}
		r.close()
	})
}

// A source that opens and fails at once, with or without a delivery, is not reopened in a hot loop.
func TestAFlappingSourceDoesNotSpin(t *testing.T) {
	for name, deliveries := range map[string][]Delivery{"empty": nil, "with a delivery": {{Token: "x"}}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(confirming())
				d.onReceive = func(_ context.Context, _ *fakeSource) ([]Delivery, error, bool) { return deliveries, errCut, true }
				r := subscribed(t, d, SubscriberConfig{})
				go func() {
					for msg := range r.out {
						msg.Ack()
					}
				}()
				time.Sleep(time.Hour)
				if n := d.counted("open"); n < 60 || n > 200 {
					t.Errorf("%d opens in an hour", n)
				}
				r.close()
			})
		})
	}
}

// A connection that is cut every second is not punished with growing waits.
func TestACutEverySecondIsResumedEachTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{})
		for range 60 {
			time.Sleep(time.Second)
			d.cut()
		}
		time.Sleep(time.Second)
		if n := d.counted("open"); n != 61 {
			t.Errorf("%d opens, want 61", n)
		}
		r.close()
	})
}

func TestAClosedDriverEndsTheSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{})
		_ = d.Close(t.Context())
		if _, open := <-r.out; open {
			t.Error("a message came")
		}
		if failed := r.rec.of(EventOpenFailed); len(failed) != 1 || !errors.Is(failed[0].Err, ErrClosed) {
			t.Errorf("events %+v", failed)
		}
		r.close()
	})
}

func TestPollsThatFindNothingSlowDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		var polls []time.Time
		d.onReceive = func(context.Context, *fakeSource) ([]Delivery, error, bool) {
			polls = append(polls, time.Now())
			if len(polls) == 9 {
				return []Delivery{{Message: Message{ID: "a"}, Token: "x"}}, nil, true
			}
			return nil, nil, true
		}
		d.onSettle = func(context.Context, int, []Settlement) (error, bool) { return nil, true }
		r := subscribed(t, d, SubscriberConfig{})
		r.next().Ack()
		time.Sleep(time.Second)
		r.close()
		want := []time.Duration{50, 100, 200, 400, 800, 1000, 1000, 1000, 0, 50, 100, 200, 400}
		for i, w := range want {
			if got := polls[i+1].Sub(polls[i]); got != w*time.Millisecond {
				t.Errorf("wait %d is %v, want %v", i, got, w*time.Millisecond)
			}
		}
	})
}

// A driver that polls says nothing while its window is full; the first free slot ends the waiting.
func TestAFreeSlotEndsTheWaitOfAPollingDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onReceive = func(_ context.Context, s *fakeSource) ([]Delivery, error, bool) {
			d.mu.Lock()
			defer d.mu.Unlock()
			return nil, nil, len(s.unsettled) == s.binding.Window
		}
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 1})
		d.putIDs("t", "g", "a", "b")
		a := r.next()
		time.Sleep(time.Minute + 300*time.Millisecond)
		start := time.Now()
		a.Ack()
		r.next().Ack()
		if waited := time.Since(start); waited != 0 {
			t.Errorf("waited %v for the next message", waited)
		}
		r.close()
	})
}

// A lost delivery that is offered but not taken is dropped.
func TestWhatWasNotHandedOutIsDroppedWithItsSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a", "b")
		synctest.Wait()
		d.cut()
		time.Sleep(time.Second)
		if n := r.sub.InFlight(); n != 2 {
			t.Errorf("%d in flight", n)
		}
		for _, want := range []string{"a", "b"} {
			msg := r.next()
			if msg.UUID != want || mustInfo(t, msg).Attempt != 2 {
				t.Errorf("came %q, attempt %d", msg.UUID, mustInfo(t, msg).Attempt)
			}
			msg.Ack()
		}
		r.close()
		if n := len(d.settlements(Ack)); n != 2 {
			t.Errorf("%d acks", n)
		}
	})
}

// A held message whose source is lost does not come back from the engine: the broker has it.
func TestAHeldMessageIsDroppedWithItsSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		msg := r.next()
		mustInfo(t, msg).RequeueAfter(5 * time.Second)
		msg.Nack()
		synctest.Wait()
		d.cut()
		r.next().Ack()
		r.none(time.Minute)
		r.close()
	})
}

// The engine asks a full source whether it lives, so a driver that ignores its window gets one message further, not more.
func TestADriverThatIgnoresItsWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		n := 0
		d.onReceive = func(_ context.Context, _ *fakeSource) ([]Delivery, error, bool) {
			n++
			return []Delivery{{Message: Message{ID: "a"}, Token: Token(ids(n)[n-1])}}, nil, true
		}
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 2, DrainTimeout: time.Second})
		r.next()
		time.Sleep(9 * time.Minute)
		if got := r.sub.InFlight(); got != 3 {
			t.Errorf("%d in flight, want the window and one more", got)
		}
		r.close()
	})
}
