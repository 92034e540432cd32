package idempotency

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// The errors callers compare against with errors.Is.
var (
	// ErrNoTx: the context carries no transaction of this kind: it is not the context of a handled message.
	ErrNoTx = errors.New("no transaction in this context: use the context of the message that the handler was given")
	// ErrTxOver: the transaction of this context is over: the handler it belongs to has returned.
	ErrTxOver = errors.New("the transaction of this context is over: its handler has returned")
	// ErrNested: a handler gave the context of its own message to the handling of another one, or two middlewares over one
	// store are on one path.
	ErrNested = errors.New("another transaction on the same store is open in this context: " +
		"handle each message with its own context, and with one middleware")
	// ErrConflict: the message's identity was processed with another payload. Only HoldConflicts returns it.
	ErrConflict = errors.New("the message identity was processed with another payload")
	// ErrDatabaseAway: the database is unreachable, read-only, full or out of connections. The delivery was not charged.
	ErrDatabaseAway = errors.New("the database is away")
	// ErrContention: other transactions were in the way for too long. The delivery was not charged.
	ErrContention = errors.New("contention in the database")
	// ErrUndecided: it is unknown whether the transaction committed. The redelivery will tell; it was not charged.
	ErrUndecided = errors.New("it is undecided whether the transaction committed")
	// ErrNoOutputs: the handler produced outputs that cannot be sent as the middleware is configured. Nothing committed.
	ErrNoOutputs = errors.New("the handler's outputs cannot be sent")
	// ErrTxUnused: with RequireTx, the handler returned without having asked for its transaction. Nothing committed.
	ErrTxUnused = errors.New("the handler did not ask for its transaction, and RequireTx is set: use Handle or TxFrom")
	// ErrTxFailed: something inside the transaction failed, and a middleware inside it went on. Nothing committed.
	ErrTxFailed = errors.New("the transaction has failed already: what retries or swallows errors belongs outside this middleware")
	// ErrLease: the delivery's lease is too short for TxBudget.
	ErrLease = errors.New("the delivery's lease is not longer than Config.TxBudget")
	// ErrNotOrdered: the delivery has an order key, but did not come through Ordered, which alone can keep the order.
	ErrNotOrdered = errors.New("the message has an order key, but did not come through Ordered: " +
		"call router.AddSubscriberDecorators(m.Ordered) with this middleware before the router runs")
	// ErrRelayRunning: Run was called while another Run of the same middleware has not returned.
	ErrRelayRunning = errors.New("another Run of this middleware has not returned")
)

// errBehind is why a message goes back that did not fail itself.
var errBehind = errors.New("an earlier message of the same order key failed and comes first")

// errWhose refuses an output of a batch handler that names no message.
var errWhose = fmt.Errorf("%w: in a batch handler, publish with the context of the message that the output belongs to", ErrNoOutputs)

// What a handler "returned" that did not return an error.
var (
	errNacked   = errors.New("the handler nacked its message")
	errPanicked = errors.New("the handler panicked or called runtime.Goexit")
)

// deliveryError is what a failed delivery returns to the router, wrapped once: which message, and whether it is charged
// as a failed attempt.
type deliveryError struct {
	handler, topic, uuid string
	charged              bool
	err                  error
}

func (e *deliveryError) Error() string {
	return fmt.Sprintf("idempotency: handler %q, topic %q, message %q: %v", e.handler, e.topic, brief(e.uuid, 80), e.err)
}

func (e *deliveryError) Unwrap() error { return e.err }

// IsFailure tells whether err is a failed attempt of a handler, to be counted, retried or poisoned by a middleware outside
// this one. It is false for nil, and for what is nobody's failed attempt: contention, a database that is away, an
// undecided COMMIT, a cancelled delivery, a held conflict, and a program that is put together wrongly. It is true for a
// handler's error and for any error this package does not know, except a bare context.Canceled.
func IsFailure(err error) bool {
	if err == nil {
		return false
	}
	if de, ok := errors.AsType[*deliveryError](err); ok {
		return de.charged
	}
	return !errors.Is(err, context.Canceled)
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return "permanent: " + e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent says that trying again cannot help: the message is diverted into the dead-letter table at once, together with
// a receipt, and then acknowledged. The handler's transaction is rolled back first. It yields to what is not the
// message's fault: an error that is contention or an outage of the database is tried again all the same, and a message
// whose context was cancelled comes again. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type retryAfterError struct {
	err   error
	delay time.Duration
}

func (e *retryAfterError) Error() string { return e.err.Error() }
func (e *retryAfterError) Unwrap() error { return e.err }

// RetryAfter is a handler's failure that names the delay after which trying again makes sense. A delivery of an
// sdk.Subscriber is requeued with it; one of a foreign subscriber is held for it, at most half of Config.Limits.Lease
// where that is known, then nacked. d <= 0 leaves the delay to the backoff. RetryAfter(nil, d) is nil.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{err, d}
}

// delayOf is the delay asked for with RetryAfter, or 0.
func delayOf(err error) time.Duration {
	if ra, ok := errors.AsType[*retryAfterError](err); ok && ra.delay > 0 {
		return ra.delay
	}
	return 0
}

func isPermanent(err error) bool {
	_, ok := errors.AsType[*permanentError](err)
	return ok
}

// brief cuts a text that came from outside down to at most n bytes of valid UTF-8.
func brief(s string, n int) string {
	if len(s) > n {
		s = s[:n] + "…"
	}
	return strings.ToValidUTF8(s, "�")
}
