package contracttest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// The backoff of the clauses about the engine: short, so that real time suffices.
const (
	engineMin = 50 * time.Millisecond
	engineMax = 200 * time.Millisecond
)

// engine is a bench with the SDK's publisher and a subscriber of the bench's group on top.
type engine struct {
	*bench
	sub *sdk.Subscriber
	pub *sdk.Publisher
}

// engine makes one with a window; adjust may change the subscriber's configuration. Both are closed with the clause.
func (e *Env) engine(ctx context.Context, window int, adjust func(*sdk.SubscriberConfig)) (*engine, error) {
	b, err := e.bench(ctx)
	if err != nil {
		return nil, err
	}
	backoff := sdk.Backoff{Min: engineMin, Max: engineMax}
	cfg := sdk.SubscriberConfig{Group: b.group, MaxInFlight: window, DrainTimeout: e.h.Patience / 10, Backoff: backoff}
	if adjust != nil {
		adjust(&cfg)
	}
	sub, err := sdk.NewSubscriber(b.d, cfg)
	if err != nil {
		return nil, fmt.Errorf("making a subscriber: %w", err)
	}
	pub, err := sdk.NewPublisher(b.d, sdk.PublisherConfig{Timeout: e.h.Patience, Backoff: backoff})
	if err != nil {
		return nil, fmt.Errorf("making a publisher: %w", err)
	}
	e.atEnd(func() error { return errors.Join(sub.Close(), pub.Close()) })
	return &engine{bench: b, sub: sub, pub: pub}, nil
}

// subscribe subscribes to the bench's topic.
func (g *engine) subscribe(ctx context.Context) (<-chan *message.Message, error) {
	ch, err := g.sub.Subscribe(ctx, g.topic)
	if err != nil {
		return nil, fmt.Errorf("subscribing to %s: %w", g.topic, err)
	}
	return ch, nil
}

// next waits for the next message of a subscription.
func (e *Env) next(ctx context.Context, ch <-chan *message.Message) (*message.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, e.h.Patience)
	defer cancel()
	select {
	case msg, ok := <-ch:
		if !ok {
			return nil, errors.New("the output channel is closed")
		}
		return msg, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for a message: %w", ctx.Err())
	}
}

// closed waits until a subscription's channel is closed. What still comes is left unsettled.
func (e *Env) closed(ctx context.Context, ch <-chan *message.Message) error {
	ctx, cancel := context.WithTimeout(ctx, e.h.Patience)
	defer cancel()
	for {
		select {
		case _, ok := <-ch:
			if !ok {
				return nil
			}
		case <-ctx.Done():
			return fmt.Errorf("waiting for the output channel to close: %w", ctx.Err())
		}
	}
}

// acknowledged opens a driver of its own and fails if one of the messages is still in the group. The engine must be
// stopped, so that it does not take the fences.
func (g *engine) acknowledged(ctx context.Context, msgs ...sdk.Message) error {
	other, err := g.another(ctx)
	if err != nil {
		return err
	}
	if err := other.absent(ctx, msgs...); err != nil {
		return fmt.Errorf("what was acked: %w", err)
	}
	return nil
}
