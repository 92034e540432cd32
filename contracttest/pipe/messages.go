package pipe

import (
	"context"
	"errors"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// op names a call.
type op uint8

const (
	opHello op = iota + 1
	opPrepare
	opSend
	opOpen
	opReceive
	opSettle
	opExtend
	opBarrier
	opCloseSource
	opBye
)

// request is a call from the child. Fields that a call does not use are zero, which gob leaves out.
type request struct {
	ID          uint64
	Op          op
	Source      uint64
	Topic       string
	Binding     sdk.Binding
	Messages    []sdk.Message
	Settlements []sdk.Settlement
	Tokens      []sdk.Token
	Limit       int
	// Duration is the lease for opExtend. Timeout is how long the caller still waits; 0 means without end.
	Duration, Timeout time.Duration
}

// response answers the request with its ID.
type response struct {
	ID           uint64
	Source       uint64
	Capabilities sdk.Capabilities
	// Extends and Barriers tell which optional interfaces a source has.
	Extends, Barriers bool
	Deliveries        []delivery
	Err               *wireError
}

// delivery is an [sdk.Delivery] whose error can travel.
type delivery struct {
	Message     sdk.Message
	Token       sdk.Token
	Attempt     int
	Redelivered bool
	Err         *wireError
}

func toWire(ds []sdk.Delivery) []delivery {
	out := make([]delivery, len(ds))
	for i, d := range ds {
		out[i] = delivery{d.Message, d.Token, d.Attempt, d.Redelivered, encodeError(d.Err)}
	}
	return out
}

func fromWire(ds []delivery) []sdk.Delivery {
	out := make([]sdk.Delivery, len(ds))
	for i, d := range ds {
		out[i] = sdk.Delivery{Message: d.Message, Token: d.Token, Attempt: d.Attempt, Redelivered: d.Redelivered, Err: d.Err.decode()}
	}
	return out
}

// wireError is an error that keeps its text and what callers compare it with.
type wireError struct {
	Text string
	// Outcome is the kind of the OutcomeError in the chain, 0 where there is none.
	Outcome sdk.Outcome
	// Is holds the indexes in sentinels() that the error is.
	Is []int
	// Entries are those of a BatchError in the chain.
	Entries map[int]*wireError
}

// sentinels are the errors that keep their identity. The order is the wire format.
func sentinels() []error {
	return []error{
		sdk.ErrClosed, sdk.ErrStaleToken, sdk.ErrUnsupported, sdk.ErrUnroutable, sdk.ErrTooLarge,
		context.Canceled, context.DeadlineExceeded,
	}
}

func encodeError(err error) *wireError {
	if err == nil {
		return nil
	}
	we := &wireError{Text: err.Error()}
	if be, ok := errors.AsType[*sdk.BatchError](err); ok {
		we.Entries = make(map[int]*wireError, len(be.Entries))
		for i, entry := range be.Entries {
			if entry != nil {
				we.Entries[i] = encodeError(entry)
			}
		}
		return we
	}
	if oe, ok := errors.AsType[*sdk.OutcomeError](err); ok {
		we.Outcome = oe.Kind
	}
	for i, sentinel := range sentinels() {
		if errors.Is(err, sentinel) {
			we.Is = append(we.Is, i)
		}
	}
	return we
}

// decode gives the error back: a *BatchError where there was one, else an error with the old text in whose chain the old
// outcome and sentinels are.
func (we *wireError) decode() error {
	if we == nil {
		return nil
	}
	if we.Entries != nil {
		be := &sdk.BatchError{Entries: make(map[int]error, len(we.Entries))}
		for i, entry := range we.Entries {
			be.Entries[i] = entry.decode()
		}
		return be
	}
	re := &remoteError{text: we.Text}
	known := sentinels()
	for _, i := range we.Is {
		if i >= 0 && i < len(known) {
			re.causes = append(re.causes, known[i])
		}
	}
	if we.Outcome != 0 {
		re.causes = append(re.causes, &sdk.OutcomeError{Kind: we.Outcome, Err: errors.New(we.Text)})
	}
	return re
}

// remoteError is an error from the other side.
type remoteError struct {
	text   string
	causes []error
}

func (e *remoteError) Error() string { return e.text }

func (e *remoteError) Unwrap() []error { return e.causes }

// size estimates the bytes of a message on the wire, not too low.
func size(m sdk.Message) int {
	n := len(m.ID) + len(m.Key) + len(m.Payload) + 64
	for k, v := range m.Metadata {
		n += len(k) + len(v) + 16
	}
	return n
}
