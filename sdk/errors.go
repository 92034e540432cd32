package sdk

import (
	"errors"
	"fmt"
	"slices"
)

// The errors that callers compare against with errors.Is.
var (
	// ErrClosed: the driver, source, publisher or subscriber was closed.
	ErrClosed = errors.New("closed")
	// ErrStaleToken: the token names a delivery that is not, or no longer, in flight on this source.
	ErrStaleToken = errors.New("stale token: the delivery is not in flight on this source")
	// ErrUnsupported: the broker does not have the ability asked for; its Capabilities say so.
	ErrUnsupported = errors.New("not supported by this driver")
	// ErrUnroutable: no queue takes the message.
	ErrUnroutable = errors.New("no queue takes the message: a group has to be prepared (subscribe) before the first send")
	// ErrTooLarge: the payload is larger than Capabilities.MaxPayload.
	ErrTooLarge = errors.New("payload is larger than the broker takes")
)

// Outcome is what is known about a request that failed.
type Outcome uint8

// The outcomes. The zero value says nothing and is treated like OutcomeUnknown.
const (
	// OutcomeUnknown: the request may have been carried out: a timeout, a lost connection.
	OutcomeUnknown Outcome = iota + 1
	// OutcomeRejected: it was not carried out; trying again may help.
	OutcomeRejected
	// OutcomePermanent: it was not carried out, and trying again without a change will not help.
	OutcomePermanent
)

// String gives the outcome's name in lower case.
func (o Outcome) String() string {
	switch o {
	case OutcomeRejected:
		return "rejected"
	case OutcomePermanent:
		return "permanent"
	default:
		return "unknown"
	}
}

// OutcomeError keeps the portable kind of a failure together with the driver's own error.
type OutcomeError struct {
	Kind Outcome
	Err  error
}

// Error gives the kind and the driver's error.
func (e *OutcomeError) Error() string { return fmt.Sprintf("outcome %s: %v", e.Kind, e.Err) }

// Unwrap gives the driver's error.
func (e *OutcomeError) Unwrap() error { return e.Err }

// OutcomeOf tells the outcome of a failed Send. An error without an [OutcomeError] in its chain is OutcomeUnknown.
// Of a *[BatchError], which speaks of several messages, ask each entry.
func OutcomeOf(err error) Outcome {
	if oe, ok := errors.AsType[*OutcomeError](err); ok && oe.Kind != 0 {
		return oe.Kind
	}
	return OutcomeUnknown
}

// BatchError tells which entries of a batch failed, by their index. Entries it does not name succeeded. It serves Send,
// Settle and Extend.
type BatchError struct {
	Entries map[int]error
}

// Error names the number of failed entries and the first of them.
func (e *BatchError) Error() string {
	if len(e.Entries) == 0 {
		return "batch: no entry failed"
	}
	first := slices.Min(e.Indexes())
	return fmt.Sprintf("batch: %d failed, first entry %d: %v", len(e.Entries), first, e.Entries[first])
}

// Indexes gives the failed entries in ascending order.
func (e *BatchError) Indexes() []int {
	indexes := make([]int, 0, len(e.Entries))
	for i := range e.Entries {
		indexes = append(indexes, i)
	}
	slices.Sort(indexes)
	return indexes
}

// Unwrap gives the entries' errors in the order of their indexes, so that errors.Is finds any of them.
func (e *BatchError) Unwrap() []error {
	errs := make([]error, 0, len(e.Entries))
	for _, i := range e.Indexes() {
		errs = append(errs, e.Entries[i])
	}
	return errs
}

// EntryErrors spreads the answer to a batch of n entries over its entries: nil gives n times nil, a *BatchError what it
// says, and any other error speaks for all.
func EntryErrors(err error, n int) []error {
	errs := make([]error, n)
	if err == nil {
		return errs
	}
	if be, ok := errors.AsType[*BatchError](err); ok {
		for i, e := range be.Entries {
			if i >= 0 && i < n {
				errs[i] = e
			}
		}
		return errs
	}
	for i := range errs {
		errs[i] = err
	}
	return errs
}
