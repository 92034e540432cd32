package idempotency

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// batcher is a function for HandleBatch that notes its calls, marks each message and then does what f says.
type batcher struct {
	f func(ctx context.Context, tx *fakeTx, msgs []*message.Message) error

	mu    sync.Mutex
	calls []string // the UUIDs of each call
}

func (b *batcher) handle(ctx context.Context, tx *fakeTx, msgs []*message.Message) error {
	var uuids []string
	for _, msg := range msgs {
		tx.add("u:"+msg.UUID, 1)
		uuids = append(uuids, msg.UUID)
	}
	b.mu.Lock()
	b.calls = append(b.calls, strings.Join(uuids, " "))
	b.mu.Unlock()
	if b.f == nil {
		return nil
	}
	return b.f(ctx, tx, msgs)
}

func (b *batcher) wantCalls(t *testing.T, want ...string) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Equal(b.calls, want) {
		t.Errorf("calls %q, want %q", b.calls, want)
	}
}

// batching is HandleBatch as a HandlerFunc.
func (e *env) batching(b *batcher) message.HandlerFunc {
	h := e.m.HandleBatch(b.handle)
	return func(msg *message.Message) ([]*message.Message, error) { return nil, h(msg) }
}

// has tells whether one of the messages has this UUID.
func has(uuid string, msgs []*message.Message) bool {
	return slices.ContainsFunc(msgs, func(msg *message.Message) bool { return msg.UUID == uuid })
}

// All new messages of a batch come in one call; replays and conflicts do not.
func TestHandleBatchGetsWhatIsNew(t *testing.T) {
	bubble(t, nil, func(e *env) {
		b := &batcher{}
		h := e.batching(b)
		c := e.share(h, messages("a")...)
		open := e.holdLanes()
		c.enter(h, deliver("a", "p"), deliver("b", "p"), deliver("a", "q"), deliver("c", "p"), deliver("c", "p"), deliver("d", "p"))
		open()
		c.wait()
		c.wantEndings()
		b.wantCalls(e.T, "a", "b c d")
		e.wantApplied("a b c d")
		e.wantCounts(map[string]uint64{"Handled": 4, "Replayed": 2, "Conflicted": 1})
	})
}

// What one message does to a batch handler: all run again in halves until it is alone, and it alone is charged.
func TestHandleBatchFindsTheCulprit(t *testing.T) {
	tests := map[string]struct {
		act  func(ctx context.Context, bad *message.Message) error
		ends string
	}{
		"fails":       {func(context.Context, *message.Message) error { return errHandler }, "failed"},
		"panics":      {func(context.Context, *message.Message) error { panic("by hand") }, "panicked"},
		"exits":       {func(context.Context, *message.Message) error { runtime.Goexit(); return nil }, "exited"},
		"nacks":       {func(_ context.Context, bad *message.Message) error { bad.Nack(); return nil }, "failed"},
		"is given up": {func(context.Context, *message.Message) error { return Permanent(errHandler) }, "done"},
		"stands still": {
			func(context.Context, *message.Message) error { time.Sleep(time.Minute); return nil },
			"failed",
		},
		"listens to its budget": {func(ctx context.Context, _ *message.Message) error { <-ctx.Done(); return ctx.Err() }, "failed"},
	}
	for name, tt := range tests {
		for _, bad := range []string{"a", "d", "h"} {
			for _, parts := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s as %s, parts %v", name, bad, parts), func(t *testing.T) {
					bubble(t, func(_ *Config, s *fakeStore) { s.info.Parts = parts }, func(e *env) {
						b := &batcher{f: func(ctx context.Context, _ *fakeTx, msgs []*message.Message) error {
							if i := slices.IndexFunc(msgs, func(msg *message.Message) bool { return msg.UUID == bad }); i >= 0 {
								return tt.act(ctx, msgs[i])
							}
							return nil
						}}
						c := e.share(e.batching(b), messages("a b c d e f g h")...)
						c.wantEndings(bad + ":" + tt.ends)
						e.wantApplied(strings.Trim(strings.ReplaceAll("a b c d e f g h", bad, ""), " "))
						want := map[string]uint64{"Handled": 7, "Failed": 1}
						if tt.ends == "done" {
							want = map[string]uint64{"Handled": 7, "Diverted": 1}
						}
						e.wantCounts(want)
						if n := len(b.calls); n > 9 { // halves, or each alone where a call took longer than BatchTime
							e.Errorf("%d calls for one of 8: %q", n, b.calls)
						}
					})
				})
			}
		}
	}
}

// A panic reaches the goroutine of the one message it belongs to, with its value.
func TestHandleBatchPanicsWithItsValue(t *testing.T) {
	bubble(t, nil, func(e *env) {
		b := &batcher{f: func(_ context.Context, _ *fakeTx, msgs []*message.Message) error {
			if has("b", msgs) {
				panic(errHandler)
			}
			return nil
		}}
		c := e.share(e.batching(b), messages("a b c")...)
		c.wantEndings("b:panicked")
		if value, _ := c.of("b").panicked.(error); !errors.Is(value, errHandler) {
			e.Errorf("panicked with %v", c.of("b").panicked)
		}
	})
}

