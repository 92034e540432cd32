package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/sdk"
)

// outputClauses are about messages that handlers produce.
func outputClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T10", Name: "outputs",
				Text: "outputs: none before commit, none of a failed attempt, all after a lost publish with unchanged ids, none " +
					"again once marked sent",
			},
			check: returnedOutputs[T],
		},
		{
			Clause: Clause{
				ID: "T31", Name: "outputs through an EventBus",
				Text: "outputs published through an EventBus inside the handler behave as returned ones; in a consumer-only " +
					"handler without Outputs they fail before commit",
			},
			check: busOutputs[T],
		},
	}
}

// outbox is the publisher that stored outputs are sent with. It loses the first call, passes the others on to the broker
// and forgets nothing.
type outbox struct {
	message.Publisher
	topic *bench
	mu    sync.Mutex
	calls int
	lost  map[string]string // what the first publish carried, which was lost: payload by UUID
	sent  map[string]string // what later ones carried: payload by UUID
	again []string          // UUIDs sent once more
	early int               // messages published before their input was committed
	// committed tells whether the input is committed.
	committed func() bool
}

var errPublishLost = errors.New("the publish was lost by the clause")

// Publish loses its first call, and keeps and passes on what the others carry.
func (o *outbox) Publish(topic string, msgs ...*message.Message) error {
	if err := o.keep(msgs); err != nil {
		return err
	}
	return o.Publisher.Publish(topic, msgs...)
}

func (o *outbox) keep(msgs []*message.Message) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.calls++
	for _, msg := range msgs {
		payload := string(msg.Payload)
		if !o.committed() {
			o.early++
		}
		if o.calls == 1 {
			o.lost[msg.UUID] = payload
			continue
		}
		if _, twice := o.sent[msg.UUID]; twice {
			o.again = append(o.again, msg.UUID)
		}
		o.sent[msg.UUID] = payload
	}
	if o.calls == 1 {
		return errPublishLost
	}
	return nil
}

// outbox makes an outbox for the outputs of one input, and prepares the topic where they go.
func (e *txEnv[T]) outbox(ctx context.Context, input string) (*outbox, error) {
	pub, err := sdk.NewPublisher(e.w, sdk.PublisherConfig{})
	if err != nil {
		return nil, fmt.Errorf("making the publisher of outputs: %w", err)
	}
	e.atEnd(pub.Close)
	o := &outbox{
		Publisher: pub, topic: &bench{e: e.Env, d: e.w.Driver, topic: e.fresh("out"), group: e.fresh("g")},
		lost: map[string]string{}, sent: map[string]string{},
		committed: func() bool {
			got, err := e.effects(context.Background())
			return err == nil && got[input] == 1
		},
	}
	return o, o.topic.prepare(ctx)
}

// arrived compares what is on the topic with the payloads that have to be, each once: also what went another way.
func (o *outbox) arrived(ctx context.Context, payloads ...string) error {
	m, err := o.topic.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	var there []string
	for _, d := range got {
		there = append(there, string(d.Payload))
	}
	slices.Sort(there)
	if want := slices.Sorted(slices.Values(payloads)); err == nil && !slices.Equal(there, want) {
		err = fmt.Errorf("the topic of the outputs has %q, want %q", there, want)
	}
	return errors.Join(err, m.close(ctx))
}

// holds compares what was sent with the payloads that had to be.
func (o *outbox) holds(payloads ...string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	left := map[string]int{}
	for _, p := range payloads {
		left[p]++
	}
	for id, p := range o.sent {
		if id == "" {
			return errors.New("an output was sent without an identity")
		}
		left[p]--
		if left[p] < 0 {
			return fmt.Errorf("output %q was sent, and should not have been, or twice under two identities", p)
		}
	}
	for p, n := range left {
		if n > 0 {
			return fmt.Errorf("output %q was not sent", p)
		}
	}
	for id, p := range o.lost {
		if o.sent[id] != p {
			return fmt.Errorf("output %q was lost, and was not sent again under its identity", p)
		}
	}
	switch {
	case o.early > 0:
		return fmt.Errorf("%d outputs were published before the commit", o.early)
	case len(o.again) > 0:
		return fmt.Errorf("%d outputs were sent again though they were marked as sent", len(o.again))
	case len(o.lost) == 0:
		return errors.New("no publish was lost: the fault has not hit anything")
	default:
		return nil
	}
}

// returnedOutputs has a handler return two outputs, one with an identity and one without; its first attempt fails.
func returnedOutputs[T any](ctx context.Context, e *txEnv[T]) error {
	id := e.messageID()
	box, err := e.outbox(ctx, id)
	if err != nil {
		return err
	}
	var tried attempts
	handle := func(ctx context.Context, tx T, msg *message.Message) ([]*message.Message, error) {
		attempt := tried.next(msg.UUID)
		outputs := []*message.Message{
			message.NewMessage("named-"+id, fmt.Appendf(nil, "named, attempt %d", attempt)),
			message.NewMessage("", fmt.Appendf(nil, "nameless, attempt %d", attempt)),
		}
		if err := e.apply(ctx, tx, msg); err != nil {
			return nil, err
		}
		if attempt == 1 {
			return outputs, errors.New("the first attempt fails")
		}
		return outputs, nil
	}
	_, err = e.consume(ctx, plan[T]{
		config: idempotency.Config{Outputs: box},
		wire: func(c *consumer[T]) error {
			sub, err := c.subscribe("")
			if err != nil {
				return err
			}
			c.router.AddConsumerHandler("apply", e.topic, sub, c.m.HandleOutputs(box.topic.topic, handle))
			return nil
		},
	})
	if err != nil {
		return err
	}
	return e.sentOnce(ctx, box, id, "named, attempt 2", "nameless, attempt 2")
}

