package idempotency

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

var errBroker = errors.New("broker refused")

// withOutputs gives the middleware a recording publisher.

func withOutputs(pub *recording) func(*Config, *fakeStore) {
	return func(c *Config, _ *fakeStore) { c.Outputs = pub }
}

// shipping returns the handler's own messages as outputs of an AddHandler.

func (e *env) shipping(outputs ...*message.Message) message.HandlerFunc {
	return e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		tx, err := TxFrom[*fakeTx](msg.Context())
		if err != nil {
			return nil, err
		}
		tx.add("done", 1)
		return outputs, nil
	})
}

func order(uuid string) *message.Message { return deliverTo("ship", "paid", "shipped", uuid, "p") }

// T10: outputs leave after the commit, once, with their ids.

func TestOutputsAreSentAfterTheCommit(t *testing.T) {
	pub := &recording{}
	e := newEnv(t, withOutputs(pub))
	pub.hook = func(string, []*message.Message) error {
		if e.store.count("commit") == 0 || e.store.openNow() != 0 {
			t.Error("published before the commit")
		}
		return nil
	}
	h := e.shipping(message.NewMessage("o-1", []byte("one")), message.NewMessage("", []byte("two")))
	for range 3 {
		produced, err := h(order("u-1"))
		if err != nil || len(produced) != 0 {
			t.Fatalf("the router got %d messages, %v", len(produced), err)
		}
	}
	got := pub.all()
	if len(got) != 2 || got[0] != (published{"shipped", "o-1", "one"}) || got[1].payload != "two" || len(got[1].uuid) != 36 {
		t.Errorf("published %v", got)
	}
	for _, o := range e.store.outputs {
		if !o.Sent || o.ViaRouter || string(o.Key) != "u-1" || o.Scope == "" || o.At.IsZero() {
			t.Errorf("stored %+v", o)
		}
	}
	e.wantEffect(1)
	e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 2, "OutputsSent": 2})
}

func TestOutputsOfAFailedAttemptAreNotSent(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.Outputs = &recording{} }, func(e *env) {
		h := e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
			if err := e.m.Publisher(nil).Publish("t", msgIn(msg.Context(), "o-2")); err != nil {
				return nil, err
			}
			return []*message.Message{message.NewMessage("o-1", nil)}, errHandler
		})
		if _, err := h(order("u-1")); !errors.Is(err, errHandler) {
			e.Errorf("got %v", err)
		}
		if len(e.store.outputs) != 0 || len(e.m.cfg.Outputs.(*recording).all()) != 0 {
			e.Error("outputs of a failed attempt")
		}
	})
}

func msgIn(ctx context.Context, uuid string) *message.Message {
	msg := message.NewMessage(uuid, []byte(uuid))
	msg.SetContext(ctx)
	return msg
}

// A publish that fails, panics or leaves never fails the input: the outputs are durable.

func TestFailedPublishDoesNotFailTheInput(t *testing.T) {
	faults := map[string]func(string, []*message.Message) error{
		"error":  func(string, []*message.Message) error { return errBroker },
		"panic":  func(string, []*message.Message) error { panic("boom") },
		"goexit": func(string, []*message.Message) error { runtime.Goexit(); return nil },
	}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			pub := &recording{hook: fault}
			e := newEnv(t, withOutputs(pub))
			h := e.shipping(message.NewMessage("o-1", nil))
			if _, err := h(order("u-1")); err != nil {
				t.Fatal(err)
			}
			e.wantCounts(map[string]uint64{"Handled": 1, "OutputsFailed": 1})
			pub.hook = nil
			if _, err := h(order("u-1")); err != nil { // the ack was lost: the replay sends
				t.Fatal(err)
			}
			e.wantEffect(1)
			e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 1, "OutputsFailed": 1, "OutputsSent": 1})
			if got := pub.all(); len(got) != 1 || got[0].uuid != "o-1" || !e.store.outputs[0].Sent {
				t.Errorf("published %v", got)
			}
		})
	}
}

