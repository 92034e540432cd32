package sdk

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
)

type (
	greetingAskedKey struct{}
	greetingKey      struct{}
)

// WithGreeting asks a [Subscriber] for a message of its own: Subscribe hands it out first, before there is anything from the
// broker. It is for a subscriber decorator that needs to know at once what a router puts into the contexts of messages, the
// handler's name above all. The decorator must not pass it on: see [IsGreeting]. Other subscribers do not know of it.
func WithGreeting(ctx context.Context) context.Context {
	return context.WithValue(ctx, greetingAskedKey{}, true)
}

// IsGreeting tells whether a message is the one that WithGreeting asked for. It is empty, its [DeliveryInfo] has topic,
// group and limits and Attempt 0, nobody waits for its settlement, and its context is never cancelled.
func IsGreeting(msg *message.Message) bool {
	return msg.Context().Value(greetingKey{}) != nil
}

// greet hands out the greeting where one was asked for.
func (s *subscription) greet(limits Limits) {
	if s.base.Value(greetingAskedKey{}) == nil {
		return
	}
	ctx := context.WithValue(s.base, greetingKey{}, true)
	info := &DeliveryInfo{Topic: s.topic, Group: s.owner.cfg.Group, Limits: limits, ending: s.life.Done()}
	select {
	case s.out <- message.NewMessageWithContext(WithDelivery(ctx, info), "", nil):
	case <-s.life.Done():
	}
}
