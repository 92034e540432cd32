package idempotency

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// howToEnd are the ways in which a handler ends.
func howToEnd() map[string]func() error {
	return map[string]func() error{
		"returns":   func() error { return nil },
		"fails":     func() error { return errHandler },
		"panics":    func() error { panic("by hand") },
		"exits":     func() error { runtime.Goexit(); return nil },
		"permanent": func() error { return Permanent(errHandler) },
	}
}

// A handler that stands still until long after its transaction's budget keeps its own goroutine and nothing else: its
// neighbours go on in another transaction, whatever it ends with.
func TestHandlerOutlivesItsTransaction(t *testing.T) {
	for name, end := range howToEnd() {
		for _, bad := range []string{"a", "b", "c"} {
			t.Run(name+" as "+bad, func(t *testing.T) {
				bubble(t, func(c *Config, _ *fakeStore) { c.TxBudget = 3 * time.Second }, func(e *env) {
					c := e.share(e.marking(only(bad, func(*message.Message) error {
						time.Sleep(time.Minute)
						return end()
					})), messages("a b c")...)
					c.wantEndings(bad + ":failed")
					for _, o := range c.all {
						if o.msg.UUID != bad && o.took > 3*time.Second {
							e.Errorf("%s took %v", o.msg.UUID, o.took)
						}
					}
					if o := c.of(bad); o.took < time.Minute {
						e.Errorf("the delivery ended after %v, its handler after a minute", o.took)
					}
					e.wantApplied(map[string]string{"a": "b c", "b": "a c", "c": "a b"}[bad])
				})
			})
		}
	}
}

// One that ends in the very moment in which the budget does, is either given up or has ended, but never both and never
// neither.
func TestHandlerEndsTogetherWithItsTransaction(t *testing.T) {
	allowed := map[string][]string{
		"returns": {"failed"}, "fails": {"failed"}, "panics": {"failed", "panicked"}, "exits": {"failed", "exited"},
		"permanent": {"failed", "done"},
	}
	for name, end := range howToEnd() {
		t.Run(name, func(t *testing.T) {
			for i := range 60 {
				bubble(t, nil, func(e *env) {
					c := e.share(e.marking(only("b", func(msg *message.Message) error {
						if i%2 == 0 {
							<-msg.Context().Done()
						} else {
							time.Sleep(defaultTxBudget)
						}
						return end()
					})), messages("a b c")...)
					if how := c.of("b").String(); !slices.Contains(allowed[name], how) {
						e.Errorf("it ended as %s: %v", how, c.of("b").err)
					}
					c.wantEndings("b:" + c.of("b").String())
					e.wantApplied("a c")
				})
			}
		})
	}
}

// A panic or Goexit reaches the delivery's own goroutine with its value, and undoes its own work only.
func TestHandlersThatDoNotReturnInABatch(t *testing.T) {
	for name, ends := range map[string]string{"panics": "panicked", "exits": "exited"} {
		for _, parts := range []bool{true, false} {
			for _, bad := range []string{"a", "c", "e"} {
				t.Run(fmt.Sprintf("%s as %s, parts %v", name, bad, parts), func(t *testing.T) {
					bubble(t, func(_ *Config, s *fakeStore) { s.info.Parts = parts }, func(e *env) {
						c := e.share(e.marking(only(bad, func(*message.Message) error { return howToEnd()[name]() })), messages("a b c d e")...)
						c.wantEndings(bad + ":" + ends)
						if o := c.of(bad); name == "panics" && o.panicked != "by hand" {
							e.Errorf("panicked with %v", o.panicked)
						}
						if msg := c.of(bad).msg; name == "exits" != nacked(msg) {
							e.Error("only after Goexit the middleware nacks")
						}
						e.wantApplied(map[string]string{"a": "b c d e", "c": "a b d e", "e": "a b c d"}[bad])
					})
				})
			}
		}
	}
}

// Two in one batch that do not return, next to each other and apart.
func TestSeveralHandlersThatDoNotReturn(t *testing.T) {
	for _, bad := range []string{"ab", "ae", "de", "abcde"} {
		t.Run(bad, func(t *testing.T) {
			bubble(t, nil, func(e *env) {
				c := e.share(e.marking(func(msg *message.Message) error {
					if slices.Contains([]byte(bad), msg.UUID[0]) {
						panic(msg.UUID)
					}
					return nil
				}), messages("a b c d e")...)
				for _, o := range c.all {
					if wantBad := slices.Contains([]byte(bad), o.msg.UUID[0]); wantBad != (o.panicked == o.msg.UUID) {
						e.Errorf("%s: %s (%v)", o.msg.UUID, o, o.panicked)
					}
				}
			})
		})
	}
}

// What the stretch says when both ends come at once, without the luck that a race needs.
func TestStretchEndsOnce(t *testing.T) {
	s := &stretch{}
	if !s.start() || !s.returned() || s.abandon() {
		t.Error("a handler that returned cannot be abandoned")
	}
	if s.start() || s.abandon() {
		t.Error("no handler starts once the budget is over")
	}
	s = &stretch{}
	handling := &handling{Context: t.Context()}
	s.handling.Store(handling)
	if !s.start() || !s.abandon() || s.returned() {
		t.Error("a handler that was abandoned cannot return any more")
	}
	if !errors.Is(handling.Err(), context.DeadlineExceeded) {
		t.Error("it is not told")
	}
}
