package idempotency

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// Both contexts behave like one made with a deadline, whether or not somebody waits for them, and a context derived from one
// ends with it.
func TestContextsEnd(t *testing.T) {
	type ender interface {
		context.Context
		stop()
	}
	type probe struct {
		name string
		make func(parent context.Context) ender
		end  func(ctx ender, cancel context.CancelFunc)
		want error
	}
	boundedIn := func(parent context.Context) ender { return boundedBy(parent, time.Now().Add(time.Second)) }
	alone := func(parent context.Context) ender { return &handling{Context: parent, carrier: &carrier{}} }
	watched := func(parent context.Context) ender {
		h := &handling{Context: parent, carrier: &carrier{}, watched: true}
		context.AfterFunc(parent, func() { h.end(parent.Err()) })
		return h
	}
	expire := func(ctx ender, _ context.CancelFunc) { ctx.(*handling).expire() }
	stop := func(ctx ender, _ context.CancelFunc) { ctx.stop(); ctx.stop() }
	parentEnds := func(_ ender, cancel context.CancelFunc) { cancel() }
	nothing := func(ender, context.CancelFunc) {}
	probes := []probe{
		{"bounded, goes on", boundedIn, nothing, nil},
		{"bounded, its deadline comes", boundedIn, func(ender, context.CancelFunc) { time.Sleep(time.Second) }, context.DeadlineExceeded},
		{"bounded, the parent ends", boundedIn, parentEnds, context.Canceled},
		{"bounded, stopped", boundedIn, stop, context.Canceled},
		{"alone, goes on", alone, nothing, nil},
		{"alone, the parent ends", alone, parentEnds, context.Canceled},
		{"alone, expires", alone, expire, context.DeadlineExceeded},
		{"alone, stopped", alone, stop, context.Canceled},
		{"watched, goes on", watched, nothing, nil},
		{"watched, the parent ends", watched, parentEnds, context.Canceled},
		{"watched, expires, then stopped", watched, func(c ender, f context.CancelFunc) { expire(c, f); stop(c, f) }, context.DeadlineExceeded},
		{"watched, stopped", watched, stop, context.Canceled},
	}
	for _, p := range probes {
		for _, when := range []string{"nobody waits", "somebody waits", "somebody comes later", "somebody went"} {
			t.Run(p.name+", "+when, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					parent, cancel := context.WithCancel(t.Context())
					defer cancel()
					ctx := p.make(parent)
					defer ctx.stop()
					var child context.Context
					derive := func() (end context.CancelFunc) { child, end = context.WithCancel(ctx); return end } //nolint:fatcontext // one level only
					switch when {
					case "somebody waits":
						defer derive()()
					case "somebody went":
						derive()()
						child = nil
					}
					p.end(ctx, cancel)
					synctest.Wait()
					if when == "somebody comes later" {
						defer derive()()
						synctest.Wait()
					}
					if err := ctx.Err(); !errors.Is(err, p.want) || (err == nil) != (p.want == nil) {
						t.Errorf("Err: %v, want %v", err, p.want)
					}
					if child != nil && (!errors.Is(child.Err(), p.want) || (child.Err() == nil) != (p.want == nil)) {
						t.Errorf("the derived context: %v, want %v", child.Err(), p.want)
					}
					select {
					case <-ctx.Done():
						if p.want == nil {
							t.Error("Done is closed")
						}
					default:
						if p.want != nil {
							t.Error("Done is open")
						}
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
	h := &handling{Context: parent, carrier: &carrier{}}
	for _, when := range []string{"before", "after"} {
		if b.Value(key{}) != "v" || h.Value(key{}) != "v" || h.Value(carrierKey{}) != h.carrier {
			t.Errorf("%s somebody waits: %v, %v, %v", when, b.Value(key{}), h.Value(key{}), h.Value(carrierKey{}))
		}
		b.Done()
		h.Done()
	}
	h.stop()
	if d, ok := b.Deadline(); !ok || time.Until(d) > time.Minute {
		t.Errorf("deadline in %v: that of the parent is earlier", time.Until(d))
	}
	b.stop()
	<-b.Done()
}
