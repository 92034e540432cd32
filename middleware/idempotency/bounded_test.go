package idempotency

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A bounded context behaves like one made with a deadline, whether or not somebody waits for it, and a context derived from
// it ends with it.
func TestBounded(t *testing.T) {
	type probe struct {
		name   string
		shared bool
		end    func(b *bounded, cancel context.CancelFunc)
		want   error
	}
	probes := []probe{
		{"it goes on", false, func(*bounded, context.CancelFunc) {}, nil},
		{"its deadline comes", false, func(*bounded, context.CancelFunc) { time.Sleep(time.Second) }, context.DeadlineExceeded},
		{"the parent ends", false, func(_ *bounded, cancel context.CancelFunc) { cancel() }, context.Canceled},
		{"it is stopped", false, func(b *bounded, _ context.CancelFunc) { b.stop(); b.stop() }, context.Canceled},
		{"shared, it goes on", true, func(*bounded, context.CancelFunc) { time.Sleep(time.Second) }, nil},
		{"shared, it is told", true, func(b *bounded, _ context.CancelFunc) { b.expire() }, context.DeadlineExceeded},
		{"shared, the parent ends", true, func(_ *bounded, cancel context.CancelFunc) { cancel() }, context.Canceled},
		{"shared, it is stopped", true, func(b *bounded, _ context.CancelFunc) { b.stop() }, context.Canceled},
		{"shared, it is told and stopped", true, func(b *bounded, _ context.CancelFunc) { b.expire(); b.stop() }, context.DeadlineExceeded},
	}
	for _, p := range probes {
		for _, when := range []string{"nobody waits", "somebody waits", "somebody comes later"} {
			t.Run(p.name+", "+when, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					parent, cancel := context.WithCancel(context.WithValue(t.Context(), carrierKey{}, 1))
					defer cancel()
					b := boundedBy(parent, time.Now().Add(time.Second))
					b.shared = p.shared
					defer b.stop()
					var child context.Context = b
					if when == "somebody waits" {
						var stop context.CancelFunc
						child, stop = context.WithCancel(b)
						defer stop()
					}
					p.end(b, cancel)
					synctest.Wait()
					if when == "somebody comes later" {
						var stop context.CancelFunc
						child, stop = context.WithCancel(b)
						defer stop()
						synctest.Wait()
					}
					if err := b.Err(); !errors.Is(err, p.want) || (err == nil) != (p.want == nil) {
						t.Errorf("Err: %v, want %v", err, p.want)
					}
					if over := child.Err() != nil; over != (p.want != nil) {
						t.Errorf("the derived context: %v", child.Err())
					}
					if cause := context.Cause(child); p.shared && when != "nobody waits" && p.want != nil && !errors.Is(cause, p.want) {
						t.Errorf("its cause: %v, want %v", cause, p.want)
					}
				})
			})
		}
	}
}

func TestBoundedValues(t *testing.T) {
	type key struct{}
	parent, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "v"), time.Minute)
	defer cancel()
	b := boundedBy(parent, time.Now().Add(time.Hour))
	b.carrier = &carrier{}
	for _, when := range []string{"before", "after"} {
		if b.Value(key{}) != "v" || b.Value(carrierKey{}) != b.carrier {
			t.Errorf("%s somebody waits: %v, %v", when, b.Value(key{}), b.Value(carrierKey{}))
		}
		b.Done()
	}
	if d, ok := b.Deadline(); !ok || time.Until(d) > time.Minute {
		t.Errorf("deadline in %v: that of the parent is earlier", time.Until(d))
	}
	b.stop()
	<-b.Done()
}