func TestOnePublishForEachTopicInTheirOrder(t *testing.T) {
	var calls []string
	pub := &recording{}
	pub.hook = func(topic string, messages []*message.Message) error {
		calls = append(calls, fmt.Sprint(topic, len(messages)))
		if topic == "b" {
			return errBroker
		}
		return nil
	}
	e := newEnv(t, withOutputs(pub))
	h := e.m.HandleOutputs("c", func(ctx context.Context, tx *fakeTx, _ *message.Message) ([]*message.Message, error) {
		tx.add("done", 1)
		bus := e.m.Publisher(nil)
		for i, topic := range []string{"b", "a", "b", "a"} {
			if err := bus.Publish(topic, msgIn(ctx, fmt.Sprint(i))); err != nil {
				return nil, err
			}
		}
		return []*message.Message{message.NewMessage("4", nil)}, nil
	})
	if err := h(order("u-1")); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(calls, []string{"b2", "a2", "c1"}) {
		t.Errorf("calls %v", calls)
	}
	for i, o := range e.store.outputs {
		if o.UUID != fmt.Sprint(i) || o.Position != i || o.Sent != (o.Topic != "b") {
			t.Errorf("output %d: %+v", i, o)
		}
	}
	e.wantCounts(map[string]uint64{"Handled": 1, "OutputsSent": 3, "OutputsFailed": 2})
}

// Outputs that cannot be sent later fail before the commit, and charge nobody: the program has to change.

func TestOutputsThatCannotBeSent(t *testing.T) {
	returning := func(e *env) message.HandlerFunc { return e.shipping(message.NewMessage("o", nil)) }
	publishing := func(topic string, swallow bool) func(e *env) message.HandlerFunc {
		return func(e *env) message.HandlerFunc {
			return e.acting(func(msg *message.Message) error {
				err := e.m.Publisher(&recording{}).Publish(topic, msgIn(msg.Context(), "o"))
				if swallow {
					return nil
				}
				return err
			})
		}
	}
	consumer := deliverTo("ship", "paid", "", "u-1", "p")
	tests := []struct {
		name    string
		cfg     func(*Config, *fakeStore)
		handler func(e *env) message.HandlerFunc
		msg     *message.Message
	}{
		{"returned, no publisher", nil, returning, order("u-1")},
		{"returned, no topic", withOutputs(&recording{}), returning, consumer},
		{"published, no publisher", nil, publishing("t", false), consumer},
		{"published, no publisher, error swallowed", nil, publishing("t", true), consumer},
		{"through the router without topic", func(c *Config, _ *fakeStore) { c.OutputsThroughRouter = true }, returning, consumer},
		{"through the router to another topic", func(c *Config, _ *fakeStore) { c.OutputsThroughRouter = true }, publishing("t", false), order("u-1")},
		{"HandleOutputs through the router", func(c *Config, _ *fakeStore) { c.OutputsThroughRouter = true }, func(e *env) message.HandlerFunc {
			h := e.m.HandleOutputs("shipped", func(context.Context, *fakeTx, *message.Message) ([]*message.Message, error) {
				return []*message.Message{message.NewMessage("o", nil)}, nil
			})
			return func(msg *message.Message) ([]*message.Message, error) { return nil, h(msg) }
		}, order("u-1")},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, tt.cfg, func(e *env) {
				_, err := tt.handler(e)(tt.msg)
				if !errors.Is(err, ErrNoOutputs) || IsFailure(err) {
					e.Errorf("got %v", err)
				}
				e.wantEffect(0)
				e.wantCounts(map[string]uint64{"Returned": 1})
			})
		})
	}
}

func TestNilOutputIsTheHandlersFailure(t *testing.T) {
	bubble(t, withOutputs(&recording{}), func(e *env) {
		if _, err := e.shipping(nil)(order("u-1")); !IsFailure(err) {
			e.Errorf("returned: %v", err)
		}
		h := e.m.HandleOutputs("t", func(context.Context, *fakeTx, *message.Message) ([]*message.Message, error) {
			return []*message.Message{nil}, nil
		})
		if err := h(order("u-1")); !IsFailure(err) {
			e.Errorf("HandleOutputs: %v", err)
		}
		e.wantEffect(0)
	})
}

