package sdk

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.uber.org/goleak"
)

// TestMain looks for leaks. Watermill's router leaves one goroutine behind when a handler cannot subscribe.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction(
		"github.com/ThreeDotsLabs/watermill/message.(*Router).watchAllHandlersStopped.func1"))
}

// rig is a subscriber over a fake.
type rig struct {
	t   *testing.T
	d   *fakeDriver
	sub *Subscriber
	rec *recorder
	out <-chan *message.Message
}

func newRig(t *testing.T, d *fakeDriver, cfg SubscriberConfig) *rig {
	t.Helper()
	r := &rig{t: t, d: d, rec: &recorder{}}
	if cfg.Group == "" {
		cfg.Group = "g"
	}
	cfg.Observer = r.rec
	sub, err := NewSubscriber(d, cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.sub = sub
	return r
}

// subscribed is a rig with one subscription to topic t.
func subscribed(t *testing.T, d *fakeDriver, cfg SubscriberConfig) *rig {
	t.Helper()
	r := newRig(t, d, cfg)
	out, err := r.sub.Subscribe(t.Context(), "t")
	if err != nil {
		t.Fatal(err)
	}
	r.out = out
	return r
}

// next gives the next message; the bubble's time runs until there is one.
func (r *rig) next() *message.Message {
	r.t.Helper()
	select {
	case msg, ok := <-r.out:
		if !ok {
			r.t.Fatal("the channel is closed, want a message")
		}
		return msg
	case <-time.After(time.Hour):
		r.t.Fatal("no message within an hour")
		return nil
	}
}

// none fails if a message comes within d.
func (r *rig) none(d time.Duration) {
	r.t.Helper()
	select {
	case msg, ok := <-r.out:
		if ok {
			r.t.Fatalf("unexpected message %q", msg.UUID)
		}
		r.t.Fatal("the channel is closed")
	case <-time.After(d):
	}
}

func (r *rig) close() {
	r.t.Helper()
	if err := r.sub.Close(); err != nil {
		r.t.Errorf("close: %v", err)
	}
}

func confirming() Capabilities {
	return Capabilities{Settle: SettleConfirmed, DeliveryCount: true}
}

func TestHandsOutInOrderAndSettles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{})
		want := []string{"a", "b", "c", "d"}
		d.putIDs("t", "g", want...)
		var got []string
		for range want {
			msg := r.next()
			got = append(got, msg.UUID)
			info, ok := DeliveryFrom(msg.Context())
			if !ok || info.Attempt != 1 || info.Redelivered || info.Token == "" || info.Topic != "t" || info.Group != "g" {
				t.Errorf("delivery info of %s is %+v, %v", msg.UUID, info, ok)
			}
			if info.Limits != r.sub.Limits() {
				t.Errorf("limits of the delivery %+v, of the subscriber %+v", info.Limits, r.sub.Limits())
			}
			msg.Ack()
			<-msg.Context().Done() // settled
		}
		if !slices.Equal(got, want) {
			t.Errorf("order %v, want %v", got, want)
		}
		synctest.Wait()
		if n := r.sub.InFlight(); n != 0 {
			t.Errorf("in flight %d", n)
		}
		for _, e := range r.rec.of(EventSettled) {
			if e.Outcome != SettleOutcomeConfirmed || e.Verdict != Ack || e.Topic != "t" || e.Group != "g" || e.ID == "" {
				t.Errorf("event %+v", e)
			}
		}
		if n := len(r.rec.of(EventSettled)); n != len(want) {
			t.Errorf("%d settled events", n)
		}
		r.close()
	})
}

func TestCloseFromTenGoroutinesAtOnce(t *testing.T) { // L01
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		msg := r.next()
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				if err := r.sub.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(time.Second)
		msg.Ack()
		wg.Wait()
		if _, open := <-r.out; open {
			t.Error("the output channel is open after Close")
		}
		if got := d.settlements(Ack); len(got) != 1 {
			t.Errorf("settled %v", got)
		}
		if _, err := r.sub.Subscribe(t.Context(), "t"); !errors.Is(err, ErrClosed) {
			t.Errorf("Subscribe after Close: %v", err)
		}
	})
}

