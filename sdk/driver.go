package sdk

import (
	"context"
	"time"
)

// Driver connects one broker. It dials and it translates; it does not supervise: windows, batching, backoff, leases,
// reopening and draining live once, in the engine above it.
//
// All methods may be called by several goroutines at once. Every method that takes a context returns soon after that
// context is done, also when the broker does not answer at all (P08, F03). After Close every method but Capabilities and
// Close returns an error for which errors.Is(err, [ErrClosed]) holds (P09).
//
// A driver returns its client library's errors as they are, or inside an [OutcomeError] where the kind matters. It never
// puts a payload or a credential into an error.
type Driver interface {
	// Capabilities tells what this driver promises at least, for every topic, without any I/O. The zero value describes
	// the weakest broker. A declared capability adds contract clauses and never removes one; each is observed (H01).
	Capabilities() Capabilities

	// Prepare makes sure that the topic, and the group where b.Group is not empty, exist as b asks for: with b.Declare it
	// creates what is missing, else it only verifies and returns an error that names what is missing. It is
	// idempotent, and it is called before the first Send to a topic (Group empty: publishing only) and before every Open.
	// A group exists from its first Prepare on: what is sent later reaches it, whether or not a Source is open (P04, G02).
	Prepare(ctx context.Context, b Binding) error

	// Send stores the batch under the topic, in the order given (P03), byte for byte (P01). nil means that every message
	// reached at least the boundary declared in Capabilities (P04). Any other result is a *[BatchError] that names the
	// entries that failed and the [Outcome] of each; entries it does not name are stored. An error of another type speaks
	// for the whole batch, and its outcome is unknown. A message that no queue takes is an error (P05), a payload larger
	// than the declared maximum is refused as Permanent before anything of it is sent (P07), a lost answer is Unknown
	// (P06). The driver does not keep or change the batch after it returned. An empty batch is nil.
	Send(ctx context.Context, topic string, batch []Message) error

	// Open starts one consumer of a group. The group must have been prepared. Deliveries of one group are shared between
	// its open sources (G01); every group gets every message (G02, where declared).
	Open(ctx context.Context, b Binding) (Source, error)

	// Close closes the driver and all its sources, gives back every connection, goroutine and file (L03), settles nothing
	// and is idempotent (L01). The broker and its messages live on. Only the owner of a driver closes it: closing a
	// Publisher or Subscriber does not.
	Close(ctx context.Context) error
}

// Source is one open consumer: a stream of deliveries and the place where they are settled.
//
// Receive is called by one goroutine. Settle, and Extend where it exists, are called by one other goroutine. Close may
// come from a third at any moment and ends both. An error of Receive other than that of its own context ends the source:
// its tokens are lost, and the engine opens a new one.
type Source interface {
	// Capabilities may add to what the driver declared (a queue type was found out, say); it never takes away (H01).
	Capabilities() Capabilities

	// Receive returns between one and limit deliveries, or none and nil after the driver's own poll time (the engine then
	// waits a little before it asks again). It blocks until there is a delivery, the poll time is over, or ctx is done;
	// then it returns the context's error and has taken nothing. However large limit is, deliveries that are not settled
	// never exceed Binding.Window (D10). An unsettled delivery is not handed to anyone else in the group while its lease
	// and its connection live (D01). What cannot be decoded is delivered with Delivery.Err set and the raw bytes as
	// payload (D16). The caller owns what is returned.
	Receive(ctx context.Context, limit int) ([]Delivery, error)

	// Settle settles deliveries of this source by token, in any order (D09), each on its own. nil means that every
	// settlement was carried out as far as Capabilities.Settle says: confirmed by the broker, or only sent (D14). A
	// *[BatchError] names those that were not; a token that is not, or no longer, in flight here gives [ErrStaleToken] and
	// touches nothing else (D07, D08). A Requeue with a Delay on a broker without DelayedRequeue, and a Reject without
	// Reject, give [ErrUnsupported] and settle nothing. A verdict that is not one of the three is refused likewise.
	Settle(ctx context.Context, batch []Settlement) error

	// Close ends the source and settles nothing: what is unsettled goes back to the broker at once, in its old order
	// where OrderAfterRequeue is declared (D06). It is idempotent.
	Close(ctx context.Context) error
}

// LeaseExtender is implemented by a Source whose deliveries are lent for a limited time ([Capabilities].Lease).
type LeaseExtender interface {
	// Extend sets the lease of each token to end d from now. It is called by the goroutine that calls Settle, and answers
	// like Settle: a lease that is already over gives ErrStaleToken for its token (D11).
	Extend(ctx context.Context, tokens []Token, d time.Duration) error
}

// Barrier is implemented by a Source whose settlements are only sent. The engine calls it before it closes a source.
type Barrier interface {
	// Barrier returns nil once every settlement sent before it is known to have arrived at the broker (D02).
	Barrier(ctx context.Context) error
}

// Binding says what a topic is opened or prepared for.
type Binding struct {
	// Topic is the name messages are sent under. It is never empty.
	Topic string
	// Group names the consumers that share the topic's messages. Empty means publishing only.
	Group string
	// Window is the most deliveries that may be unsettled on this source, at least 1. 0 leaves it to the driver.
	Window int
	// Lease is how long a delivery stays lent without being extended. 0 leaves it to the broker.
	Lease time.Duration
	// Declare asks Prepare to create what is missing. Without it Prepare only verifies.
	Declare bool
}

// Message is what travels: plain data, without channels or a context.
type Message struct {
	// ID is the message's UUID as Watermill knows it. A message from a foreign publisher may have none.
	ID string
	// Key is the order key: messages of one key keep their order where KeyOrdered is declared. Empty means none.
	Key string
	// Metadata travels with the payload. nil and empty are the same.
	Metadata map[string]string
	// Payload is any bytes. nil and empty are the same.
	Payload []byte
}

// Delivery is one attempt to hand a message over.
type Delivery struct {
	Message
	// Token names this attempt to its broker. Another attempt of the same message has another token (D03).
	Token Token
	// Attempt is the broker's own count, 1 for the first attempt, or 0 where the broker does not count. It is a hint: a
	// lost connection raises it too, so nothing may be concluded from it (D18).
	Attempt int
	// Redelivered says that the broker believes to have handed this message out before.
	Redelivered bool
	// Err is set where the message could not be decoded; Payload then holds the raw bytes.
	Err error
}

// Settlement is a verdict on one delivery.
type Settlement struct {
	Token   Token
	Verdict Verdict
	// Delay is for Requeue: the message does not come back before it has passed (D04). 0 means at once.
	Delay time.Duration
}

// Token names one delivery to the broker that made it: opaque bytes that carry the incarnation of the session they
// belong to, so that a late settlement can never hit another message (D07).
type Token string

// Verdict is what is decided about a delivery. The zero value is not a verdict.
type Verdict uint8

// The verdicts.
const (
	// Ack: the message is owned by the consumer, durably, and leaves the group's queue.
	Ack Verdict = iota + 1
	// Requeue: the message comes back to the group, with a new token.
	Requeue
	// Reject: the message leaves the queue for the broker's dead-letter path.
	Reject
)

// String gives the verdict's name in lower case.
func (v Verdict) String() string {
	switch v {
	case Ack:
		return "ack"
	case Requeue:
		return "requeue"
	case Reject:
		return "reject"
	default:
		return "invalid"
	}
}
