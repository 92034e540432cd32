package idempotency

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// bounded is a context with a deadline that makes nothing until somebody waits for its end: most stores only ask whether it
// has ended, and a timer for each statement would cost more than the rest of the middleware.
type bounded struct {
	context.Context // what it ends with, and its values
	deadline        time.Time

	mu    sync.Mutex
	over  bool                   // stop was called
	inner atomic.Pointer[waited] // what is waited for
}

type waited struct {
	context.Context
	cancel context.CancelFunc
}

// boundedBy gives a context that ends with parent, at the deadline, or by stop, which has to be called.
func boundedBy(parent context.Context, deadline time.Time) *bounded {
	return &bounded{Context: parent, deadline: earlier(parent, deadline)}
}

// earlier gives the earlier one of a context's deadline and another.
func earlier(ctx context.Context, deadline time.Time) time.Time {
	if theirs, ok := ctx.Deadline(); ok && theirs.Before(deadline) {
		return theirs
	}
	return deadline
}

// over tells why a context has ended, also where its deadline has come and its timer is a moment late: a context made from
// it may be earlier, and the end of one message's time must not pass for that of the database.
func over(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return nil
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
		ctx, cancel := context.WithDeadline(b.Context, b.deadline)
		inner = &waited{ctx, cancel}
		b.inner.Store(inner)
		if b.over {
			cancel()
		}
	}
	return inner.Done()
}

// Err implements context.Context.
func (b *bounded) Err() error {
	if inner := b.inner.Load(); inner != nil {
		return inner.Err()
	}
	if err := b.Context.Err(); err != nil {
		return err
	}
	if !time.Now().Before(b.deadline) {
		return context.DeadlineExceeded
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over {
		return context.Canceled
	}
	return nil
}

// Value implements context.Context. Once somebody waits it answers like the context that is waited for, so that contexts
// derived from this one find it and need no goroutine of their own.
func (b *bounded) Value(key any) any {
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
		inner.cancel()
	}
}
