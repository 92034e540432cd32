package idempotency

import (
	"context"
	"sync"
	"time"
)

// handling is the context of one run of a handler: the message's, with the transaction and a deadline. Every statement of a
// handler asks it for its Done channel, but hardly anybody waits for it. So it is no child of the message's context, which
// would be made and removed again for each message, and has no timer: whoever watches over the handler ends it. That is the
// message's own goroutine, where it waits for its batch, and the batch, which has one timer for all its handlers.
type handling struct {
	context.Context // the message's
	deadline        time.Time
	carrier         *carrier
	watched         bool // the message's goroutine is free to pass on the end of the message's context

	mu     sync.Mutex
	done   chan struct{} // nil: nobody has asked
	err    error         // why it ended; nil: it has not
	after  map[*func()]struct{}
	unhook func() bool // where it is not watched, and somebody asked
}

// carry sets what it ends with and what it carries, before anybody has it.
func (h *handling) carry(ctx context.Context, c *carrier) { h.Context, h.carrier = ctx, c }

// Deadline implements context.Context.
func (h *handling) Deadline() (time.Time, bool) { return h.deadline, true }

// Done implements context.Context.
func (h *handling) Done() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.done != nil {
		return h.done
	}
	h.done = make(chan struct{})
	if h.err == nil {
		h.err = h.Context.Err() // whoever watches looked before we were here
	}
	switch {
	case h.err != nil:
		close(h.done)
	case !h.watched:
		h.unhook = context.AfterFunc(h.Context, func() { h.end(h.Context.Err()) })
	}
	return h.done
}

// Err implements context.Context.
func (h *handling) Err() error {
	if err := h.Context.Err(); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// Value implements context.Context.
func (h *handling) Value(key any) any {
	if _, ours := key.(carrierKey); ours {
		return h.carrier
	}
	return h.Context.Value(key)
}

// AfterFunc lets contexts that are derived from this one do without a goroutine each; package context looks for it.
func (h *handling) AfterFunc(f func()) (stop func() bool) {
	h.Done() // from now on somebody waits
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil {
		go f()
		return func() bool { return false }
	}
	if h.after == nil {
		h.after = make(map[*func()]struct{})
	}
	h.after[&f] = struct{}{}
	return func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		_, waits := h.after[&f]
		delete(h.after, &f)
		return waits
	}
}

// end ends the context; the first reason stays. It may be called again.
func (h *handling) end(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil {
		return
	}
	h.err = err
	if h.done == nil {
		return
	}
	close(h.done)
	for f := range h.after {
		go (*f)()
	}
	h.after = nil
	if h.unhook != nil {
		h.unhook()
	}
}

// expire ends it because its deadline has come, stop because the transaction is over.
func (h *handling) expire() { h.end(context.DeadlineExceeded) }
func (h *handling) stop()   { h.end(context.Canceled) }
