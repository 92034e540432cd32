package sdk

import (
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// Observer is told what the engine does. Observe is called by many goroutines at once, from the path that messages take:
// it must return soon, must not panic, and must not call back into the subscriber or publisher.
type Observer interface {
	Observe(Event)
}

// ObserverFunc makes an Observer of a function.
type ObserverFunc func(Event)

var _ Observer = ObserverFunc(nil)

// Observe calls f.
func (f ObserverFunc) Observe(e Event) { f(e) }

// Event is one thing that happened. Fields that mean nothing for a kind are zero. It never holds a payload.
type Event struct {
	Kind  EventKind
	Topic string
	// Group is empty for events of a publisher.
	Group string
	// ID is the message's UUID; Token names the delivery.
	ID    string
	Token Token
	// Attempt is the attempt of the message, of opening, or of publishing, counted from 1.
	Attempt int
	Verdict Verdict
	// Outcome is set for EventSettled.
	Outcome SettleOutcome
	// Delay is the time until the message, or the next attempt, comes.
	Delay time.Duration
	Err   error
}

// EventKind says what happened. The zero value is not a kind.
type EventKind uint8

// The kinds of events.
const (
	// EventSettled: a verdict reached its end; Outcome tells which, Err why if it failed. A late Ack or Nack of a lost
	// delivery is reported as failed, too.
	EventSettled EventKind = iota + 1
	// EventHeld: a nacked message waits in the engine for Delay, then it is handed out again.
	EventHeld
	// EventSourceOpened: a source was opened; Attempt counts the tries it took.
	EventSourceOpened
	// EventOpenFailed: opening failed with Err for the Attempt-th time in a row. It is tried again after a backoff, unless
	// the driver was closed: then the subscription ends.
	EventOpenFailed
	// EventSourceLost: a source ended with Err; its tokens are lost and another is being opened.
	EventSourceLost
	// EventDeliveryLost: one delivery's lease is over although its source lives.
	EventDeliveryLost
	// EventPoison: a delivery could not be decoded; Err says why.
	EventPoison
	// EventAbandoned: a message was not settled within MaxProcessing.
	EventAbandoned
	// EventDrainTimeout: a stopping subscription gave up waiting; Attempt holds the number of unsettled messages.
	EventDrainTimeout
	// EventPublishRetried: publishing failed with Err and is tried again after Delay.
	EventPublishRetried
)

// String gives the kind's name in lower case.
func (k EventKind) String() string {
	names := [...]string{
		"invalid", "settled", "held", "source opened", "open failed", "source lost", "delivery lost", "poison", "abandoned",
		"drain timeout", "publish retried",
	}
	if int(k) >= len(names) {
		return names[0]
	}
	return names[k]
}

// SettleOutcome is what is known about a settlement in the end. The zero value is not an outcome.
type SettleOutcome uint8

// The outcomes of a settlement.
const (
	// SettleOutcomeConfirmed: the broker said that it settled.
	SettleOutcomeConfirmed SettleOutcome = iota + 1
	// SettleOutcomeSent: it was handed to a broker that does not answer.
	SettleOutcomeSent
	// SettleOutcomeFailed: it was not carried out; the message will come back, or already came back.
	SettleOutcomeFailed
	// SettleOutcomeUnknown: the answer was lost; the message may come back.
	SettleOutcomeUnknown
)

// String gives the outcome's name in lower case.
func (o SettleOutcome) String() string {
	switch o {
	case SettleOutcomeConfirmed:
		return "confirmed"
	case SettleOutcomeSent:
		return "sent"
	case SettleOutcomeFailed:
		return "failed"
	case SettleOutcomeUnknown:
		return "unknown"
	default:
		return "invalid"
	}
}

// outcomeOfFailure tells whether a failed settlement was surely not carried out.
func outcomeOfFailure(err error) SettleOutcome {
	if isRefusal(err) || OutcomeOf(err) == OutcomeRejected {
		return SettleOutcomeFailed
	}
	return SettleOutcomeUnknown
}

// reporter sends events to the observer and writes the ones that people should see to the log.
type reporter struct {
	observer Observer
	logger   watermill.LoggerAdapter
}

// wants tells whether an event without an error is worth building.
func (r reporter) wants() bool { return r.observer != nil }

func (r reporter) report(events ...Event) {
	for _, e := range events {
		r.log(e)
		if r.observer != nil {
			r.observer.Observe(e)
		}
	}
}

// expected tells what belongs to a fault that is reported elsewhere, or that is tried again.
func (e Event) expected() bool {
	late := e.Kind == EventSettled && errors.Is(e.Err, ErrDeliveryLost)
	return late || e.Kind == EventPublishRetried || e.Kind == EventOpenFailed
}

func (r reporter) log(e Event) {
	if e.Err == nil && e.Kind != EventDrainTimeout && e.Kind != EventAbandoned {
		return
	}
	fields := watermill.LogFields{"topic": e.Topic, "attempt": e.Attempt}
	if e.Group != "" {
		fields["group"] = e.Group
	}
	if e.ID != "" {
		fields["message_uuid"] = e.ID
	}
	if e.Delay > 0 {
		fields["delay"] = e.Delay.String()
	}
	if e.Verdict != 0 {
		fields["verdict"] = e.Verdict.String()
	}
	if e.expected() {
		fields["err"] = fmt.Sprint(e.Err)
		r.logger.Info("Delivery engine: "+e.Kind.String(), fields)
		return
	}
	r.logger.Error("Delivery engine: "+e.Kind.String(), e.Err, fields)
}
