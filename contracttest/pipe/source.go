package pipe

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// source is the child's side of a source that the parent holds.
type source struct {
	link *link
	id   uint64
	caps sdk.Capabilities

	once sync.Once
	done chan struct{} // closed by Close

	// Used by the goroutine that calls Receive: answers that nobody waited for.
	asked <-chan response
	ready []sdk.Delivery
}

// The same with the optional interfaces that the parent's source has.
type (
	extender  struct{ *source }
	barrierer struct{ *source }
	both      struct {
		extender
		barrier barrierer
	}
)

var (
	_ sdk.LeaseExtender = extender{}
	_ sdk.Barrier       = barrierer{}
	_ sdk.LeaseExtender = both{}
	_ sdk.Barrier       = both{}
)

func newSource(l *link, res response) sdk.Source {
	s := &source{link: l, id: res.Source, caps: res.Capabilities, done: make(chan struct{})}
	s.caps.MaxPayload = fitting(s.caps.MaxPayload, l.wire.limit)
	switch {
	case res.Extends && res.Barriers:
		return both{extender{s}, barrierer{s}}
	case res.Extends:
		return extender{s}
	case res.Barriers:
		return barrierer{s}
	default:
		return s
	}
}

func (s *source) Capabilities() sdk.Capabilities { return s.caps }

// Receive waits for the answer of the present request, or makes one.
func (s *source) Receive(ctx context.Context, limit int) ([]sdk.Delivery, error) {
	if err := s.usable(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(s.ready) > 0 {
		return s.take(limit), nil
	}
	if s.asked == nil {
		asked, _, err := s.link.start(ctx, request{Op: opReceive, Source: s.id, Limit: limit})
		if err != nil {
			return nil, fmt.Errorf("receive: %w", err)
		}
		s.asked = asked
	}
	select {
	case res := <-s.asked:
		s.asked = nil
		s.ready = fromWire(res.Deliveries)
		if err := res.Err.decode(); err != nil {
			return nil, err
		}
		return s.take(limit), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-s.done:
		return nil, sdk.ErrClosed
	case <-s.link.wire.dead:
		return nil, fmt.Errorf("receive: %w", s.link.wire.err)
	}
}

func (s *source) take(limit int) []sdk.Delivery {
	n := min(limit, len(s.ready))
	out := s.ready[:n:n]
	s.ready = s.ready[n:]
	return out
}

// usable tells whether the source is open and its connection lives.
func (s *source) usable() error {
	select {
	case <-s.done:
		return sdk.ErrClosed
	case <-s.link.wire.dead:
		return s.link.wire.err
	default:
		return nil
	}
}

// Settle settles at the parent. Over a lost connection every token is stale; when it is lost on the way, the outcome is
// unknown.
func (s *source) Settle(ctx context.Context, batch []sdk.Settlement) error {
	return s.settle(ctx, len(batch), request{Op: opSettle, Source: s.id, Settlements: batch})
}

func (s *source) settle(ctx context.Context, n int, req request) error {
	if n == 0 {
		return nil
	}
	err := s.usable()
	if errors.Is(err, sdk.ErrClosed) {
		return every(n, err)
	}
	if err != nil {
		return every(n, fmt.Errorf("%w: %w", err, sdk.ErrStaleToken))
	}
	_, sent, err := s.link.call(ctx, req)
	if err == nil || answered(err) {
		return err
	}
	kind := sdk.OutcomeRejected
	if sent {
		kind = sdk.OutcomeUnknown
	}
	return every(n, &sdk.OutcomeError{Kind: kind, Err: err})
}

// Close ends the source; the parent closes it too. After the connection was lost there is nothing left to do.
func (s *source) Close(ctx context.Context) error {
	first := false
	s.once.Do(func() { first = true; close(s.done) })
	if !first || s.link.isDead() {
		return nil
	}
	_, _, err := s.link.call(ctx, request{Op: opCloseSource, Source: s.id})
	if err != nil && !errors.Is(err, errLost) && !errors.Is(err, sdk.ErrClosed) {
		return fmt.Errorf("closing a source over the pipe: %w", err)
	}
	return nil
}

// Extend extends leases at the parent.
func (s extender) Extend(ctx context.Context, tokens []sdk.Token, d time.Duration) error {
	return s.settle(ctx, len(tokens), request{Op: opExtend, Source: s.id, Tokens: tokens, Duration: d})
}

// Barrier is the parent's.
func (s barrierer) Barrier(ctx context.Context) error {
	if err := s.usable(); err != nil {
		return err
	}
	_, _, err := s.link.call(ctx, request{Op: opBarrier, Source: s.id})
	return err
}

// Barrier is the parent's.
func (b both) Barrier(ctx context.Context) error { return b.barrier.Barrier(ctx) }
