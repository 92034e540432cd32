package idempotency

import (
	"context"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

// flood is a subscriber that hands out n messages of so many keys.
type flood struct{ n, keys int }

func (s flood) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	names := make([]string, max(s.keys, 1))
	if s.keys > 0 {
		for i := range names {
			names[i] = fmt.Sprint("customer-", i)
		}
	}
	payload := make([]byte, 256)
	go func() {
		defer close(out)
		for i := range s.n {
			msg := message.NewMessageWithContext(ctx, "uuid", payload)
			msg.Metadata.Set("key", names[i%len(names)])
			out <- msg
		}
	}()
	return out, nil
}

func (s flood) Close() error { return nil }

// What order costs a message, from the subscriber to its acknowledgement, without a handler.
func BenchmarkOrdered(b *testing.B) {
	for name, keys := range map[string]int{"1 key": 1, "100 keys": 100, "100000 keys": 100000, "no key": 0} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			cfg := Config{Consumer: "billing"}
			orderByKey(&cfg)
			m, err := New(newFakeStore(), cfg)
			if err != nil {
				b.Fatal(err)
			}
			sub, err := m.Ordered(flood{b.N, keys})
			if err != nil {
				b.Fatal(err)
			}
			benchmarkDrain(b, sub, func(msg *message.Message) {
				tk, err := m.ticketFor(msg)
				if err != nil {
					b.Error(err)
				}
				tk.reached()
				tk.passed()
			})
		})
	}
	b.Run("without Ordered", func(b *testing.B) {
		b.ReportAllocs()
		sub, err := message.MessageTransformSubscriberDecorator(func(*message.Message) {})(flood{b.N, 100})
		if err != nil {
			b.Fatal(err)
		}
		benchmarkDrain(b, sub, func(*message.Message) {})
	})
}

func benchmarkDrain(b *testing.B, sub message.Subscriber, handle func(*message.Message)) {
	b.Helper()
	out, err := sub.Subscribe(b.Context(), "orders")
	if err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	for msg := range out {
		handle(msg)
		msg.Ack()
	}
}