// PerBatch: nobody of the batch is applied or acknowledged, nobody is charged unless it was alone, and the next batches are
// smaller. Earlier batches stay.
func TestHandleBatchPerBatch(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.Atomicity = PerBatch }, func(e *env) {
		b := &batcher{f: func(_ context.Context, _ *fakeTx, msgs []*message.Message) error {
			if has("bad", msgs) {
				return errHandler
			}
			return nil
		}}
		h := e.batching(b)
		c := e.share(h, messages("x y")...)
		open := e.holdLanes()
		c.enter(h, messages("a bad b c")...)
		open()
		c.wait()
		c.wantEndings("a:returned", "bad:returned", "b:returned", "c:returned")
		for _, o := range c.all[2:] {
			if !errors.Is(o.err, errHandler) {
				e.Errorf("%s goes back without the reason: %v", o.msg.UUID, o.err)
			}
		}
		e.wantApplied("x y")
		open = e.holdLanes()
		c.enter(h, messages("a2 b2 bad2 c2")...)
		open()
		c.wait()
		b.wantCalls(e.T, "x y", "a bad b c", "a2 b2", "bad2 c2")
		open = e.holdLanes()
		c.enter(h, messages("bad")...)
		open()
		c.wait()
		if got := c.all[len(c.all)-1].String(); got != "failed" {
			e.Errorf("alone it is %s", got)
		}
	})
}

// A message that goes away while the batch waits, or while its handler runs.
func TestHandleBatchAndMessagesThatGoAway(t *testing.T) {
	t.Run("before", func(t *testing.T) {
		bubble(t, func(_ *Config, s *fakeStore) {}, func(e *env) {
			b := &batcher{}
			gone, cancel := withCancel(deliver("b", "p"))
			e.store.onClaim = func(int) error { cancel(); return nil }
			c := e.share(e.batching(b), deliver("a", "p"), gone, deliver("c", "p"))
			c.wantEndings("b:returned")
			b.wantCalls(e.T, "a c")
			e.wantApplied("a c")
		})
	})
	for _, delivery := range []bool{false, true} {
		t.Run(fmt.Sprintf("during, of ours %v", delivery), func(t *testing.T) {
			bubble(t, nil, func(e *env) {
				gone, cancel := withCancel(deliver("b", "p"))
				if delivery {
					gone, _ = withDelivery(gone)
				}
				b := &batcher{f: func(ctx context.Context, _ *fakeTx, msgs []*message.Message) error {
					if has("b", msgs) {
						cancel()
					}
					return ctx.Err() // the batch's context does not end with one of its messages
				}}
				c := e.share(e.batching(b), deliver("a", "p"), gone, deliver("c", "p"))
				if delivery { // the engine ignores its Ack from now on: it comes again for certain
					c.wantEndings("b:returned")
					b.wantCalls(e.T, "a b c", "a c")
					e.wantApplied("a c")
					return
				}
				c.wantEndings()
				b.wantCalls(e.T, "a b c")
				e.wantApplied("a b c")
			})
		})
	}
}

// What belongs to one message goes with that message's context: its outputs. With the batch's own context nobody could tell
// whose they are.
func TestHandleBatchOutputs(t *testing.T) {
	for _, mode := range []Guarantee{EffectivelyOnce, AtLeastOnce, AtMostOnce} {
		t.Run(fmt.Sprint(mode), func(t *testing.T) {
			pub := &recording{}
			bubble(t, guaranteed(mode, withOutputs(pub)), func(e *env) {
				bus := e.m.Publisher(nil)
				b := &batcher{f: func(_ context.Context, _ *fakeTx, msgs []*message.Message) error {
					for _, msg := range msgs {
						output := message.NewMessage("o-"+msg.UUID, nil)
						output.SetContext(msg.Context())
						if err := bus.Publish("shipped", output); err != nil {
							return err
						}
					}
					return nil
				}}
				c := e.share(e.batching(b), messages("a b c")...)
				c.wantEndings()
				b.wantCalls(e.T, "a b c")
				if got := sentOf(pub); got != "o-a o-b o-c" {
					e.Errorf("sent %q", got)
				}
				for _, o := range e.store.outputs {
					if "o-"+string(o.Key) != o.UUID {
						e.Errorf("%s belongs to %q", o.UUID, o.Key)
					}
				}
			})
		})
	}
	t.Run("with the batch's context", func(t *testing.T) {
		pub := &recording{}
		bubble(t, withOutputs(pub), func(e *env) {
			bus := e.m.Publisher(nil)
			refused := 0
			b := &batcher{f: func(ctx context.Context, _ *fakeTx, msgs []*message.Message) error {
				output := message.NewMessage("o", nil)
				output.SetContext(ctx)
				err := bus.Publish("shipped", output)
				if len(msgs) > 1 && errors.Is(err, ErrNoOutputs) {
					refused++
				}
				return nil // swallowed: it may not commit all the same
			}}
			c := e.share(e.batching(b), messages("a b c")...)
			c.wantEndings()
			e.wantApplied("a b c")
			if refused == 0 || len(pub.all()) != 3 {
				e.Errorf("refused %d times, sent %v", refused, pub.all())
			}
		})
	})
}

