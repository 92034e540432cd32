package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// source is one open consumer. Its methods may be called by several goroutines at once, also where the contract does not
// ask for it.
type source struct {
	d      *driver
	q      *queue
	window int
	lease  time.Duration
	prefix string        // of its tokens: broker and session
	done   chan struct{} // closed when it ends

	// Guarded by the broker's mutex.
	err      error // why it ended
	handed   uint64
	inFlight map[sdk.Token]*item
	keys     heap[*keyState] // keys it owns that have blocked messages
	waits    []*waiter       // its Receives under way that had to wait
}

var (
	_ sdk.Source        = (*source)(nil)
	_ sdk.LeaseExtender = (*source)(nil)
)

func newSource(d *driver, q *queue, b sdk.Binding) *source {
	s := &source{
		d: d, q: q, window: b.Window, lease: b.Lease, prefix: d.b.session(),
		done: make(chan struct{}), inFlight: make(map[sdk.Token]*item),
	}
	if s.window == 0 {
		s.window = DefaultWindow
	}
	if s.lease == 0 {
		s.lease = d.b.opts.Lease
	}
	return s
}

// Capabilities are the driver's.
func (s *source) Capabilities() sdk.Capabilities { return s.d.Capabilities() }

func (s *source) room() int { return s.window - len(s.inFlight) }

func (s *source) nextToken() sdk.Token {
	s.handed++
	buf := make([]byte, 0, 64)
	buf = append(buf, s.prefix...)
	return sdk.Token(strconv.AppendUint(buf, s.handed, 10))
}

// Receive blocks until there is a delivery, room in the window for it, and no older Receive of the group that may have
// it; it has no poll time.
func (s *source) Receive(ctx context.Context, limit int) ([]sdk.Delivery, error) {
	got, err := s.receive(ctx, limit)
	if err != nil {
		if cause := ctx.Err(); cause != nil && errors.Is(err, cause) {
			return nil, cause
		}
		return nil, fmt.Errorf("memory: receive from topic %q, group %q: %w", s.q.topic.name, s.q.group, err)
	}
	for i := range got {
		got[i].Message = cloneMessage(got[i].Message)
	}
	return got, nil
}

func (s *source) receive(ctx context.Context, limit int) ([]sdk.Delivery, error) {
	if limit < 1 {
		return nil, fmt.Errorf("limit is %d: it must be at least 1", limit)
	}
	if err := s.d.b.pass(ctx, s.done); err != nil {
		return nil, err
	}
	s.d.b.mu.Lock()
	got, w, err := s.poll(ctx, limit)
	s.d.b.mu.Unlock()
	if w == nil {
		return got, err
	}
	select {
	case <-w.ready:
	case <-ctx.Done():
	}
	s.d.b.mu.Lock()
	defer s.d.b.mu.Unlock()
	return s.collect(ctx, w)
}

// poll gives what is there, or a waiter.
func (s *source) poll(ctx context.Context, limit int) ([]sdk.Delivery, *waiter, error) {
	if s.err != nil {
		return nil, nil, s.err
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	now := s.d.b.now()
	s.q.pump(now)
	if s.d.b.gate == nil {
		if got := s.q.hand(s, min(limit, s.room()), nil, now); len(got) > 0 {
			s.q.rearm(now)
			return got, nil, nil
		}
	}
	w := &waiter{src: s, limit: limit, ready: make(chan struct{})}
	s.waits = append(s.waits, w)
	s.q.waiters = append(s.q.waiters, w)
	s.q.rearm(now)
	return nil, w, nil
}

// collect ends a wait. What was handed over before the context was done is returned: it is in flight here.
func (s *source) collect(ctx context.Context, w *waiter) ([]sdk.Delivery, error) {
	if i := slices.Index(s.waits, w); i >= 0 {
		s.waits = slices.Delete(s.waits, i, i+1)
	}
	if len(w.got) > 0 {
		return w.got, nil
	}
	if s.err != nil {
		return nil, s.err
	}
	s.q.leave(w)
	s.q.rearm(s.d.b.now())
	return nil, ctx.Err()
}

// Settle carries out each settlement at once: nil is the broker's confirmation. A Delay of a Requeue that is not positive
// means at once; of other verdicts it is ignored. A Reject for which the dead-letter topic has no room is reported as
// rejected and leaves its delivery in flight. Settle does not block.
func (s *source) Settle(ctx context.Context, batch []sdk.Settlement) error {
	return s.each(ctx, "settle", len(batch), func(i int, now int64) error { return s.settle(batch[i], now) })
}

// Extend sets leases anew. A d that is not positive ends them, and the messages come back at once. It does not block.
func (s *source) Extend(ctx context.Context, tokens []sdk.Token, d time.Duration) error {
	return s.each(ctx, "extend", len(tokens), func(i int, now int64) error {
		it := s.inFlight[tokens[i]]
		if it == nil {
			return sdk.ErrStaleToken
		}
		it.rank = after(now, d)
		s.q.leases.fix(it)
		return nil
	})
}

// each does something for each of n entries under the mutex, with leases that are over taken back before, and gathers
// the errors.
func (s *source) each(ctx context.Context, verb string, n int, do func(i int, now int64) error) error {
	b := s.d.b
	if err := b.pass(ctx, s.done); err != nil {
		return s.refuse(verb, n, &sdk.OutcomeError{Kind: sdk.OutcomeRejected, Err: err})
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.err != nil {
		return s.refuse(verb, n, fmt.Errorf("%w: %w", sdk.ErrStaleToken, s.err))
	}
	if err := ctx.Err(); err != nil {
		return s.refuse(verb, n, &sdk.OutcomeError{Kind: sdk.OutcomeRejected, Err: err})
	}
	now := b.now()
	s.q.advance(now)
	var entries map[int]error
	for i := range n {
		if err := do(i, now); err != nil {
			if entries == nil {
				entries = make(map[int]error)
			}
			entries[i] = err
		}
	}
	s.q.pump(now)
	s.q.topic.admit()
	if entries == nil {
		return nil
	}
	return &sdk.BatchError{Entries: entries}
}

// refuse gives one error for a whole batch, also for an empty one.
func (s *source) refuse(verb string, n int, err error) error {
	err = fmt.Errorf("memory: %s in topic %q, group %q: %w", verb, s.q.topic.name, s.q.group, err)
	if n == 0 {
		return err
	}
	return failFrom(0, n, err)
}

func (s *source) settle(st sdk.Settlement, now int64) error {
	if st.Verdict < sdk.Ack || st.Verdict > sdk.Reject {
		return fmt.Errorf("memory: verdict %d: %w", st.Verdict, sdk.ErrUnsupported)
	}
	it := s.inFlight[st.Token]
	if it == nil {
		return sdk.ErrStaleToken
	}
	if st.Verdict == sdk.Reject {
		if err := s.d.b.bury(s.q.topic, it.msg); err != nil {
			return err
		}
	}
	s.q.recall(it)
	switch {
	case st.Verdict != sdk.Requeue:
		s.q.forget(it)
		s.q.disown(it)
	case st.Delay > 0:
		s.q.delay(it, after(now, st.Delay))
		s.q.disown(it)
	default:
		s.q.restore(it)
	}
	return nil
}

// Close gives back what is unsettled, in its old place. It does not block and always succeeds.
func (s *source) Close(context.Context) error {
	s.d.b.mu.Lock()
	defer s.d.b.mu.Unlock()
	s.q.end(s, sdk.ErrClosed)
	s.q.pump(s.d.b.now())
	return nil
}