func TestStoringOutputsFails(t *testing.T) {
	for _, tt := range []struct {
		err     error
		failure bool
	}{{errSQL, true}, {receipts.ErrTxEnded, true}} {
		bubble(t, func(c *Config, s *fakeStore) {
			c.Outputs = &recording{}
			s.onAddOutputs = func(int) error { return tt.err }
		}, func(e *env) {
			if _, err := e.shipping(message.NewMessage("o", nil))(order("u-1")); !errors.Is(err, tt.err) || IsFailure(err) != tt.failure {
				e.Errorf("got %v", err)
			}
			e.wantEffect(0)
		})
	}
}

// What the handler does with its messages afterwards changes nothing.

func TestOutputsAreCopies(t *testing.T) {
	pub := &recording{}
	e := newEnv(t, withOutputs(pub))
	buf := []byte("one")
	mine := message.NewMessage("o-2", []byte("two"))
	h := e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		first := message.NewMessage("o-1", buf)
		first.SetContext(msg.Context())
		if err := e.m.Publisher(nil).Publish("t", first); err != nil {
			return nil, err
		}
		copy(buf, "XXX") // a buffer that is used again
		first.UUID = "changed"
		return []*message.Message{mine}, nil
	})
	e.store.onCommit = func(int) commitFault {
		copy(mine.Payload, "XXX")
		return commitFault{}
	}
	pub.hook = func(_ string, messages []*message.Message) error {
		for _, msg := range messages {
			if msg == mine || msg.Context() != context.Background() || msg.Metadata == nil {
				t.Errorf("published %+v", msg)
			}
		}
		return nil
	}
	if _, err := h(order("u-1")); err != nil {
		t.Fatal(err)
	}
	want := []published{{"t", "o-1", "one"}, {"shipped", "o-2", "two"}}
	if got := pub.all(); !reflect.DeepEqual(got, want) {
		t.Errorf("published %v, want %v", got, want)
	}
}

func TestMarkingFails(t *testing.T) {
	pub := &recording{}
	e := newEnv(t, func(c *Config, s *fakeStore) { c.Outputs, s.onMark = pub, times(1, errGone) })
	h := e.shipping(message.NewMessage("o-1", nil))
	for range 3 {
		if _, err := h(order("u-1")); err != nil {
			t.Fatal(err)
		}
	}
	if got := pub.all(); len(got) != 2 || got[0] != got[1] {
		t.Errorf("published %v: once more with the same id, then no more", got)
	}
}

// A duplicate that comes at the worst moments does not send what its committer is about to send, or has just sent.

func TestReplayBesideItsCommitter(t *testing.T) {
	for _, mode := range []Guarantee{EffectivelyOnce, AtMostOnce} {
		pub := &recording{}
		bubble(t, func(c *Config, _ *fakeStore) { c.Outputs, c.Guarantee = pub, mode }, func(e *env) {
			h := e.shipping(message.NewMessage("o-1", nil))
			replay := func() {
				if _, err := h(order("u-1")); err != nil {
					e.Error(err)
				}
			}
			var wg sync.WaitGroup
			e.store.onUnsent = func(int) error { time.Sleep(time.Second); return nil } // reads, then dawdles
			pub.hook = func(string, []*message.Message) error {
				wg.Go(replay)
				time.Sleep(500 * time.Millisecond)
				return nil
			}
			if mode == EffectivelyOnce {
				e.store.onCommit = func(n int) commitFault {
					return commitFault{lost: n == 1, apply: true}
				}
				e.store.onResolve = func(n int) error { // committed, and not yet known to be
					if n == 1 {
						wg.Go(replay)
						return errSQL
					}
					return nil
				}
			}
			replay()
			wg.Wait()
			if got := pub.all(); len(got) != 1 {
				e.Errorf("mode %d: published %v", mode, got)
			}
			if len(e.m.sending.owned) != 0 {
				e.Errorf("mode %d: still owned", mode)
			}
		})
	}
}

