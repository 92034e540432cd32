package idempotency

import (
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Publisher makes a publisher for use inside handlers, by a cqrs.EventBus or CommandBus for instance. A message whose
// context carries the open transaction of this middleware becomes an output: it is copied, stored with the effect, and
// sent through Config.Outputs after the commit; nil then means that it will be sent if, and only if, the handler's
// transaction commits. Any other message goes through pub at once, and the answer is pub's. A transaction that is over is
// ErrTxOver; outputs that could not be sent later are ErrNoOutputs, and then the transaction cannot commit. Of one call,
// messages are taken in their order; after an error, those before it have been taken.
//
// It is safe for concurrent use as far as pub is. Close closes pub. pub may be nil: then messages without transaction
// are refused.
func (m *Middleware[T]) Publisher(pub message.Publisher) message.Publisher {
	return &publisher[T]{m: m, pub: pub}
}

type publisher[T any] struct {
	m   *Middleware[T]
	pub message.Publisher
}

var errNoPublisher = errors.New("idempotency: a message without the transaction of a handled message, and Publisher was given no publisher for it: " +
	"set the handler's context on the message, or give Publisher one")

// Publish implements message.Publisher.
func (p *publisher[T]) Publish(topic string, messages ...*message.Message) error {
	for len(messages) > 0 {
		c := carrierOf(messages[0].Context(), p.m)
		n := 1
		for n < len(messages) && carrierOf(messages[n].Context(), p.m) == c {
			n++
		}
		if err := p.publish(c, topic, messages[:n]); err != nil {
			return err
		}
		messages = messages[n:]
	}
	return nil
}

func (p *publisher[T]) publish(c *carrier, topic string, messages []*message.Message) error {
	if c == nil {
		if p.pub == nil {
			return errNoPublisher
		}
		return p.pub.Publish(topic, messages...)
	}
	if c.isOver() {
		return ErrTxOver
	}
	err := p.m.acceptOutput(c.route, topic)
	if c.together {
		err = errWhose
	}
	if err != nil {
		c.spoil(err)
		return err
	}
	copies := make([]*message.Message, len(messages))
	for i, msg := range messages {
		copies[i] = toTopic(topic, msg)
	}
	return c.add(copies)
}

// Close closes the wrapped publisher.
func (p *publisher[T]) Close() error {
	if p.pub == nil {
		return nil
	}
	return p.pub.Close()
}
