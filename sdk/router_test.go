package sdk

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// mill is a router over a fake, with one handler: in → out.
type mill struct {
	*rig
	router  *message.Router
	handler *message.Handler
	pub     *Publisher
	handled atomic.Int64
	ran     chan error
}

// newMill makes a router whose handler takes a while and produces one message with the id of its input.
func newMill(t *testing.T, takes time.Duration) *mill {
	t.Helper()
	m := &mill{rig: newRig(t, newFake(confirming()), SubscriberConfig{}), ran: make(chan error, 1)}
	m.pub, _ = newTestPublisher(t, m.d, PublisherConfig{})
	m.router = newRouter(t)
	m.handler = m.router.AddHandler("h", "in", m.sub, "out", m.pub, func(msg *message.Message) ([]*message.Message, error) {
		m.handled.Add(1)
		select {
		case <-time.After(takes):
			return []*message.Message{message.NewMessage(msg.UUID, nil)}, nil
		case <-msg.Context().Done():
			return nil, contextCause(msg)
		}
	})
	return m
}

func newRouter(t *testing.T) *message.Router {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	return router
}

func (m *mill) start(run func() error) {
	go func() { m.ran <- run() }()
	<-m.router.Running()
}

// check verifies that what was handled counts: each message is either acked, and then its output is there, or still with
// the broker.
func (m *mill) check(total int) {
	m.t.Helper()
	outputs := map[string]bool{}
	for _, id := range m.d.pending("out", "g") {
		outputs[id] = true
	}
	acked := m.d.settlements(Ack)
	for _, a := range acked {
		if !outputs[a.ID] {
			m.t.Errorf("%s is acked without its output", a.ID)
		}
	}
	left := m.d.pending("in", "g")
	if len(acked)+len(left) != total {
		m.t.Errorf("%d acked and %d left do not make %d", len(acked), len(left), total)
	}
	if int(m.handled.Load()) != len(acked) {
		m.t.Errorf("%d handled, %d acked", m.handled.Load(), len(acked))
	}
}

// stops are the ways in which a router ends (L04).
func stops() map[string]func(m *mill, cancel context.CancelFunc) {
	return map[string]func(m *mill, cancel context.CancelFunc){
		"Router.Close":    func(m *mill, _ context.CancelFunc) { _ = m.router.Close() },
		"Handler.Stop":    func(m *mill, _ context.CancelFunc) { m.handler.Stop() },
		"cancelled Run":   func(_ *mill, cancel context.CancelFunc) { cancel() },
		"Subscriber.Stop": func(m *mill, _ context.CancelFunc) { _ = m.sub.Stop(context.Background()) },
	}
}

// L04: whatever ends the router, what was in flight publishes its outputs, is acked, and both count.
func TestRouterEndsLoseNothing(t *testing.T) {
	for name, stop := range stops() {
		for _, under := range []string{"plain", "sdk.Run"} {
			t.Run(name+"/"+under, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					m := newMill(t, 5*time.Second)
					m.d.putIDs("in", "g", ids(400)...) // more than the window
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					m.start(func() error {
						if under == "plain" {
							return m.router.Run(ctx)
						}
						return Run(ctx, m.router, m.sub)
					})
					time.Sleep(time.Second) // 256 are running
					stop(m, cancel)
					if err := <-m.ran; err != nil {
						t.Errorf("Run: %v", err)
					}
					m.check(400)
					if n := len(m.d.settlements(Ack)); n != 256 {
						t.Errorf("%d acked, want the window that was in flight", n)
					}
					m.close()
				})
			})
		}
	}
}

// The SignalsHandler plugin calls Close from a goroutine of its own; that is all it does. Under load one message usually is
// between Watermill's decorator and its handler then, and starts only after the running handlers have ended. Not in a bubble:
// the router waits for running handlers with a mutex, which stops virtual time.
func TestASignalWhileMessagesFlow(t *testing.T) {
	for _, after := range []time.Duration{0, time.Millisecond, 7 * time.Millisecond, 23 * time.Millisecond} {
		t.Run(after.String(), func(t *testing.T) {
			m := newMill(t, 10*time.Millisecond)
			sig := make(chan struct{})
			m.router.AddPlugin(func(r *message.Router) error {
				go func() {
					<-sig
					_ = r.Close()
				}()
				return nil
			})
			m.d.putIDs("in", "g", ids(3_000)...)
			m.start(func() error { return m.router.Run(t.Context()) })
			time.Sleep(after)
			close(sig)
			if err := <-m.ran; err != nil {
				t.Errorf("Run: %v", err)
			}
			m.check(3_000)
			m.close()
		})
	}
}

// L05: publishing to the topic that is being handled, from inside the handler, window full.
func TestPublishingToTheTopicBeingHandled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, newFake(confirming()), SubscriberConfig{MaxInFlight: 1})
		pub, _ := newTestPublisher(t, r.d, PublisherConfig{})
		router := newRouter(t)
		var count atomic.Int64
		done := make(chan struct{})
		router.AddConsumerHandler("h", "t", r.sub, func(*message.Message) error {
			n := count.Add(1)
			if n == 100 {
				close(done)
			}
			if n >= 100 {
				return nil
			}
			return pub.Publish("t", messagesOf(fmt.Sprint(n))...)
		})
		r.d.putIDs("t", "g", "0")
		go func() { _ = router.Run(t.Context()) }()
		<-done
		if err := router.Close(); err != nil {
			t.Error(err)
		}
		r.close()
	})
}

func TestAHandlerThatFailsIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, newFake(confirming()), SubscriberConfig{})
		router := newRouter(t)
		var attempts []int
		done := make(chan struct{})
		router.AddConsumerHandler("h", "t", r.sub, func(msg *message.Message) error {
			attempts = append(attempts, mustInfo(t, msg).Attempt)
			switch len(attempts) {
			case 1:
				return errCut
			case 2:
				panic("ouch")
			}
			close(done)
			return nil
		})
		r.d.putIDs("t", "g", "a")
		go func() { _ = router.Run(t.Context()) }()
		<-done
		if err := router.Close(); err != nil {
			t.Error(err)
		}
		if got := fmt.Sprint(attempts); got != "[1 2 3]" || len(r.d.settlements(Ack)) != 1 {
			t.Errorf("attempts %v, %d acks", got, len(r.d.settlements(Ack)))
		}
		r.close()
	})
}

func TestSubscribingAgainAfterStopFailsInTheRouter(t *testing.T) {
	r := newRig(t, newFake(confirming()), SubscriberConfig{})
	r.close()
	router := newRouter(t)
	router.AddConsumerHandler("h", "t", r.sub, func(*message.Message) error { return nil })
	if err := Run(t.Context(), router, r.sub); !errors.Is(err, ErrClosed) {
		t.Errorf("Run: %v", err)
	}
}
