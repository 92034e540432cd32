package idempotency

import (
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

// BenchmarkMessage is the middleware's own cost for a message, over a store that does next to nothing.
func BenchmarkMessage(b *testing.B) {
	m, err := New(newFakeStore(), Config{Consumer: "billing"})
	if err != nil {
		b.Fatal(err)
	}
	h := m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		_, err := TxFrom[*fakeTx](msg.Context())
		return nil, err
	})
	ctx := deliver("", "").Context()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		msg := message.NewMessage(strconv.Itoa(i), []byte("payload"))
		msg.SetContext(ctx)
		if _, err := h(msg); err != nil {
			b.Fatal(err)
		}
	}
}
