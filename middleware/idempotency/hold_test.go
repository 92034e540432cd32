package idempotency

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

func TestHoldingForeignFailures(t *testing.T) {
	backoff := sdk.Backoff{Min: time.Second, Max: 8 * time.Second}
	bubble(t, func(c *Config, _ *fakeStore) { c.RetryBackoff = backoff }, func(e *env) {
		h := e.acting(func(*message.Message) error { return errHandler })
		took := func(msg *message.Message) time.Duration {
			start := time.Now()
			_, _ = h(msg)
			return time.Since(start)
		}
		for n := 1; n <= 6; n++ {
			if d := took(deliver("u-1", "p")); d < backoff.Min || d > backoff.Ceiling(n) {
				e.Errorf("failure %d was held for %v", n, d)
			}
		}
		if d := took(deliver("u-2", "p")); d > backoff.Ceiling(1) {
			e.Errorf("another identity was held for %v", d)
		}

		msg := deliver("u-3", "p")
		_ = took(msg)
		if d := took(msg); d != 0 {
			e.Errorf("an outer Retry of the same delivery was slowed by %v", d)
		}

		if _, err := e.counting()(deliver("u-1", "p")); err != nil {
			e.Fatal(err)
		}
		if n, _ := e.m.failures.note((&pending[*fakeTx]{scope: "x", msg: msg}).hash(e.m.seed), msg); n != 1 {
			e.Errorf("count %d", n)
		}
		if got := len(e.m.failures.entries); got != 3 { // u-2, u-3 and the one just noted
			e.Errorf("%d identities are remembered as failing", got)
		}
	})
}

func TestHoldingEndsWithTheContext(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.RetryBackoff.Min = time.Hour }, func(e *env) {
		msg, cancel := withCancel(deliver("u-1", "p"))
		time.AfterFunc(time.Second, cancel)
		start := time.Now()
		_, err := e.acting(func(*message.Message) error { return errHandler })(msg)
		if !errors.Is(err, errHandler) || !IsFailure(err) || time.Since(start) != time.Second {
			e.Errorf("got %v after %v", err, time.Since(start))
		}
	})
}

func TestRetryAfter(t *testing.T) {
	h := func(e *env) message.HandlerFunc {
		return e.acting(func(*message.Message) error { return fmt.Errorf("limited: %w", RetryAfter(errHandler, time.Minute)) })
	}
	t.Run("foreign", func(t *testing.T) {
		bubble(t, nil, func(e *env) {
			for range 2 {
				start := time.Now()
				_, err := h(e)(deliver("u-1", "p"))
				if !errors.Is(err, errHandler) || !IsFailure(err) || time.Since(start) != time.Minute {
					e.Errorf("got %v after %v", err, time.Since(start))
				}
			}
		})
	})
	t.Run("foreign with a known lease", func(t *testing.T) {
		bubble(t, func(c *Config, _ *fakeStore) { c.Limits.Lease = 30 * time.Second }, func(e *env) {
			start := time.Now()
			_, _ = h(e)(deliver("u-1", "p"))
			if d := time.Since(start); d != 15*time.Second {
				e.Errorf("held for %v", d)
			}
		})
	})
	t.Run("sdk", func(t *testing.T) {
		bubble(t, nil, func(e *env) {
			msg, info := withDelivery(deliver("u-1", "p"))
			start := time.Now()
			_, err := h(e)(msg)
			if !IsFailure(err) || time.Since(start) != 0 || requeueDelay(info) != time.Minute {
				e.Errorf("got %v after %v, requeued after %v", err, time.Since(start), requeueDelay(info))
			}
		})
	})
}

func TestSdkFailuresAreLeftToTheEngine(t *testing.T) {
	bubble(t, nil, func(e *env) {
		msg, info := withDelivery(deliver("u-1", "p"))
		start := time.Now()
		_, err := e.acting(func(*message.Message) error { return errHandler })(msg)
		if !errors.Is(err, errHandler) || time.Since(start) != 0 || requeueDelay(info) != 0 {
			e.Errorf("got %v after %v, requeued after %v", err, time.Since(start), requeueDelay(info))
		}
	})
}

func TestFailuresAreCountedByDelivery(t *testing.T) {
	var f failing
	for want := 1; want <= 3; want++ {
		msg := message.NewMessage("", nil)
		for try := range 3 {
			if n, first := f.note(7, msg); n != want || first != (try == 0) {
				t.Errorf("delivery %d, try %d: %d, %v", want, try, n, first)
			}
		}
	}
	f.forget(7)
	if n, first := f.note(7, message.NewMessage("", nil)); n != 1 || !first {
		t.Errorf("after success: %d, %v", n, first)
	}
}

func TestFailingIdentitiesAreBounded(t *testing.T) {
	var f failing
	for i := range 3 * maxFailing {
		f.note(uint64(i), message.NewMessage("", nil))
	}
	if len(f.entries) != maxFailing {
		t.Errorf("%d entries", len(f.entries))
	}
}

func TestIsFailure(t *testing.T) {
	p := pending[*fakeTx]{msg: deliver("u", "p")}
	tests := []struct {
		err  error
		want bool
	}{
		{nil, false},
		{errHandler, true},
		{context.Canceled, false},
		{fmt.Errorf("retry: %w", context.Canceled), false},
		{context.DeadlineExceeded, true},
		{p.failed(context.Canceled, true), true},
		{p.failed(errHandler, false), false},
		{fmt.Errorf("outer: %w", p.failed(errHandler, false)), false},
		{errors.Join(errors.New("poison queue is down"), p.failed(errHandler, true)), true},
	}
	for _, tt := range tests {
		if got := IsFailure(tt.err); got != tt.want {
			t.Errorf("%v: %v", tt.err, got)
		}
	}
	if Permanent(nil) != nil || RetryAfter(nil, time.Second) != nil {
		t.Error("nil is no error")
	}
}
