package sdk

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
)

// foreign is a router with a handler over GoChannel, whose outputs go to our fake.
type foreign struct {
	t       *testing.T
	d       *fakeDriver
	channel *gochannel.GoChannel
	router  *message.Router
	handler *message.Handler
	handled atomic.Int64
	failed  atomic.Int64
	ran     chan error
}

func newForeign(t *testing.T, takes time.Duration) *foreign {
	t.Helper()
	f := &foreign{t: t, d: newFake(confirming()), router: newRouter(t), ran: make(chan error, 1)}
	f.channel = gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	pub, _ := newTestPublisher(t, f.d, PublisherConfig{})
	f.handler = f.router.AddHandler("f", "in", f.channel, "out", pub, func(msg *message.Message) ([]*message.Message, error) {
		f.handled.Add(1)
		select {
		case <-time.After(takes):
			return []*message.Message{message.NewMessage(msg.UUID, nil)}, nil
		case <-msg.Context().Done():
			f.failed.Add(1)
			return nil, msg.Context().Err()
		}
	})
	return f
}

func (f *foreign) start(ctx context.Context, subs ...*Subscriber) {
	go func() { f.ran <- Run(ctx, f.router, subs...) }()
	<-f.router.Running()
}

func (f *foreign) publish(ids ...string) {
	f.t.Helper()
	if err := f.channel.Publish("in", messagesOf(ids...)...); err != nil {
		f.t.Error(err)
	}
}

// L06: a foreign subscriber under Run: what is in flight can finish, nothing later is handled, nothing is nacked in a loop.
func TestRunParksForeignMessages(t *testing.T) {
	for name, stop := range map[string]func(f *foreign, cancel context.CancelFunc){
		"cancelled":    func(_ *foreign, cancel context.CancelFunc) { cancel() },
		"Router.Close": func(f *foreign, _ context.CancelFunc) { go func() { _ = f.router.Close() }() },
		"Handler.Stop": func(f *foreign, _ context.CancelFunc) { f.handler.Stop() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newForeign(t, 5*time.Second)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				f.start(ctx)
				f.publish("a", "b")
				time.Sleep(time.Second)
				stop(f, cancel)
				synctest.Wait()
				f.publish("late", "later")
				start := time.Now()
				if err := <-f.ran; err != nil {
					t.Errorf("Run: %v", err)
				}
				if took := time.Since(start); took != 4*time.Second {
					t.Errorf("Run returned after %v, want when the handlers did", took)
				}
				if f.handled.Load() != 2 || f.failed.Load() != 0 {
					t.Errorf("%d handled, %d of them cancelled", f.handled.Load(), f.failed.Load())
				}
				if got := f.d.pending("out", "g"); len(got) != 2 {
					t.Errorf("outputs %v", got)
				}
				_ = f.channel.Close()
			})
		})
	}
}

// A failed foreign message is sent again at once by GoChannel: while stopping that copy is parked.
func TestRunDoesNotSpinOnANackedForeignMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		router, calls := newRouter(t), atomic.Int64{}
		channel := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
		router.AddConsumerHandler("f", "in", channel, func(*message.Message) error {
			calls.Add(1)
			time.Sleep(5 * time.Second)
			return errCut
		})
		ctx, cancel := context.WithCancel(t.Context())
		ran := make(chan error, 1)
		go func() { ran <- Run(ctx, router) }()
		<-router.Running()
		if err := channel.Publish("in", messagesOf("a")...); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		cancel()
		if err := <-ran; err != nil || calls.Load() != 1 {
			t.Errorf("Run: %v after %d calls", err, calls.Load())
		}
		_ = channel.Close()
	})
}

// A foreign handler that hangs holds Run up for DrainTimeout and the router's own CloseTimeout, not longer.
func TestRunIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		router, err := message.NewRouter(message.RouterConfig{CloseTimeout: time.Second}, watermill.NopLogger{})
		if err != nil {
			t.Fatal(err)
		}
		channel := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
		release := make(chan struct{})
		router.AddConsumerHandler("f", "in", channel, func(*message.Message) error { <-release; return nil })
		ctx, cancel := context.WithCancel(t.Context())
		ran := make(chan error, 1)
		go func() { ran <- Run(ctx, router) }()
		<-router.Running()
		if err := channel.Publish("in", messagesOf("a")...); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		cancel()
		start := time.Now()
		if err := <-ran; err == nil {
			t.Error("the router's timeout is not returned")
		}
		if took := time.Since(start); took > DefaultDrainTimeout+time.Second {
			t.Errorf("took %v", took)
		}
		close(release)
		_ = channel.Close()
	})
}

