package sdk

import (
	"context"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

func mustInfo(t *testing.T, msg *message.Message) *DeliveryInfo {
	t.Helper()
	info, ok := DeliveryFrom(msg.Context())
	if !ok {
		t.Fatalf("message %q has no delivery", msg.UUID)
	}
	return info
}

func contextCause(msg *message.Message) error { return context.Cause(msg.Context()) }

func format(e Event) string { return fmt.Sprintf("%+v", e) }

func ids(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("m%05d", i)
	}
	return out
}
