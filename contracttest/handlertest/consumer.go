package handlertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/sdk"
)

const (
	group = "handlertest"
	// pollEvery is how often the counters are looked at while something is awaited.
	pollEvery = 10 * time.Millisecond
	// stopMargin is what a consumer may take to stop beyond the time its handler is given.
	stopMargin = 20 * time.Second
)

// consumer is one life of the application's consumer: middleware, router and subscriber, made as a process makes them.
type consumer[T any] struct {
	b      *bench[T]
	m      *idempotency.Middleware[T]
	cancel context.CancelFunc
	ended  chan error
}

// start returns when the consumer has subscribed.
func (b *bench[T]) start(ctx context.Context) (*consumer[T], error) {
	sub, err := sdk.NewSubscriber(b.driver, sdk.SubscriberConfig{
		Group: group, Lease: b.lease(), DrainTimeout: b.c.Patience / 4, Observer: sdk.ObserverFunc(b.observe),
		Backoff: sdk.Backoff{Min: time.Millisecond, Max: 20 * time.Millisecond},
	})
	if err != nil {
		return nil, err
	}
	m, err := idempotency.New(b.store, b.config(sub.Limits()))
	if err != nil {
		return nil, err
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: b.c.Patience / 2}, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	router.AddMiddleware(b.outside)
	if err := b.c.add(m, router, sub); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	c := &consumer[T]{b: b, m: m, cancel: cancel, ended: make(chan error, 1)}
	go func() { c.ended <- sdk.Run(ctx, router, sub) }()
	select {
	case <-router.Running():
		return c, nil
	case err := <-c.ended:
		cancel()
		return nil, fmt.Errorf("the router did not start: %w", err)
	}
}

// observe counts acknowledgements that the broker has confirmed.
func (b *bench[T]) observe(e sdk.Event) {
	if e.Kind == sdk.EventSettled && e.Verdict == sdk.Ack && e.Outcome == sdk.SettleOutcomeConfirmed {
		select {
		case b.acked <- struct{}{}:
		default:
		}
	}
}

// deliver publishes copies of one message and waits until all are acknowledged, or something is found.
func (c *consumer[T]) deliver(ctx context.Context, copies int) error {
	msg := c.b.c.Message()
	msgs := make([]*message.Message, copies)
	for i := range msgs {
		msgs[i] = msg.Copy()
	}
	if err := c.b.pub.PublishContext(ctx, c.b.c.Topic, msgs...); err != nil {
		if errors.Is(err, sdk.ErrUnroutable) {
			return fmt.Errorf("nobody subscribed to the case's Topic %q with the subscriber that Register was given: %w", c.b.c.Topic, err)
		}
		return err
	}
	patience := time.NewTimer(c.b.c.Patience)
	defer patience.Stop()
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for copies > 0 {
		select {
		case <-c.b.acked:
			copies--
		case <-c.b.found:
			return c.b.why()
		case <-poll.C:
			if !c.b.plan.together && c.m.Report().Contention > 0 {
				return errors.New(waitsForItself)
			}
		case err := <-c.ended:
			c.ended <- err
			return fmt.Errorf("the router ended by itself: %w", err)
		case <-patience.C:
			return fmt.Errorf("the message was not acknowledged within %v (%s)", c.b.c.Patience, summary(c.m.Report()))
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return c.b.why()
}

// why gives the finding, if there is one.
func (b *bench[T]) why() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.finding
}

// stop ends the consumer in an orderly way.
func (c *consumer[T]) stop() error {
	c.b.mu.Lock()
	c.b.stopping = true
	c.b.mu.Unlock()
	c.cancel()
	select {
	case err := <-c.ended:
		if err != nil {
			return fmt.Errorf("stopping the consumer: %w", err)
		}
	case <-time.After(c.b.c.Patience + stopMargin):
		return errors.New("the consumer does not stop: the handler stands still")
	}
	c.b.mu.Lock()
	c.b.stopping = false
	c.b.mu.Unlock()
	return nil
}

// live is one whole life: start, deliver so many copies so many times, stop, and what the middleware counted.
func (b *bench[T]) live(ctx context.Context, times, copies int) (idempotency.Report, error) {
	c, err := b.start(ctx)
	if err != nil {
		return idempotency.Report{}, err
	}
	for i := 0; i < times && err == nil; i++ {
		err = c.deliver(ctx, copies)
	}
	stopErr := c.stop()
	if err == nil { // else the reason is known, and why it does not stop either is no news
		err = stopErr
	}
	return c.m.Report(), err
}
