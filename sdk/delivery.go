package sdk

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// The causes ([context.Cause]) for which the context of a message ends before the message is settled. An Ack or Nack
// after that is ignored, so work that was not committed should not be.
var (
	// ErrDeliveryLost: the source or the lease of the delivery is over; the broker hands the message out again.
	ErrDeliveryLost = errors.New("the delivery is lost: its source or its lease ended")
	// ErrAbandoned: the message was not settled within MaxProcessing and was requeued.
	ErrAbandoned = errors.New("the message was not settled within MaxProcessing")
	// ErrDrainTimeout: the subscription closed before the message was settled; the broker hands it out again.
	ErrDrainTimeout = errors.New("the subscription closed before the message was settled")
)

// DeliveryInfo tells a handler about the delivery that it handles.
type DeliveryInfo struct {
	// Attempt counts the attempts from 1, as far as this subscription or the broker knows. It is a hint: a lost connection
	// may raise it, another consumer may lower it.
	Attempt int
	// Redelivered says that this is not the first attempt, as far as broker and engine know.
	Redelivered bool
	// Token names the delivery to its broker. It changes when the broker, not the engine, hands the message out again.
	Token Token
	// Topic and Group are those of the subscription.
	Topic, Group string
	// Limits are those of the source the delivery came from.
	Limits Limits

	delay atomic.Int64 // 0: not set; else nanoseconds, at least 1

	origin *inflight       // nil where no Subscriber took it from a broker
	try    *try            // the attempt of origin that it belongs to
	ending <-chan struct{} // of the subscription
}

// RequeueAfter sets the delay for the Nack that follows; without it the subscription's backoff applies. A delay below
// Backoff.Min is raised to it. The last call before the Nack counts. It is safe for concurrent use and does nothing after
// the message is settled.
func (d *DeliveryInfo) RequeueAfter(delay time.Duration) {
	d.delay.Store(max(int64(delay), 1))
}

type deliveryKey struct{}

// DeliveryFrom gives the delivery that a message's context belongs to. false means that the message did not come from
// a [Subscriber] of this package.
func DeliveryFrom(ctx context.Context) (*DeliveryInfo, bool) {
	info, ok := ctx.Value(deliveryKey{}).(*DeliveryInfo)
	return info, ok
}

// deliveryContext is a context that knows its delivery. It saves the second layer that context.WithValue would add to
// every message.
type deliveryContext struct {
	context.Context
	info *DeliveryInfo
}

// Value gives the delivery, or what the context below holds.
func (c *deliveryContext) Value(key any) any {
	if _, ok := key.(deliveryKey); ok {
		return c.info
	}
	return c.Context.Value(key)
}