func TestConfigurationErrorsSayWhatToChange(t *testing.T) {
	leasing := Capabilities{Lease: time.Minute}
	for name, c := range map[string]struct {
		cfg  SubscriberConfig
		caps Capabilities
		want string
	}{
		"no group":           {SubscriberConfig{}, Capabilities{}, "Group is empty"},
		"negative window":    {SubscriberConfig{Group: "g", MaxInFlight: -1}, Capabilities{}, "MaxInFlight is -1"},
		"negative lease":     {SubscriberConfig{Group: "g", Lease: -1}, Capabilities{}, "Lease is -1ns"},
		"negative drain":     {SubscriberConfig{Group: "g", DrainTimeout: -1}, Capabilities{}, "DrainTimeout"},
		"negative time":      {SubscriberConfig{Group: "g", MaxProcessing: -1}, Capabilities{}, "MaxProcessing"},
		"negative backoff":   {SubscriberConfig{Group: "g", Backoff: Backoff{Min: -1}}, Capabilities{}, "Backoff.Min"},
		"backoff upside":     {SubscriberConfig{Group: "g", Backoff: Backoff{Min: 2, Max: 1}}, Capabilities{}, "swap"},
		"lease below retry":  {SubscriberConfig{Group: "g", Lease: 50 * time.Millisecond}, leasing, "raise Lease"},
		"lease much too low": {SubscriberConfig{Group: "g", Lease: 2, Backoff: Backoff{Min: 1}}, leasing, "at least"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := NewSubscriber(newFake(c.caps), c.cfg)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}
	if _, err := NewSubscriber(nil, SubscriberConfig{Group: "g"}); err == nil {
		t.Error("a nil driver was accepted")
	}
}

func TestLimits(t *testing.T) {
	for name, c := range map[string]struct {
		caps Capabilities
		cfg  SubscriberConfig
		want Limits
	}{
		"nothing known": {Capabilities{}, SubscriberConfig{}, Limits{MaxInFlight: 256}},
		"all known": {
			Capabilities{Lease: time.Minute, Horizon: time.Hour},
			SubscriberConfig{MaxInFlight: 3, Lease: time.Second},
			Limits{MaxInFlight: 3, Lease: time.Second, Horizon: time.Hour},
		},
		"default lease": {Capabilities{Lease: time.Minute}, SubscriberConfig{}, Limits{MaxInFlight: 256, Lease: 30 * time.Second}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := newRig(t, newFake(c.caps), c.cfg).sub.Limits(); got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

func TestSubscribeSurfacesErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("no such exchange")
		d := newFake(confirming())
		d.onPrepare = func(context.Context, Binding) error { return broken }
		r := newRig(t, d, SubscriberConfig{})
		_, err := r.sub.Subscribe(t.Context(), "orders")
		if !errors.Is(err, broken) || !strings.Contains(err.Error(), `"orders"`) || !strings.Contains(err.Error(), `"g"`) {
			t.Errorf("error %v", err)
		}
		if _, err := r.sub.Subscribe(t.Context(), ""); err == nil {
			t.Error("an empty topic was accepted")
		}
		d.onPrepare = func(ctx context.Context, _ Binding) error { <-ctx.Done(); return ctx.Err() } // never answers
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if _, err := r.sub.Subscribe(ctx, "t"); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > time.Second {
			t.Errorf("error %v after %v", err, time.Since(start))
		}
		r.close()
	})
}

func TestStopInterruptsSubscribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onOpen = func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() }
		r := newRig(t, d, SubscriberConfig{})
		result := make(chan error, 1)
		go func() {
			_, err := r.sub.Subscribe(t.Context(), "t")
			result <- err
		}()
		synctest.Wait()
		start := time.Now()
		r.close()
		if err := <-result; !errors.Is(err, ErrClosed) || time.Since(start) > 0 {
			t.Errorf("Subscribe: %v after %v", err, time.Since(start))
		}
	})
}

func TestBindingCarriesTheConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 7, Lease: 9 * time.Second, VerifyOnly: true})
		want := Binding{Topic: "t", Group: "g", Window: 7, Lease: 9 * time.Second}
		if got := d.bindings[0]; got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
		r.close()
	})
}
