package sdk

import "time"

// Capabilities declare what a broker promises, as data. The zero value is the weakest broker. Each field is named like
// the tag that guards contract clauses; declaring a capability adds those clauses. A limit of 0 is unknown, not zero.
type Capabilities struct {
	// Durable: nil from Send means that the message survives the closing and reopening of the driver, and of the broker
	// where it can be restarted [durable]. Without it nil only means accepted.
	Durable bool
	// UnroutableDetected: a message that no queue takes makes Send fail [unroutable-detected].
	UnroutableDetected bool
	// Redelivers: what a dead consumer left unsettled comes back [redelivers].
	Redelivers bool
	// DeliveryCount: Delivery.Attempt counts [delivery-count].
	DeliveryCount bool
	// DelayedRequeue: Settlement.Delay is honoured [delayed-requeue].
	DelayedRequeue bool
	// Reject: Reject moves a message to the broker's dead-letter path [reject].
	Reject bool
	// TxSettle: a delivery can be settled inside the caller's database transaction [tx-settle].
	TxSettle bool
	// Ordered: with a window of 1 a group gets one publisher's messages in the order sent [ordered].
	Ordered bool
	// KeyOrdered: messages of one key are handed out in order whatever the window [key-ordered].
	KeyOrdered bool
	// OrderAfterRequeue: a message requeued without delay comes back before those behind it [order-after-requeue].
	OrderAfterRequeue bool
	// Groups: several groups each get every message [groups].
	Groups bool
	// Settle tells what nil from Source.Settle means.
	Settle SettleBoundary
	// Progress is the model by which the broker remembers what was consumed.
	Progress ProgressModel
	// Lease is the lease given where Binding.Lease is 0; a value above 0 says that deliveries are lent for a time [lease].
	Lease time.Duration
	// MaxPayload is the largest payload Send takes, in bytes.
	MaxPayload int
	// MaxBatch is the largest batch Send takes as one; the engine splits larger ones.
	MaxBatch int
	// DeliveryLimit is the number of attempts after which the broker itself gives a message up.
	DeliveryLimit int
	// Horizon is the redelivery horizon: the longest time after which a message can still come back.
	Horizon time.Duration
}

// SettleBoundary is what has completed when Source.Settle returns nil.
type SettleBoundary uint8

// The settle boundaries.
const (
	// SettleUnknown: nothing is declared.
	SettleUnknown SettleBoundary = iota
	// SettleSent: the settlement was handed to the broker, which does not answer.
	SettleSent
	// SettleConfirmed: the broker answered that it settled.
	SettleConfirmed
)

// ProgressModel is how a broker remembers what a group has consumed.
type ProgressModel uint8

// The progress models.
const (
	// ProgressUnknown: nothing is declared.
	ProgressUnknown ProgressModel = iota
	// ProgressPerDelivery: each delivery is settled on its own.
	ProgressPerDelivery
	// ProgressOffset: one offset says that everything before it is done.
	ProgressOffset
	// ProgressLease: deliveries are lent and come back when the lease ends.
	ProgressLease
)

// Limits are the bounds of a subscription that code above it has to respect. Zero is unknown: it is not checked, and
// reported as unchecked.
type Limits struct {
	// MaxInFlight is the most messages handed out and not settled.
	MaxInFlight int
	// Lease is how long a delivery stays ours without being extended.
	Lease time.Duration
	// Horizon is the longest time after which a message can come back.
	Horizon time.Duration
}
