package memory_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// pubsub makes publishers and subscribers for Watermill's own suite, each on a connection of its own to one broker.
type pubsub struct {
	net    *memory.Network
	window int
}

// constructor is for the tests that do not speak of groups: all their subscribers share one.
func (p pubsub) constructor(t *testing.T) (message.Publisher, message.Subscriber) {
	return p.group(t, "watermill")
}

// group ends with the test what the suite leaves open: a multiplied subscriber that it closes before it subscribes.
func (p pubsub) group(t *testing.T, group string) (message.Publisher, message.Subscriber) {
	t.Helper()
	d, err := p.net.Driver("watermill")
	if err != nil {
		t.Fatal(err)
	}
	backoff := sdk.Backoff{Min: time.Millisecond, Max: 10 * time.Millisecond} // one test nacks a message 100 times in a row
	pub, err := sdk.NewPublisher(d, sdk.PublisherConfig{Backoff: backoff})
	if err != nil {
		t.Fatal(err)
	}
	sub, err := sdk.NewSubscriber(d, sdk.SubscriberConfig{
		Group: group, MaxInFlight: p.window, Backoff: backoff,
		DrainTimeout: time.Second, // one test closes while it holds a message, and waits for the end of its context
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(pub.Close(), sub.Close(), d.Close(context.Background())); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return pub, sub
}

// one is the window that keeps the order: the next message is handed out when the previous one is settled. Several
// subscribers of one group share its messages, each in order.
func one() (pubsub, tests.Features) {
	return pubsub{net: memory.NewNetwork(memory.Options{}), window: 1}, tests.Features{
		ConsumerGroups:                      true,
		GuaranteedOrder:                     true,
		GuaranteedOrderWithSingleSubscriber: true,
		Persistent:                          true, // the network outlives publishers and subscribers
	}
}

// many is the default window: messages are handed out in order, but not one by one, which the suite asks of an order.
func many() (pubsub, tests.Features) {
	return pubsub{net: memory.NewNetwork(memory.Options{})}, tests.Features{ConsumerGroups: true, Persistent: true}
}

func TestWatermillSuiteOneByOne(t *testing.T) {
	p, features := one()
	tests.TestPubSub(t, features, p.constructor, p.group)
}

func TestWatermillSuiteWithAWindow(t *testing.T) {
	p, features := many()
	tests.TestPubSub(t, features, p.constructor, p.group)
}
