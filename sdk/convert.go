package sdk

import (
	"context"
	"maps"

	"github.com/ThreeDotsLabs/watermill/message"
)

// MetadataKey is the metadata field that holds [Message.Key], the order key, in a Watermill message, in both directions.
const MetadataKey = "penstock.key"

// fromWatermill copies a message for a driver. The payload is shared: neither side changes it.
func fromWatermill(msg *message.Message) Message {
	m := Message{ID: msg.UUID, Payload: msg.Payload, Key: msg.Metadata[MetadataKey]}
	if len(msg.Metadata) > 0 {
		m.Metadata = maps.Clone(map[string]string(msg.Metadata))
		delete(m.Metadata, MetadataKey)
	}
	return m
}

// toWatermill makes a fresh message of a delivery. The metadata is copied, because handlers and middlewares change it and
// a later attempt must see the original; the payload is shared and must not be changed in place.
func toWatermill(ctx context.Context, m *Message) *message.Message {
	msg := message.NewMessageWithContext(ctx, m.ID, m.Payload)
	maps.Copy(msg.Metadata, m.Metadata)
	if m.Key != "" {
		msg.Metadata[MetadataKey] = m.Key
	}
	return msg
}
