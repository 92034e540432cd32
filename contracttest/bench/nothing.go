package main

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// doingNothing is a router with the same subscriber and a handler without any work. What goes through a router can be no faster, and
// what is done beside it on the same cores adds to its time.
func doingNothing() contender {
	handle := func(sdk.Limits) (message.NoPublishHandlerFunc, error) {
		return func(*message.Message) error { return nil }, nil
	}
	return contender{name: nothingName, round: func(ctx context.Context, w work) (outcome, error) {
		took, err := through(ctx, w, handle)
		return outcome{took: took, values: perSecond(w.messages, took), nothing: true}, err
	}}
}
