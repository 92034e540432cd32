package idempotency

import (
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// Config describes one consumer. Consumer is required; the zero value of everything else is right.
type Config struct {
	// Consumer names the application that consumes, "billing" say. It is part of every receipt's scope: changing it makes
	// all messages look new.
	Consumer string

	// IdentityField is the metadata field that holds the message identity. A message without it is refused: there is no
	// falling through. Empty means: CloudEvents source and id where both are present in one spelling, the first of ce_source
	// and ce_id, ce-source and ce-id, Ce-Source and Ce-Id, cloudEvents:source and cloudEvents:id, cloudEvents_source and
	// cloudEvents_id; else the message's UUID.
	IdentityField string

	// Scope replaces handler name and topic in the scope: handlers that return the same Scope share receipts. Use it only
	// to make the scope coarser, knowingly. "" means consumer + router handler name + subscribe topic.
	Scope string

	// Aliases serves renames: it maps a handler's present name to the name its receipts were written under.
	Aliases map[string]string

	// Fingerprint gives the fingerprint that tells a conflict from a replay, at most 64 bytes; nil means SHA-256 of the
	// payload, without metadata. It is not asked about a message without a valid identity.
	Fingerprint func(msg *message.Message) []byte

	// Validate refuses a message before anything is claimed: a non-nil error diverts it without a receipt, and the dead
	// letter keeps its identity key. It must not have effects.
	Validate func(msg *message.Message) error

	// Outputs sends stored outputs after the commit. It belongs to the caller, who closes it after the router stopped; it
	// must not be the publisher given to AddHandler, which the router closes. nil: a handler that produces outputs fails
	// before its commit.
	Outputs message.Publisher

	// OutputsThroughRouter hands outputs of Wrap back to the router instead, for applications whose publisher decorators
	// must see them. It is weaker: a failed publish nacks the input, whose replay publishes all its outputs again, with
	// the same ids. The relay leaves such outputs alone.
	OutputsThroughRouter bool

	// Inside are handler middlewares that run inside the transaction, the first one outermost: what changes outputs
	// belongs here (correlation ids, tracing headers). What retries or swallows errors does not.
	Inside []message.HandlerMiddleware

	// RequireTx refuses a wrapped handler that returned without having asked for its transaction: its effect cannot have
	// been inside it. Without it such a handler is counted and logged once. Handlers that ignore some messages, such as a
	// cqrs.EventProcessor with AckOnUnknownEvent, are refused too.
	RequireTx bool

	// Guarantee is EffectivelyOnce unless set.
	Guarantee Guarantee

	// Conflict says what happens to a message whose identity was processed with another payload.
	Conflict ConflictPolicy

	// MaxAttempts is reserved: any value but 0 is refused for now, a failing handler is retried without end.
	MaxAttempts int

	// Limits are those of the subscription: sub.Limits() of an sdk.Subscriber, or by hand. What is zero is not checked and
	// listed in Report. A delivery that carries stricter ones fails, with the remedy, before its handler runs.
	Limits sdk.Limits

	// Atomicity says what one message's failure does to the others of its batch.
	Atomicity Atomicity

	// BatchSize is the most messages that share a transaction; 0 means 256. A message never waits for others to come: a
	// batch is what arrived while the transaction before it ran. 1 means a transaction for each message.
	BatchSize int

	// BatchTime is how long a batch's handlers may have run when it takes up another message; 0 means 20 ms, or half of a
	// TxBudget that is shorter than 40 ms. It must be below TxBudget. It keeps slow
	// handlers from delaying each other's commit. A function for HandleBatch gets its batch in one call, which this does not
	// end.
	BatchTime time.Duration

	// Lanes is the most transactions that run at a time, of which each handler uses what is found to do best; 0 means as many as
	// the store says make sense. It never exceeds that
	// number, nor the connections of the pool less one.
	Lanes int

	// MaxPending is the most deliveries that are taken up at a time; 0 means 4096. Further ones wait at the door, without
	// anything being kept for them.
	MaxPending int

	// LockKeys names the rows that a message's handler will touch. A batch runs its messages in the order of these names, so
	// that those of several processes do not lock each other out, and in one process a message waits outside while a transaction
	// has a row of the same name; nil means that nothing is known of them.
	LockKeys func(msg *message.Message) []string

	// OrderKey gives the key whose messages are handled in the order they were handed out, "" for a message without order. It
	// needs the decorator Ordered on the router's subscribers. nil means no order.
	OrderKey func(msg *message.Message) string

	// OrderPolicy says what happens when messages of failing order keys would take more than half of the window, which is
	// Limits.MaxInFlight or what the delivery says; 256 where nobody knows.
	OrderPolicy OrderPolicy

	// TxBudget is the longest time a transaction may stay open; 0 means 10 s, and 1 ms is the least. It must be below
	// Limits.Lease.
	TxBudget time.Duration

	// ContentionRetries is how often a transaction that met contention is tried again, with jittered backoff, before the
	// message goes back to the broker, uncharged. 0 means 8.
	ContentionRetries int

	// RetryBackoff bounds how long a foreign subscriber's failed message is held before it is nacked: Min grows to Max by
	// doubling, with full jitter above Min, but never beyond half of Limits.Lease. Zero means 100 ms to 1 min. Messages of an
	// sdk.Subscriber are requeued with that subscriber's own backoff. Messages with an order key are held by Ordered, with
	// this one, whoever they come from.
	RetryBackoff sdk.Backoff

	// Logger is Watermill's; nil logs nothing.
	Logger watermill.LoggerAdapter
}

// Guarantee is what a committed message is worth.
type Guarantee uint8

// The guarantees. Effects outside the transaction are outside all of them.
const (
	// EffectivelyOnce: effect and receipt commit together; a redelivery changes nothing.
	EffectivelyOnce Guarantee = iota
	// AtLeastOnce: transaction and deferred acknowledgement, no receipt: never lost, perhaps applied again. No conflict
	// check; outputs get fresh ids on each attempt; an unknown COMMIT is nacked.
	AtLeastOnce
	// AtMostOnce: the receipt commits in a transaction of its own before the handler runs in a second one: never applied
	// twice, perhaps lost. Not only a crash loses the message, any error of the handler does: what comes again is a replay.
	AtMostOnce
)

// Atomicity says what one message's failure does to the others of its batch.
type Atomicity uint8

// The atomicities.
const (
	// PerMessage: a failure undoes the work of its own message only. A handler may run again though it did not fail itself:
	// its effects must all be inside the transaction, or repeatable.
	PerMessage Atomicity = iota
	// PerBatch: all messages of a batch commit, or none; earlier batches stay. Not with AtMostOnce, where a failure loses them.
	PerBatch
)

// ConflictPolicy says what happens to a conflict: an identity that comes again with another payload.
type ConflictPolicy uint8

// The conflict policies.
const (
	// DivertConflicts stores a dead letter, then acknowledges.
	DivertConflicts ConflictPolicy = iota
	// HoldConflicts fails the delivery with backoff, so that it stays with the broker until someone acts.
	HoldConflicts
)
