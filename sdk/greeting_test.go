package sdk

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

func TestAGreetingComesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := newRig(t, d, SubscriberConfig{MaxInFlight: 3})
		d.putIDs("t", "g", "a")
		out, err := r.sub.Subscribe(WithGreeting(t.Context()), "t")
		if err != nil {
			t.Fatal(err)
		}
		r.out = out
		greeting := r.next()
		info := mustInfo(t, greeting)
		if !IsGreeting(greeting) || greeting.UUID != "" || len(greeting.Payload) != 0 {
			t.Errorf("the first message is %q", greeting.UUID)
		}
		if info.Attempt != 0 || info.Topic != "t" || info.Group != "g" || info.Limits.MaxInFlight != 3 {
			t.Errorf("its delivery is %+v", info)
		}
		a := r.next() // although nobody settled the greeting
		if IsGreeting(a) || a.UUID != "a" {
			t.Errorf("the second message is %q", a.UUID)
		}
		if n := r.sub.InFlight(); n != 1 {
			t.Errorf("%d messages are in flight", n)
		}
		greeting.Ack()
		a.Ack()
		info.Hold() // and nothing happens
		info.Resume()
		select {
		case <-info.Ending():
			t.Error("it ends already")
		default:
		}
		r.close()
		<-info.Ending()
		if greeting.Context().Err() != nil {
			t.Error("the greeting's context was cancelled")
		}
	})
}

// Nobody is greeted who did not ask, and a greeting that nobody takes is in nobody's way.
func TestGreetingIsAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		if msg := r.next(); IsGreeting(msg) || msg.UUID != "a" {
			t.Errorf("greeted with %q", msg.UUID)
		} else {
			msg.Ack()
		}
		if _, err := r.sub.Subscribe(WithGreeting(context.Background()), "other"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		start := time.Now()
		r.close()
		if d := time.Since(start); d > time.Second {
			t.Errorf("the end took %v", d)
		}
	})
}

// What it is for: the router's own values are in its context.
func TestAGreetingKnowsItsHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := newRig(t, d, SubscriberConfig{})
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		if err != nil {
			t.Fatal(err)
		}
		greeted := make(chan string, 1)
		router.AddSubscriberDecorators(func(sub message.Subscriber) (message.Subscriber, error) {
			return greetedSubscriber{sub, greeted}, nil
		})
		router.AddConsumerHandler("charge", "t", r.sub, func(*message.Message) error { return nil })
		ran := make(chan error, 1)
		go func() { ran <- router.Run(context.Background()) }()
		if name := <-greeted; name != "charge" {
			t.Errorf("the greeting is for handler %q", name)
		}
		<-router.Running()
		if err := router.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ran; err != nil {
			t.Error(err)
		}
	})
}

type greetedSubscriber struct {
	message.Subscriber
	greeted chan string
}

func (g greetedSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := g.Subscriber.Subscribe(WithGreeting(ctx), topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for msg := range in {
			if IsGreeting(msg) {
				g.greeted <- message.HandlerNameFromCtx(msg.Context())
				continue
			}
			out <- msg
		}
	}()
	return out, nil
}