// Two handlers share a publisher, one of them ours and idle, one slow: the publisher must not close with the idle one's
// channel.
func TestRunKeepsASharedPublisherOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quick := newRig(t, newFake(confirming()), SubscriberConfig{})
		slow := newRig(t, quick.d, SubscriberConfig{})
		channel := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
		pub, _ := newTestPublisher(t, quick.d, PublisherConfig{})
		router := newRouter(t)
		copyOf := func(msg *message.Message) ([]*message.Message, error) {
			return []*message.Message{message.NewMessage(msg.UUID, nil)}, nil
		}
		router.AddHandler("quick", "q", quick.sub, "out", pub, copyOf)
		router.AddHandler("slow", "s", slow.sub, "out", pub, func(msg *message.Message) ([]*message.Message, error) {
			time.Sleep(10 * time.Second)
			return copyOf(msg)
		})
		slower := func(msg *message.Message) ([]*message.Message, error) {
			time.Sleep(15 * time.Second)
			return copyOf(msg)
		}
		router.AddHandler("foreign", "f", channel, "out", pub, slower)
		router.AddHandler("idle", "i", channel, "out", pub, copyOf)
		quick.d.putIDs("s", "g", "a")
		ctx, cancel := context.WithCancel(t.Context())
		ran := make(chan error, 1)
		go func() { ran <- Run(ctx, router, quick.sub, slow.sub) }()
		time.Sleep(time.Second)
		if err := channel.Publish("f", messagesOf("b")...); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		cancel()
		if err := <-ran; err != nil {
			t.Errorf("Run: %v", err)
		}
		_ = channel.Close()
		if out, acks := quick.d.pending("out", "g"), quick.d.settlements(Ack); len(out) != 2 || len(acks) != 1 {
			t.Errorf("outputs %v, %d acks", out, len(acks))
		}
	})
}

// A subscriber that Run was not given drains when the router closes it.
func TestRunWithASubscriberItWasNotGiven(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMill(t, 5*time.Second)
		m.d.putIDs("in", "g", ids(300)...)
		ctx, cancel := context.WithCancel(t.Context())
		m.start(func() error { return Run(ctx, m.router) })
		time.Sleep(time.Second)
		cancel()
		if err := <-m.ran; err != nil {
			t.Errorf("Run: %v", err)
		}
		m.check(300)
		if n := len(m.d.settlements(Ack)); n != 256 {
			t.Errorf("%d acked", n)
		}
	})
}

func TestRunOurAndForeignTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newForeign(t, 3*time.Second)
		ours := newRig(t, f.d, SubscriberConfig{})
		var handled atomic.Int64
		f.router.AddConsumerHandler("ours", "t", ours.sub, func(*message.Message) error {
			handled.Add(1)
			time.Sleep(7 * time.Second)
			return nil
		})
		f.d.putIDs("t", "g", "x", "y")
		ctx, cancel := context.WithCancel(t.Context())
		f.start(ctx, ours.sub, nil)
		f.publish("a")
		time.Sleep(time.Second)
		cancel()
		start := time.Now()
		if err := <-f.ran; err != nil {
			t.Errorf("Run: %v", err)
		}
		if took := time.Since(start); took != 6*time.Second {
			t.Errorf("took %v", took)
		}
		if len(f.d.settlements(Ack)) != 2 || len(f.d.pending("out", "g")) != 1 {
			t.Errorf("%d acks, outputs %v", len(f.d.settlements(Ack)), f.d.pending("out", "g"))
		}
		_ = f.channel.Close()
	})
}

func TestRunReturnsWhenTheRouterCannotStart(t *testing.T) {
	broken := errors.New("no such queue")
	d := newFake(confirming())
	d.onOpen = func(context.Context, int) error { return broken }
	r := newRig(t, d, SubscriberConfig{})
	router := newRouter(t)
	router.AddConsumerHandler("h", "t", r.sub, func(*message.Message) error { return nil })
	if err := Run(t.Context(), router, r.sub); !errors.Is(err, broken) {
		t.Errorf("Run: %v", err)
	}
	if err := Run(t.Context(), nil); err == nil {
		t.Error("a nil router was accepted")
	}
}

// A service whose broker handle is closed under it must not look as if it had ended in good order.
func TestRunTellsThatTheDriverWasClosed(t *testing.T) {
	d := newFake(confirming())
	r := newRig(t, d, SubscriberConfig{Backoff: Backoff{Min: time.Millisecond}})
	router := newRouter(t)
	router.AddConsumerHandler("h", "orders", r.sub, func(*message.Message) error { return nil })
	ran := make(chan error, 1)
	go func() { ran <- Run(t.Context(), router, r.sub) }()
	<-router.Running()
	if err := d.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-ran; !errors.Is(err, ErrClosed) || !strings.Contains(err.Error(), "orders") {
		t.Errorf("Run: %v", err)
	}
}

func TestRunWithAContextThatIsDone(t *testing.T) {
	for name, block := range map[string]bool{"before it is up": true, "at once": false} {
		t.Run(name, func(t *testing.T) {
			d := newFake(confirming())
			if block {
				d.onOpen = func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() }
			}
			r := newRig(t, d, SubscriberConfig{})
			router := newRouter(t)
			router.AddConsumerHandler("h", "t", r.sub, func(*message.Message) error { return nil })
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := Run(ctx, router, r.sub); err != nil {
				t.Errorf("Run: %v", err)
			}
		})
	}
}

// A lot does not remember what is settled.
func TestALotForgetsSettledMessages(t *testing.T) {
	l := &lot{}
	for range 10_000 {
		msg := message.NewMessage("a", nil)
		l.keep(msg)
		msg.Ack()
	}
	if len(l.passed) > 65 {
		t.Errorf("%d are remembered", len(l.passed))
	}
}
