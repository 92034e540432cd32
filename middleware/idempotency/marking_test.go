package idempotency

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func many(prefix string, n int) string {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf("%s%d", prefix, i))
	}
	return strings.Join(names, " ")
}

func (e *env) wantAllMarked(n int) {
	e.Helper()
	for _, o := range e.store.outputs {
		if !o.Sent {
			e.Errorf("%s is not marked", o.UUID)
		}
	}
	if len(e.store.outputs) != n {
		e.Errorf("%d outputs are stored, want %d", len(e.store.outputs), n)
	}
}

// Marks that come while others are being written share a transaction, as messages do.
func TestMarksShareATransaction(t *testing.T) {
	pub := &recording{}
	bubble(t, func(c *Config, s *fakeStore) {
		c.Outputs = pub
		s.onMark = func(int) error {
			time.Sleep(10 * time.Millisecond)
			return nil
		}
	}, func(e *env) {
		e.share(e.shipped(func(*message.Message) error { return nil }), orders(many("m", 50))...)
		e.wantAllMarked(50)
		if n := e.store.count("mark"); n > 3 {
			e.Errorf("%d transactions marked 50 outputs", n)
		}
	})
}

// Each message hears of a mark that failed, and a store that does not return does not leave anybody waiting.
func TestMarksThatFail(t *testing.T) {
	for how, act := range map[string]func() error{
		"an error":  func() error { return errSQL },
		"a panic":   func() error { panic("store") },
		"an ending": func() error { runtime.Goexit(); return nil },
	} {
		t.Run(how, func(t *testing.T) {
			pub := &recording{}
			bubble(t, func(c *Config, s *fakeStore) {
				c.Outputs = pub
				s.onMark = func(n int) error {
					time.Sleep(10 * time.Millisecond)
					if n > 1 {
						return nil
					}
					return act()
				}
			}, func(e *env) {
				e.share(e.shipped(func(*message.Message) error { return nil }), orders(many("m", 10))...)
				unmarked := 0
				for _, o := range e.store.outputs {
					if !o.Sent {
						unmarked++
					}
				}
				told := len(e.log.Captured()[watermill.ErrorLogLevel])
				if unmarked == 0 || unmarked == 10 || told != unmarked {
					e.Errorf("%d of 10 outputs are not marked, and the log tells of %d", unmarked, told)
				}
			})
		})
	}
}

// What one transaction marks is bounded, except for the outputs of a single message.
func TestMarksAreBounded(t *testing.T) {
	var k marking
	sizes := []int{3, maxMarked - 3, 1, maxMarked + 7, 2}
	for i, n := range sizes {
		if first := k.add(sentOutputs{refs: make([]receipts.OutputRef, n)}); first != (i == 0) {
			t.Errorf("caller %d: first is %v", i, first)
		}
	}
	for _, want := range []int{2, 1, 1, 1, 0} {
		if got := len(k.take()); got != want {
			t.Errorf("a transaction marks for %d, want %d", got, want)
		}
	}
	if !k.add(sentOutputs{}) {
		t.Error("nobody writes the next one")
	}
}
