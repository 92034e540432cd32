package idempotency

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// bounded is a context with a deadline that makes nothing until somebody waits for its end: most stores only ask whether it
// has ended, and a timer for each statement of each message would cost more than the rest of the middleware. A handler's
// carries the transaction too.
type bounded struct {
	context.Context // what it ends with, and its values
	deadline        time.Time
	carrier         *carrier

	shared bool // the deadline is that of a whole batch, which has one timer and calls expire

	mu      sync.Mutex
	over    bool                   // stop was called
	expired bool                   // expire was called
	inner   atomic.Pointer[waited] // what is waited for
}

type waited struct {
	context.Context
	cancel context.CancelCauseFunc
}

// wait makes it.
func (b *bounded) wait() *waited {
	if b.shared {
		ctx, cancel := context.WithCancelCause(b.Context)
		return &waited{ctx, cancel}
	}
	ctx, cancel := context.WithDeadline(b.Context, b.deadline)
	return &waited{ctx, func(error) { cancel() }}
}

// boundedBy gives a context that ends with parent, at the deadline, or by stop, which has to be called.
func boundedBy(parent context.Context, deadline time.Time) *bounded {
	b := &bounded{Context: parent}
	b.until(deadline)
	return b
}

// until sets the deadline, before anybody has the context.
func (b *bounded) until(deadline time.Time) {
	if theirs, ok := b.Context.Deadline(); ok && theirs.Before(deadline) {
		deadline = theirs
	}
	b.deadline = deadline
}

// Deadline implements context.Context.
func (b *bounded) Deadline() (time.Time, bool) { return b.deadline, true }

// Done implements context.Context.
func (b *bounded) Done() <-chan struct{} {
	if inner := b.inner.Load(); inner != nil {
		return inner.Done()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	inner := b.inner.Load()
	if inner == nil {
		inner = b.wait()
		b.inner.Store(inner)
		b.end(inner)
	}
	return inner.Done()
}

// Err implements context.Context.
func (b *bounded) Err() error {
	if inner := b.inner.Load(); inner != nil && !b.shared {
		return inner.Err()
	}
	if err := b.Context.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.expired, !b.shared && !time.Now().Before(b.deadline):
		return context.DeadlineExceeded
	case b.over:
		return context.Canceled
	default:
		return nil
	}
}

// Value implements context.Context. Once somebody waits it answers like the context that is waited for, so that contexts
// derived from this one find it and need no goroutine of their own.
func (b *bounded) Value(key any) any {
	if _, ours := key.(carrierKey); ours && b.carrier != nil {
		return b.carrier
	}
	if inner := b.inner.Load(); inner != nil {
		return inner.Value(key)
	}
	return b.Context.Value(key)
}

// stop ends the context. It may be called again.
func (b *bounded) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
	if inner := b.inner.Load(); inner != nil {
		b.end(inner)
	}
}

// expire ends a shared context because its deadline has come.
func (b *bounded) expire() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expired = true
	if inner := b.inner.Load(); inner != nil {
		b.end(inner)
	}
}

// end ends what is waited for, if it has come to that. It wants the lock held.
func (b *bounded) end(inner *waited) {
	switch {
	case b.expired:
		inner.cancel(context.DeadlineExceeded)
	case b.over:
		inner.cancel(nil)
	}
}
