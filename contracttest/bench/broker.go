package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

const (
	topic    = "events"
	group    = "bench"
	consumer = "bench"

	payloadSize  = 256
	counterCount = 1024
)

// counterName is the counter that message i increments. Its payload begins with it.
func counterName(i int) string { return fmt.Sprintf("c%04d", i%counterCount) }

// counterOf gives the counter that a payload names.
func counterOf(payload []byte) string { return string(payload[:5]) }

// counterNumber is the number of that counter.
func counterNumber(payload []byte) (n int) {
	for _, digit := range payload[1:5] {
		n = 10*n + int(digit-'0')
	}
	return n
}

// workload makes a round's messages, the same at every call.
func workload(w work) []sdk.Message {
	n := w.messages
	noise := rand.NewChaCha8([32]byte{})
	msgs := make([]sdk.Message, n)
	for i := range msgs {
		payload := make([]byte, payloadSize)
		_, _ = noise.Read(payload) // never fails
		copy(payload, counterName(i))
		msgs[i] = sdk.Message{ID: w.id(i), Payload: payload}
	}
	return msgs
}

// id is the identity of message i. They rise, as those do that hold a time, unless the study says otherwise.
func (w work) id(i int) string {
	if w.scattered {
		return scattered(w.first + i)
	}
	return fmt.Sprintf("message-%06d", w.first+i)
}

// openBroker gives a driver on a broker of its own, with topic and group.
func openBroker(ctx context.Context, capacity int) (sdk.Driver, error) {
	driver, err := memory.NewNetwork(memory.Options{Capacity: max(capacity, memory.DefaultCapacity)}).Driver("bench")
	if err != nil {
		return nil, err
	}
	if err := driver.Prepare(ctx, sdk.Binding{Topic: topic, Group: group, Declare: true}); err != nil {
		return nil, errors.Join(err, driver.Close(ctx))
	}
	return driver, nil
}

// acks waits for the broker's confirmation of every message. Anything else that happens to a message spoils the round:
// repeats would be measured as work.
type acks struct {
	left    atomic.Int64
	done    chan struct{}
	spoiled chan error
	each    func(id string) // nil: nobody wants to know
}

func newAcks(n int) *acks {
	a := &acks{done: make(chan struct{}), spoiled: make(chan error, 1)}
	a.left.Store(int64(n))
	return a
}

// Observe counts.
func (a *acks) Observe(e sdk.Event) {
	switch {
	case e.Kind == sdk.EventSourceOpened:
		return
	case e.Kind != sdk.EventSettled, e.Verdict != sdk.Ack, e.Outcome != sdk.SettleOutcomeConfirmed:
		select {
		case a.spoiled <- fmt.Errorf("message %s: %s, %s: %w", e.ID, e.Kind, e.Verdict, e.Err):
		default: // the first one is told
		}
		return
	}
	if a.each != nil {
		a.each(e.ID)
	}
	if a.left.Add(-1) == 0 {
		close(a.done)
	}
}

func (a *acks) wait(ctx context.Context) error {
	select {
	case <-a.done:
		return nil
	case err := <-a.spoiled:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// serve makes a handler for a subscription with these limits.
type serve func(limits sdk.Limits) (message.NoPublishHandlerFunc, error)

// running is a router that consumes.
type running struct {
	router *message.Router
	stop   context.CancelFunc
	ended  chan error
}

// consume starts a router with one handler. The caller stops it.
func consume(ctx context.Context, driver sdk.Driver, window int, a *acks, handler serve) (*running, error) {
	sub, err := sdk.NewSubscriber(driver, sdk.SubscriberConfig{Group: group, MaxInFlight: window, Observer: a})
	if err != nil {
		return nil, err
	}
	handle, err := handler(sub.Limits())
	if err != nil {
		return nil, err
	}
	c := &running{router: message.NewDefaultRouter(watermill.NopLogger{}), ended: make(chan error, 1)}
	c.router.AddConsumerHandler("count", topic, sub, handle)
	ctx, c.stop = context.WithCancel(ctx)
	go func() { c.ended <- sdk.Run(ctx, c.router, sub) }()
	return c, nil
}

// end stops the router and waits for it.
func (c *running) end() error {
	c.stop()
	return <-c.ended
}

// through measures how long a router takes for messages that are all there.
func through(ctx context.Context, w work, handler serve) (took time.Duration, err error) {
	driver, err := openBroker(ctx, w.messages)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, driver.Close(context.WithoutCancel(ctx))) }()
	if err := driver.Send(ctx, topic, workload(w)); err != nil {
		return 0, err
	}
	a := newAcks(w.messages)
	began := time.Now()
	c, err := consume(ctx, driver, w.window, a, handler)
	if err != nil {
		return 0, err
	}
	err = a.wait(ctx)
	took = time.Since(began)
	return took, errors.Join(err, c.end())
}

// perSecond is the figure of a throughput.
func perSecond(messages int, took time.Duration) []value {
	return []value{{"throughput", "msg/s", float64(messages) / took.Seconds()}}
}
