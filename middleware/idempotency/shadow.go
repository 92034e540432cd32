package idempotency

import (
	"bytes"
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
)

// shadowOf makes the copy of a message that the handler sees: payload and metadata are its own, and Ack or Nack on it
// reach nobody.
func shadowOf(ctx context.Context, msg *message.Message) *message.Message {
	shadow := msg.Copy()
	shadow.Payload = bytes.Clone(msg.Payload)
	shadow.SetContext(ctx)
	return shadow
}

// nacked tells whether Nack was the shadow's first decision.
func nacked(shadow *message.Message) bool {
	select {
	case <-shadow.Nacked():
		return true
	default:
		return false
	}
}