// The context of a call: transaction, values of the first message, deadline; over when the call is.
func TestHandleBatchContext(t *testing.T) {
	bubble(t, nil, func(e *env) {
		var kept []context.Context
		b := &batcher{f: func(ctx context.Context, tx *fakeTx, msgs []*message.Message) error {
			got, err := TxFrom[*fakeTx](ctx)
			if err != nil || got != tx || message.HandlerNameFromCtx(ctx) != "charge" {
				e.Errorf("TxFrom %v, %v", got, err)
			}
			if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) != defaultTxBudget {
				e.Errorf("deadline in %v", time.Until(deadline))
			}
			kept = append(kept, ctx)
			for _, msg := range msgs {
				if got, err := TxFrom[*fakeTx](msg.Context()); err != nil || got != tx {
					e.Errorf("TxFrom of %s: %v, %v", msg.UUID, got, err)
				}
				kept = append(kept, msg.Context())
			}
			return nil
		}}
		e.share(e.batching(b), messages("a b")...)
		for i, ctx := range kept {
			if _, err := TxFrom[*fakeTx](ctx); !errors.Is(err, ErrTxOver) || ctx.Err() == nil {
				e.Errorf("context %d goes on: %v, %v", i, err, ctx.Err())
			}
		}
	})
}

// Inside another level of the same middleware it gets one message at a time, in that level's transaction.
func TestHandleBatchInsidePlugin(t *testing.T) {
	bubble(t, nil, func(e *env) {
		b := &batcher{}
		c := e.share(e.m.Wrap(e.batching(b)), messages("a b c")...)
		c.wantEndings()
		b.wantCalls(e.T, "a", "b", "c")
		e.wantApplied("a b c")
		if got := e.store.count("commit"); got != 1 {
			e.Errorf("%d transactions", got)
		}
	})
}

// A function whose calls take long, however many messages they have, goes on getting many; one that takes long for each
// message does not outlive its budget again and again.
func TestHandleBatchThatTakesLong(t *testing.T) {
	for _, tt := range []struct {
		name       string
		call, each time.Duration
		calls      int
		within     time.Duration
	}{
		{"for a call", 30 * time.Millisecond, 0, 20, time.Second},
		{"for a message", 0, 50 * time.Millisecond, 60, 2000*50*time.Millisecond + 2*defaultTxBudget},
	} {
		for _, before := range []int{0, 10} { // so many alone, before there are batches
			t.Run(fmt.Sprintf("%s, after %d", tt.name, before), func(t *testing.T) {
				bubble(t, nil, func(e *env) {
					b := &batcher{f: func(_ context.Context, _ *fakeTx, msgs []*message.Message) error {
						time.Sleep(tt.call + time.Duration(len(msgs))*tt.each)
						return nil
					}}
					h := e.batching(b)
					for i := range before {
						if _, err := h(deliver(fmt.Sprint("before ", i), "p")); err != nil {
							e.Error(err)
						}
					}
					start := time.Now()
					c := &crowd{e: e}
					open := e.holdLanes()
					c.enter(h, numbered(2000)...)
					open()
					c.wg.Wait()
					c.wantEndings()
					if took := time.Since(start); took > tt.within || len(b.calls)-before > tt.calls {
						e.Errorf("%v in %d calls", took, len(b.calls)-before)
					}
				})
			})
		}
	}
}

// Contention and outages inside a batch handler are nobody's failure.
func TestHandleBatchMeetsTheDatabase(t *testing.T) {
	for _, fault := range []error{errBusy, errGone, fmt.Errorf("insert: %w", errBusy), Permanent(errBusy)} {
		t.Run(fault.Error(), func(t *testing.T) {
			bubble(t, nil, func(e *env) {
				calls := 0
				b := &batcher{f: func(context.Context, *fakeTx, []*message.Message) error {
					if calls++; calls <= 2 {
						return fault
					}
					return nil
				}}
				c := e.share(e.batching(b), messages("a b c d")...)
				c.wantEndings()
				e.wantApplied("a b c d")
				if r := e.m.Report(); r.Failed+r.Returned+r.Diverted != 0 || r.Contention+r.Outages == 0 {
					e.Errorf("report %+v", r)
				}
			})
		})
	}
}
