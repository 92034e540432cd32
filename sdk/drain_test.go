package sdk

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// track notes the order in which things happen.
type track struct {
	mu    sync.Mutex
	steps []string
}

func (l *track) add(step string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.steps = append(l.steps, step)
}

// The output channel closes last: after the driver's Settle has returned, the barrier, and the closing of the source.
func TestTheOutputChannelClosesLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &track{}
		d := newFake(Capabilities{Settle: SettleSent})
		d.onSettle = func(_ context.Context, _ int, batch []Settlement) (error, bool) {
			time.Sleep(3 * time.Second)
			l.add("settled " + batch[0].Verdict.String())
			return nil, false
		}
		d.onBarrier = func(context.Context) error { l.add("barrier"); return nil }
		d.onClose = func(context.Context) { l.add("source closed") }
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		msg := r.next()
		stopped := make(chan struct{})
		go func() {
			r.close()
			close(stopped)
		}()
		time.Sleep(5 * time.Second)
		if err := msg.Context().Err(); err != nil {
			t.Errorf("the context ended while draining: %v", err)
		}
		l.add("acked")
		msg.Ack()
		_, open := <-r.out
		l.add("channel closed")
		if open {
			t.Error("a message came")
		}
		<-stopped
		want := []string{"acked", "settled ack", "barrier", "source closed", "channel closed"}
		if !slices.Equal(l.steps, want) {
			t.Errorf("steps %v, want %v", l.steps, want)
		}
	})
}

func TestStoppingSendsBackWhatWasNotHandedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(delaying())
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a", "b", "c", "d")
		a := r.next()
		b := r.next()
		mustInfo(t, a).RequeueAfter(5 * time.Second)
		a.Nack() // held
		synctest.Wait()
		go r.close()
		synctest.Wait()
		requeued := d.settlements(Requeue)
		var got []string
		for _, s := range requeued {
			got = append(got, s.ID)
			if s.Delay != 0 {
				t.Errorf("%s goes back with delay %v", s.ID, s.Delay)
			}
		}
		if want := []string{"a", "c", "d"}; !slices.Equal(got, want) {
			t.Errorf("sent back %v, want %v", got, want)
		}
		mustInfo(t, b).RequeueAfter(5 * time.Second)
		b.Nack() // nothing is held any more: the broker's delay
		if _, open := <-r.out; open {
			t.Error("a message came")
		}
		if last := d.settlements(Requeue)[3]; last.ID != "b" || last.Delay != 5*time.Second {
			t.Errorf("last %+v", last)
		}
	})
}

// L02: cancelling the context of Subscribe ends the subscription although nobody reads, and only this one.
func TestCancellingSubscribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := newRig(t, d, SubscriberConfig{})
		ctx, cancel := context.WithCancel(t.Context())
		out, err := r.sub.Subscribe(ctx, "t")
		if err != nil {
			t.Fatal(err)
		}
		other, err := r.sub.Subscribe(t.Context(), "u")
		if err != nil {
			t.Fatal(err)
		}
		d.putIDs("t", "g", "a", "b")
		synctest.Wait()
		cancel()
		synctest.Wait()
		if _, open := <-out; open {
			t.Error("a message came")
		}
		if got := d.pending("t", "g"); len(got) != 2 {
			t.Errorf("pending %v", got)
		}
		if n := d.openSources(); n != 1 {
			t.Errorf("%d sources are open", n)
		}
		d.putIDs("u", "g", "x")
		(<-other).Ack()
		r.close()
	})
}

// The message outlives the context of Subscribe, keeps its values, and is settled.
func TestAMessageOutlivesItsSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		d := newFake(confirming())
		r := newRig(t, d, SubscriberConfig{})
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
		out, err := r.sub.Subscribe(ctx, "t")
		if err != nil {
			t.Fatal(err)
		}
		d.putIDs("t", "g", "a")
		msg := <-out
		cancel()
		time.Sleep(10 * time.Second)
		if msg.Context().Err() != nil || msg.Context().Value(key{}) != "value" {
			t.Errorf("context %v, value %v", msg.Context().Err(), msg.Context().Value(key{}))
		}
		msg.Ack()
		if _, open := <-out; open {
			t.Error("a message came")
		}
		if n := len(d.settlements(Ack)); n != 1 {
			t.Errorf("%d acks", n)
		}
		r.close()
	})
}

func TestDrainTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{DrainTimeout: 7 * time.Second})
		d.putIDs("t", "g", "a")
		msg := r.next()
		start := time.Now()
		r.close()
		if took := time.Since(start); took != 7*time.Second {
			t.Errorf("closed after %v", took)
		}
		if cause := contextCause(msg); !errors.Is(cause, ErrDrainTimeout) {
			t.Errorf("cause %v", cause)
		}
		if _, open := <-r.out; open {
			t.Error("a message came")
		}
		msg.Ack()
		synctest.Wait()
		if got := d.pending("t", "g"); len(got) != 1 || d.counted("settle") != 0 {
			t.Errorf("pending %v after %d settle calls", got, d.counted("settle"))
		}
		if events := r.rec.of(EventDrainTimeout); len(events) != 1 || events[0].Attempt != 1 {
			t.Errorf("events %+v", events)
		}
		if n := r.sub.InFlight(); n != 0 {
			t.Errorf("%d in flight", n)
		}
	})
}

func TestStopWithItsOwnContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		msg := r.next()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.sub.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Stop: %v", err)
		}
		if err := msg.Context().Err(); err != nil {
			t.Errorf("draining did not go on: %v", err)
		}
		msg.Ack()
		if err := r.sub.Stop(t.Context()); err != nil {
			t.Errorf("second Stop: %v", err)
		}
		if n := len(d.settlements(Ack)); n != 1 {
			t.Errorf("%d acks", n)
		}
	})
}

// Whatever hangs, Close returns within DrainTimeout and its margin.
func TestCloseIsBounded(t *testing.T) {
	hang := func(ctx context.Context) { <-ctx.Done() }
	for name, script := range map[string]func(d *fakeDriver){
		"settle": func(d *fakeDriver) {
			d.onSettle = func(ctx context.Context, _ int, _ []Settlement) (error, bool) { hang(ctx); return ctx.Err(), true }
		},
		"close":   func(d *fakeDriver) { d.onClose = hang },
		"barrier": func(d *fakeDriver) { d.onBarrier = func(ctx context.Context) error { hang(ctx); return ctx.Err() } },
		"reopen": func(d *fakeDriver) {
			d.onOpen = func(ctx context.Context, n int) error {
				if n > 1 {
					hang(ctx)
				}
				return ctx.Err()
			}
			time.AfterFunc(time.Second, d.cut)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(confirming())
				script(d)
				r := subscribed(t, d, SubscriberConfig{})
				d.putIDs("t", "g", "a", "b")
				r.next().Ack()
				r.next()
				time.Sleep(2 * time.Second)
				start := time.Now()
				r.close()
				if took := time.Since(start); took > DefaultDrainTimeout+closeTimeout {
					t.Errorf("took %v", took)
				}
				if _, open := <-r.out; open {
					t.Error("a message came")
				}
			})
		})
	}
}

// What is retried, nacked and abandoned while draining still finds its end.
func TestSettlementsAreRetriedWhileDraining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSettle = func(_ context.Context, n int, _ []Settlement) (error, bool) {
			return &BatchError{Entries: map[int]error{0: errRejected}}, n < 3
		}
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		msg := r.next()
		go r.close()
		synctest.Wait()
		msg.Ack()
		<-r.out
		if n := len(d.settlements(Ack)); n != 1 {
			t.Errorf("%d acks", n)
		}
	})
}

func TestASettlementThatFailsWhileDrainingHoldsNothingUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSettle = func(context.Context, int, []Settlement) (error, bool) { return errRejected, true }
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a", "b")
		r.next().Nack()
		start := time.Now()
		r.close()
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("took %v", took)
		}
		if got := d.pending("t", "g"); !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("pending %v", got)
		}
	})
}

// Handlers whose source was lost are waited for, too: they may be publishing.
func TestDrainWaitsForOrphans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 1})
		d.putIDs("t", "g", "a")
		msg := r.next()
		time.Sleep(time.Second)
		d.cut()
		<-msg.Context().Done()
		start := time.Now()
		time.AfterFunc(4*time.Second, func() { msg.Ack() })
		r.close()
		if took := time.Since(start); took != 4*time.Second {
			t.Errorf("closed after %v", took)
		}
	})
}

func TestManySubscriptionsUnderLoadLoseNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := newRig(t, d, SubscriberConfig{MaxInFlight: 8})
		var wg sync.WaitGroup
		for _, topic := range []string{"t", "u", "v"} {
			d.putIDs(topic, "g", ids(500)...)
			out, err := r.sub.Subscribe(t.Context(), topic)
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() { consumeSome(out) })
		}
		for range 5 {
			time.Sleep(20 * time.Millisecond)
			d.cut()
		}
		r.close()
		wg.Wait()
		for _, topic := range []string{"t", "u", "v"} {
			left := map[string]bool{}
			for _, id := range d.pending(topic, "g") {
				left[id] = true
			}
			if len(left) == 0 || len(left) == 500 {
				t.Errorf("%s: %d left: nothing was tested", topic, len(left))
			}
		}
		if left := len(d.pending("t", "g")) + len(d.pending("u", "g")) + len(d.pending("v", "g")); left+len(d.settlements(Ack)) != 1500 {
			t.Errorf("%d left and %d acked do not make 1500", left, len(d.settlements(Ack)))
		}
	})
}

// consumeSome acks most messages and nacks some, each in a goroutine of its own, until the channel closes.
func consumeSome(out <-chan *message.Message) {
	var wg sync.WaitGroup
	n := 0
	for msg := range out {
		n++
		nack := n%7 == 0
		wg.Go(func() {
			time.Sleep(3 * time.Millisecond)
			if nack {
				msg.Nack()
			} else {
				msg.Ack()
			}
		})
	}
	wg.Wait()
}