// sentOnce sends an input, waits for its outputs, sends the input again and fails if anything else comes.
func (e *txEnv[T]) sentOnce(ctx context.Context, box *outbox, id string, outputs ...string) error {
	if err := e.send(ctx, id); err != nil {
		return err
	}
	if err := e.ackedTimes(ctx, id, 1); err != nil {
		return err
	}
	if err := e.eventually(ctx, func() error { return box.holds(outputs...) }); err != nil {
		return err
	}
	if err := e.eventually(ctx, func() error { return e.compare(ctx, once(id)) }); err != nil { // marked as sent
		return err
	}
	if err := e.send(ctx, id); err != nil {
		return err
	}
	if err := e.ackedTimes(ctx, id, 2); err != nil {
		return err
	}
	if err := e.balance(ctx, once(id)); err != nil {
		return err
	}
	return errors.Join(box.holds(outputs...), box.arrived(ctx, outputs...))
}

// charge is the command and charged the event of T31.
type (
	charge  struct{ ID string }
	charged struct {
		ID      string
		Attempt int
	}
)

// commands is a wire function: a CQRS command handler that publishes its event through an EventBus over box.
func (e *txEnv[T]) commands(box *outbox, tried *attempts) func(c *consumer[T]) error {
	return func(c *consumer[T]) error {
		sub, err := c.subscribe("")
		if err != nil {
			return err
		}
		bus, err := cqrs.NewEventBusWithConfig(c.m.Publisher(box), cqrs.EventBusConfig{
			GeneratePublishTopic: func(cqrs.GenerateEventPublishTopicParams) (string, error) { return box.topic.topic, nil },
			Marshaler:            cqrs.JSONMarshaler{},
		})
		if err != nil {
			return err
		}
		c.router.AddPlugin(c.m.Plugin)
		processor, err := cqrs.NewCommandProcessorWithConfig(c.router, cqrs.CommandProcessorConfig{
			GenerateSubscribeTopic: func(cqrs.CommandProcessorGenerateSubscribeTopicParams) (string, error) { return e.topic, nil },
			SubscriberConstructor: func(cqrs.CommandProcessorSubscriberConstructorParams) (message.Subscriber, error) {
				return sub, nil
			},
			Marshaler: cqrs.JSONMarshaler{},
		})
		if err != nil {
			return err
		}
		return processor.AddHandlers(cqrs.NewCommandHandler("charge", func(ctx context.Context, cmd *charge) error {
			tx, err := idempotency.TxFrom[T](ctx)
			if err != nil {
				return err
			}
			if err := e.s.Apply(ctx, tx, cmd.ID, 1); err != nil {
				return err
			}
			attempt := tried.next(cmd.ID)
			if err := bus.Publish(ctx, &charged{ID: cmd.ID, Attempt: attempt}); err != nil {
				return err
			}
			if attempt == 1 {
				return errors.New("the first attempt fails after it has published")
			}
			return nil
		}))
	}
}

// command makes the message of a charge.
func command(id string) (sdk.Message, error) {
	msg, err := cqrs.JSONMarshaler{}.Marshal(&charge{ID: id})
	if err != nil {
		return sdk.Message{}, err
	}
	return sdk.Message{ID: id, Metadata: msg.Metadata, Payload: msg.Payload}, nil
}

// busOutputs runs the command handler with no Outputs configured, and then with.
func busOutputs[T any](ctx context.Context, e *txEnv[T]) error {
	id := e.messageID()
	cmd, err := command(id)
	if err != nil {
		return err
	}
	box, err := e.outbox(ctx, id)
	if err != nil {
		return err
	}
	if err := e.busWithoutOutputs(ctx, box, cmd); err != nil {
		return fmt.Errorf("without Outputs: %w", err)
	}
	with := plan[T]{config: idempotency.Config{Outputs: box}, wire: e.commands(box, &attempts{})}
	if _, err := e.consume(ctx, with); err != nil {
		return err
	}
	if err := e.ackedTimes(ctx, id, 1); err != nil {
		return err
	}
	want := fmt.Sprintf(`{"ID":%q,"Attempt":2}`, id)
	if err := e.eventually(ctx, func() error { return box.holds(want) }); err != nil {
		return err
	}
	if err := e.used[0].sendAll(ctx, cmd); err != nil {
		return err
	}
	if err := e.ackedTimes(ctx, id, 2); err != nil {
		return err
	}
	if err := e.balance(ctx, once(id)); err != nil {
		return err
	}
	return errors.Join(box.holds(want), box.arrived(ctx, want))
}

// busWithoutOutputs sends the command to a consumer that has nothing to send outputs with, and lets it try three times.
func (e *txEnv[T]) busWithoutOutputs(ctx context.Context, box *outbox, cmd sdk.Message) error {
	var tried attempts
	c, err := e.consume(ctx, plan[T]{wire: e.commands(box, &tried)})
	if err != nil {
		return err
	}
	if err := e.used[0].sendAll(ctx, cmd); err != nil {
		return err
	}
	err = e.eventually(ctx, func() error {
		if n := tried.of(cmd.ID); n < 3 {
			return fmt.Errorf("the handler ran %d times, want at least 3", n)
		}
		return nil
	})
	if err := errors.Join(err, e.compare(ctx, account{}), c.stop()); err != nil {
		return err
	}
	if acks := e.w.ackCount(cmd.ID); box.calls > 0 || acks > 0 {
		return fmt.Errorf("%d publishes, %d acks; want none", box.calls, acks)
	}
	return nil
}