// What a transaction that did not commit had taken is given back, so that the next one can send.

func TestOwnershipFollowsTheTransaction(t *testing.T) {
	pub := &recording{}
	bubble(t, func(c *Config, s *fakeStore) {
		c.Outputs = pub
		s.onCommit = func(n int) commitFault {
			switch n {
			case 1:
				return commitFault{err: errBusy}
			case 2:
				return commitFault{lost: true}
			case 3:
				return commitFault{err: errSQL}
			}
			return commitFault{}
		}
	}, func(e *env) {
		h := e.shipping(message.NewMessage("o-1", nil))
		if _, err := h(order("u-1")); !errors.Is(err, errSQL) || len(e.m.sending.owned) != 0 {
			e.Errorf("got %v, %d owned", err, len(e.m.sending.owned))
		}
		if _, err := h(order("u-1")); err != nil || len(pub.all()) != 1 {
			e.Errorf("got %v, published %v", err, pub.all())
		}
	})
}

func TestReplayCannotLookForUnsentOutputs(t *testing.T) {
	e := newEnv(t, func(c *Config, s *fakeStore) {
		c.Outputs = &recording{hook: func(string, []*message.Message) error { return errBroker }}
		s.onUnsent = func(int) error { return errGone }
	})
	h := e.shipping(message.NewMessage("o-1", nil))
	for range 2 {
		if _, err := h(order("u-1")); err != nil {
			t.Fatalf("its outputs are durable, the relay has them: %v", err)
		}
	}
	e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 1, "OutputsFailed": 1})
}

// A publisher that blocks keeps a message for a bounded time, and its outputs are marked when it comes back after all.

func TestOutputsThroughTheRouter(t *testing.T) {
	e := newEnv(t, func(c *Config, _ *fakeStore) { c.OutputsThroughRouter = true })
	h := e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		tx, _ := TxFrom[*fakeTx](msg.Context())
		tx.add("done", 1)
		if err := e.m.Publisher(nil).Publish("shipped", msgIn(msg.Context(), "o-1")); err != nil {
			return nil, err
		}
		return []*message.Message{message.NewMessage("", []byte("two"))}, nil
	})
	var ids []string
	for range 3 {
		produced, err := h(order("u-1"))
		if err != nil || len(produced) != 2 || produced[0].UUID != "o-1" || string(produced[1].Payload) != "two" {
			t.Fatalf("got %v, %v", produced, err)
		}
		ids = append(ids, produced[1].UUID)
	}
	if ids[0] == "" || ids[1] != ids[0] || ids[2] != ids[0] {
		t.Errorf("ids %v: a replay keeps them", ids)
	}
	e.wantEffect(1)
	for _, o := range e.store.outputs {
		if !o.ViaRouter || o.Sent {
			t.Errorf("stored %+v", o)
		}
	}

	e.store.mu.Lock()
	other := e.store.outputs[0] // left by a configuration with Config.Outputs: the relay's
	other.ViaRouter, other.Position = false, 9
	e.store.outputs = append(e.store.outputs, other)
	e.store.mu.Unlock()
	if produced, err := h(order("u-1")); err != nil || len(produced) != 2 {
		t.Errorf("got %v, %v", produced, err)
	}

	e.store.onOutputs = func(int) error { return errGone }
	msg, _ := withDelivery(order("u-1"))
	if _, err := h(msg); !errors.Is(err, errGone) || IsFailure(err) {
		t.Errorf("a replay that cannot read its outputs must come again: %v", err)
	}
	e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 3, "Returned": 1})
}

// T31 in part: what the publisher does with each kind of message.

// A middleware inside may produce outputs of its own, before and after the handler.

// What changes outputs belongs inside, and sees those of every kind.
