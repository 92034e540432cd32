package idempotency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

func TestBlockedPublisher(t *testing.T) {
	free := make(chan struct{})
	pub := &recording{}
	bubble(t, withOutputs(pub), func(e *env) {
		free = make(chan struct{})
		pub.hook = func(string, []*message.Message) error { <-free; return nil }
		start := time.Now()
		h := e.shipping(message.NewMessage("o-1", nil))
		if _, err := h(order("u-1")); err != nil || time.Since(start) != publishBound {
			e.Errorf("%v after %v", err, time.Since(start))
		}
		start = time.Now()
		if _, err := h(order("u-1")); err != nil || time.Since(start) != 0 {
			e.Errorf("a replay of what is being published: %v after %v", err, time.Since(start))
		}
		if _, err := e.counting()(deliver("u-2", "p")); err != nil {
			e.Errorf("a neighbour: %v", err)
		}
		close(free)
		synctest.Wait()
		if got := pub.all(); len(got) != 1 || !e.store.outputs[0].Sent {
			e.Errorf("published %v, stored %+v", got, e.store.outputs)
		}
	})
}

func TestBlockedPublishesAreBounded(t *testing.T) {
	pub := &recording{}
	bubble(t, withOutputs(pub), func(e *env) {
		free := make(chan struct{})
		pub.hook = func(string, []*message.Message) error { <-free; return nil }
		h := e.shipping(message.NewMessage("o", nil))
		var wg sync.WaitGroup
		for i := range maxPublishing + 10 {
			wg.Go(func() {
				if _, err := h(order(fmt.Sprint(i))); err != nil {
					e.Error(err)
				}
			})
		}
		wg.Wait()
		if pub.called() != maxPublishing {
			e.Errorf("%d publishes at a time", pub.called())
		}
		e.wantCounts(map[string]uint64{"Handled": maxPublishing + 10, "OutputsFailed": 10})
		close(free)
		synctest.Wait()
		if len(e.m.sending.slots) != 0 || len(e.m.sending.owned) != 0 {
			e.Errorf("%d slots and %d transactions are still taken", len(e.m.sending.slots), len(e.m.sending.owned))
		}
	})
}

func TestPublisher(t *testing.T) {
	direct, outputs := &recording{}, &recording{}
	e := newEnv(t, withOutputs(outputs))
	bus := e.m.Publisher(direct)
	var kept *message.Message
	h := e.acting(func(msg *message.Message) error {
		kept = msg
		in := func(uuid string) *message.Message { return msgIn(msg.Context(), uuid) }
		out := func(uuid string) *message.Message { return msgIn(context.Background(), uuid) }
		if err := bus.Publish("t", out("1"), in("2"), in("3"), out("4"), out("5"), in("6")); err != nil {
			return err
		}
		if got := direct.all(); len(got) != 3 || direct.called() != 2 {
			t.Errorf("sent at once: %v in %d calls", got, direct.called())
		}
		if len(outputs.all()) != 0 {
			t.Error("an output was sent before the commit")
		}
		return nil
	})
	if _, err := h(deliver("u-1", "p")); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range outputs.all() {
		got = append(got, p.topic+p.uuid)
	}
	if !slices.Equal(got, []string{"t2", "t3", "t6"}) {
		t.Errorf("outputs %v", got)
	}

	if err := bus.Publish("t", msgIn(kept.Context(), "late")); !errors.Is(err, ErrTxOver) {
		t.Errorf("after the handler returned: %v", err)
	}
	direct.hook = func(string, []*message.Message) error { return errBroker }
	if err := bus.Publish("t", msgIn(context.Background(), "7")); !errors.Is(err, errBroker) {
		t.Errorf("the publisher's own error: %v", err)
	}
	if err := bus.Publish("t"); err != nil {
		t.Errorf("nothing to publish: %v", err)
	}
	if err := bus.Close(); err != nil || direct.closed != 1 || outputs.closed != 0 {
		t.Errorf("Close: %v, closed %d and %d", err, direct.closed, outputs.closed)
	}
	none := e.m.Publisher(nil)
	if err := none.Publish("t", msgIn(context.Background(), "8")); !errors.Is(err, errNoPublisher) {
		t.Errorf("without publisher: %v", err)
	}
	if err := none.Close(); err != nil {
		t.Error(err)
	}
}

func TestPublisherFromSeveralGoroutines(t *testing.T) {
	pub := &recording{}
	e := newEnv(t, withOutputs(pub))
	bus := e.m.Publisher(nil)
	h := e.acting(func(msg *message.Message) error {
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				if err := bus.Publish("t", msgIn(msg.Context(), fmt.Sprint(i))); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		return nil
	})
	if _, err := h(deliver("u-1", "p")); err != nil {
		t.Fatal(err)
	}
	if got := pub.all(); len(got) != 20 {
		t.Errorf("%d outputs", len(got))
	}
}

func TestInsidePublishes(t *testing.T) {
	pub := &recording{}
	var e *env
	e = newEnv(t, func(c *Config, _ *fakeStore) {
		c.Outputs = pub
		c.Inside = []message.HandlerMiddleware{func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				if err := e.m.Publisher(nil).Publish("audit", msgIn(msg.Context(), "before")); err != nil {
					return nil, err
				}
				outputs, err := h(msg)
				return outputs, errors.Join(err, e.m.Publisher(nil).Publish("audit", msgIn(msg.Context(), "after")))
			}
		}}
	})
	if _, err := e.counting()(order("u-1")); err != nil {
		t.Fatal(err)
	}
	if got := pub.all(); len(got) != 2 || got[0].uuid != "before" || got[1].uuid != "after" {
		t.Errorf("published %v", got)
	}
}

func TestInsideSeesAllOutputs(t *testing.T) {
	pub := &recording{}
	stamp := func(tag string) message.HandlerMiddleware {
		return func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				outputs, err := h(msg)
				for _, o := range outputs {
					o.Metadata.Set("trail", o.Metadata.Get("trail")+tag+msg.UUID)
				}
				return outputs, err
			}
		}
	}
	e := newEnv(t, func(c *Config, _ *fakeStore) {
		c.Outputs = pub
		c.Inside = []message.HandlerMiddleware{stamp("outer"), stamp("inner")}
	})
	handler := e.m.HandleOutputs("returned", func(ctx context.Context, _ *fakeTx, _ *message.Message) ([]*message.Message, error) {
		if err := e.m.Publisher(nil).Publish("bus", msgIn(ctx, "o-1")); err != nil {
			return nil, err
		}
		return []*message.Message{message.NewMessage("o-2", nil)}, nil
	})
	plugged := e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("o-3", nil)}, handler(msg)
	})
	if _, err := plugged(order("u-1")); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"o-1": "bus", "o-2": "returned", "o-3": "shipped"}
	for _, o := range e.store.outputs {
		if o.Topic != want[o.UUID] || o.Metadata["trail"] != "inneru-1outeru-1" {
			t.Errorf("stored %+v", o)
		}
		delete(want, o.UUID)
	}
	if len(want) != 0 {
		t.Errorf("missing: %v", want)
	}
}
