package idempotency

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// maxReplayed is the most unsent outputs of one receipt that a replay sends itself; the relay sends the rest.
const maxReplayed = 1000

type outputTopicKey struct{}

// route says where a handler's returned outputs go. Handle and HandleOutputs have no way to give outputs to the router, so
// they have no publish topic.
type route struct{ publishTopic string }

// toTopic makes an output's copy that remembers its topic until it is stored, also through Config.Inside.
func toTopic(topic string, msg *message.Message) *message.Message {
	output := msg.Copy()
	output.Payload = bytes.Clone(msg.Payload)
	output.SetContext(context.WithValue(msg.Context(), outputTopicKey{}, topic))
	return output
}

// copyOutputs turns what the handler produced into rows. Its errors come before the commit.
func (m *Middleware[T]) copyOutputs(p *pending[T], produced []*message.Message) ([]receipts.Output, error) {
	if len(produced) == 0 {
		return nil, nil
	}
	outputs := make([]receipts.Output, 0, len(produced))
	now := time.Now()
	for i, msg := range produced {
		if msg == nil {
			return nil, fmt.Errorf("output %d of %d is nil", i+1, len(produced))
		}
		topic, named := msg.Context().Value(outputTopicKey{}).(string)
		if !named {
			topic = p.publishTopic
		}
		if err := m.acceptOutput(p.route, topic); err != nil {
			return nil, err
		}
		output := receipts.Output{
			Scope: p.scope, Key: p.key, Topic: topic, UUID: msg.UUID,
			Metadata: maps.Clone(msg.Metadata), Payload: bytes.Clone(msg.Payload),
			At: now, ViaRouter: m.cfg.OutputsThroughRouter,
		}
		if output.UUID == "" {
			output.UUID = watermill.NewUUID()
		}
		outputs = append(outputs, output)
	}
	return outputs, nil
}

// acceptOutput tells whether an output to this topic can be sent after the commit.
func (m *Middleware[T]) acceptOutput(r route, topic string) error {
	switch {
	case m.cfg.OutputsThroughRouter && r.publishTopic == "":
		return fmt.Errorf("%w: OutputsThroughRouter needs a handler with a publish topic: use AddHandler, or set Config.Outputs instead", ErrNoOutputs)
	case m.cfg.OutputsThroughRouter && topic != r.publishTopic:
		return fmt.Errorf("%w: OutputsThroughRouter sends to the handler's topic %q only, not to %q: set Config.Outputs instead",
			ErrNoOutputs, r.publishTopic, topic)
	case m.cfg.OutputsThroughRouter:
		return nil
	case m.cfg.Outputs == nil:
		return fmt.Errorf("%w: set Config.Outputs to the publisher that sends them", ErrNoOutputs)
	case topic == "":
		return fmt.Errorf("%w: the handler has no publish topic: use AddHandler, HandleOutputs or Publisher", ErrNoOutputs)
	}
	return nil
}

// deliverOutputs sees to a done message's outputs: it publishes them, or gives them to the router. Its error means that
// the message must come again; a publish that failed is none: the relay has the rows.
func (m *Middleware[T]) deliverOutputs(p *pending[T], v verdict) ([]*message.Message, error) {
	if !v.replay && len(v.outputs) == 0 {
		return nil, nil
	}
	if m.cfg.OutputsThroughRouter {
		return m.outputsForRouter(p, v)
	}
	if m.cfg.Outputs == nil {
		return nil, nil
	}
	unsent := 0
	if v.replay {
		unsent = m.sendUnsent(context.WithoutCancel(p.ctx), receiptRef{p.scope, string(p.key)}, maxReplayed)
	} else if p.owns != nil {
		_, unsent = m.send(v.outputs, p.owns...)
		p.owns = nil // a publish that goes on in the background keeps it
	}
	if unsent > 0 {
		m.nudge(receiptRef{p.scope, string(p.key)})
	}
	return nil, nil
}

// sendUnsent sends what is unsent of one receipt, unless somebody here is at it. What fails is the relay's: the outputs
// are durable.
func (m *Middleware[T]) sendUnsent(ctx context.Context, ref receiptRef, limit int) (unsent int) {
	var ids []string
	if m.cfg.Guarantee != AtLeastOnce {
		ids = []string{ownerOfReceipt(ref.scope, []byte(ref.key))}
		if !m.sending.own(ids[0]) {
			return 0
		}
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.TxBudget)
	defer cancel()
	outputs, err := m.store.Unsent(ctx, receipts.UnsentQuery{Limit: limit, Scope: ref.scope, Key: []byte(ref.key)})
	if err != nil {
		m.log.Error("Cannot look for a receipt's unsent outputs; the relay will", err, nil)
	}
	if ids == nil { // each row has its own
		outputs, ids = m.ownAll(outputs)
	}
	_, unsent = m.send(outputs, ids...)
	return unsent
}

// outputsForRouter gives a message's outputs as messages for the router to publish: on a replay all of them again, since
// nobody knows what the router's publisher took.
func (m *Middleware[T]) outputsForRouter(p *pending[T], v verdict) ([]*message.Message, error) {
	outputs := v.outputs
	if v.replay {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), m.cfg.TxBudget)
		defer cancel()
		var err error
		if outputs, err = m.store.Outputs(ctx, p.scope, p.key); err != nil {
			return nil, fmt.Errorf("read a replay's outputs: %w", err)
		}
	}
	messages := make([]*message.Message, 0, len(outputs))
	for _, output := range outputs {
		if output.ViaRouter {
			messages = append(messages, messageOf(output))
		}
	}
	if len(messages) > 0 && p.publishTopic == "" {
		return nil, errors.New("stored outputs are for the router, but the handler has no publish topic any more: use AddHandler")
	}
	return messages, nil
}

// messageOf makes the message of a stored output. Its context is empty.
func messageOf(output receipts.Output) *message.Message {
	msg := message.NewMessage(output.UUID, output.Payload)
	if output.Metadata != nil {
		msg.Metadata = output.Metadata
	}
	return msg
}
