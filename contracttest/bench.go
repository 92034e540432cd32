package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// benchWindow is the window of a member where the clause does not ask for one.
const benchWindow = 32

// bench is a driver with a topic and one group of its own: what most clauses start from.
type bench struct {
	e            *Env
	d            sdk.Driver
	topic, group string
}

// bench opens a driver and prepares a fresh topic with a fresh group.
func (e *Env) bench(ctx context.Context) (*bench, error) {
	d, err := e.driver(ctx)
	if err != nil {
		return nil, err
	}
	b := &bench{e: e, d: d, topic: e.fresh("t"), group: e.fresh("g")}
	return b, b.prepare(ctx)
}

func (b *bench) prepare(ctx context.Context) error {
	err := b.d.Prepare(ctx, sdk.Binding{Topic: b.topic, Declare: true})
	if err == nil {
		err = b.d.Prepare(ctx, b.binding(benchWindow))
	}
	if err != nil {
		return fmt.Errorf("preparing topic %s, group %s: %w", b.topic, b.group, err)
	}
	return nil
}

func (b *bench) binding(window int) sdk.Binding {
	return sdk.Binding{Topic: b.topic, Group: b.group, Window: window, Declare: true}
}

// another gives the same topic and group through a further driver.
func (b *bench) another(ctx context.Context) (*bench, error) {
	d, err := b.e.driver(ctx)
	if err != nil {
		return nil, err
	}
	c := &bench{e: b.e, d: d, topic: b.topic, group: b.group}
	return c, c.prepare(ctx)
}

// inGroup gives the same driver and topic with another group, which is prepared.
func (b *bench) inGroup(ctx context.Context, group string) (*bench, error) {
	c := &bench{e: b.e, d: b.d, topic: b.topic, group: group}
	return c, c.prepare(ctx)
}

// messages makes n small messages with fresh identities.
func (b *bench) messages(n int) []sdk.Message {
	msgs := make([]sdk.Message, n)
	for i := range msgs {
		msgs[i] = sdk.Message{
			ID:       b.e.messageID(),
			Metadata: map[string]string{"n": fmt.Sprint(i)},
			Payload:  fmt.Appendf(nil, "message %d", i),
		}
	}
	return msgs
}

// send sends n fresh messages in one Send and returns them.
func (b *bench) send(ctx context.Context, n int) ([]sdk.Message, error) {
	msgs := b.messages(n)
	return msgs, b.sendAll(ctx, msgs...)
}

func (b *bench) sendAll(ctx context.Context, msgs ...sdk.Message) error {
	ctx, cancel := context.WithTimeout(ctx, b.e.h.Patience)
	defer cancel()
	if err := b.d.Send(ctx, b.topic, msgs); err != nil {
		return fmt.Errorf("sending %d messages to %s: %w", len(msgs), b.topic, err)
	}
	return nil
}

// open opens a member of the group.
func (b *bench) open(ctx context.Context, window int) (*member, error) {
	return b.openWith(ctx, b.binding(window))
}

func (b *bench) openWith(ctx context.Context, binding sdk.Binding) (*member, error) {
	ctx, cancel := context.WithTimeout(ctx, b.e.h.Patience)
	defer cancel()
	src, err := b.d.Open(ctx, binding)
	if err != nil {
		return nil, fmt.Errorf("opening a source of %s, group %s: %w", b.topic, b.group, err)
	}
	return &member{b: b, src: src}, nil
}

// absent opens one more member and fails if any of those messages reaches it before two fences.
func (b *bench) absent(ctx context.Context, msgs ...sdk.Message) error {
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err == nil {
		err = noneOf(got, msgs...)
	}
	return errors.Join(err, m.close(ctx))
}

// member is one open source of a bench's group.
type member struct {
	b   *bench
	src sdk.Source
}

// take receives n deliveries, or says which came before patience ended.
func (m *member) take(ctx context.Context, n int) ([]sdk.Delivery, error) {
	var got []sdk.Delivery
	err := m.receive(ctx, func() int { return n - len(got) }, func(d sdk.Delivery) { got = append(got, d) })
	if err != nil {
		return got, fmt.Errorf("received %d of %d deliveries (%s): %w", len(got), n, ids(got), err)
	}
	return got, nil
}

// one takes exactly one delivery.
func (m *member) one(ctx context.Context) (sdk.Delivery, error) {
	got, err := m.take(ctx, 1)
	if err != nil {
		return sdk.Delivery{}, err
	}
	return got[0], nil
}

// receive hands deliveries to use until open, asked for the next limit, gives 0, or patience ends.
func (m *member) receive(ctx context.Context, open func() int, use func(sdk.Delivery)) error {
	ctx, cancel := context.WithTimeout(ctx, m.b.e.h.Patience)
	defer cancel()
	for limit := open(); limit > 0; limit = open() {
		got, err := m.src.Receive(ctx, limit)
		if err != nil {
			return fmt.Errorf("receiving from %s: %w", m.b.topic, err)
		}
		if len(got) > limit {
			return fmt.Errorf("Receive with limit %d returned %d deliveries", limit, len(got))
		}
		for _, d := range got {
			use(d)
		}
		if len(got) == 0 && pause(ctx, pollPause) != nil {
			return fmt.Errorf("receiving from %s: nothing more came: %w", m.b.topic, ctx.Err())
		}
	}
	return nil
}

// fence sends two messages, one after the other, receives until each came, acks them, and returns what else came
// meanwhile. In a bubble it lingers.
func (m *member) fence(ctx context.Context) ([]sdk.Delivery, error) {
	var others []sdk.Delivery
	for range 2 {
		msgs := m.b.messages(1)
		if err := m.b.sendAll(ctx, msgs...); err != nil {
			return others, fmt.Errorf("sending a fence: %w", err)
		}
		passed := false
		open := func() int {
			if passed {
				return 0
			}
			return 1
		}
		var fence sdk.Delivery
		err := m.receive(ctx, open, func(d sdk.Delivery) {
			if d.ID == msgs[0].ID {
				fence, passed = d, true
				return
			}
			others = append(others, d)
		})
		if err == nil {
			err = m.settle(ctx, sdk.Ack, fence)
		}
		if err != nil {
			return others, fmt.Errorf("waiting for a fence behind %s: %w", ids(others), err)
		}
	}
	return m.linger(ctx, others)
}

// linger receives for a second of virtual time, or a quarter of the lease; outside a bubble it does nothing.
func (m *member) linger(ctx context.Context, others []sdk.Delivery) ([]sdk.Delivery, error) {
	if !m.b.e.h.Bubble {
		return others, nil
	}
	span := time.Second
	if lease := m.src.Capabilities().Lease; lease > 0 {
		span = min(span, lease/4)
	}
	ctx, cancel := context.WithTimeout(ctx, span)
	defer cancel()
	for ctx.Err() == nil {
		got, err := m.src.Receive(ctx, benchWindow)
		if err != nil && ctx.Err() == nil {
			return others, fmt.Errorf("receiving from %s: %w", m.b.topic, err)
		}
		others = append(others, got...)
		_ = pause(ctx, pollPause) // its error ends the loop
	}
	return others, nil
}

// settle settles deliveries with one verdict.
func (m *member) settle(ctx context.Context, v sdk.Verdict, ds ...sdk.Delivery) error {
	return m.settleTokens(ctx, v, tokens(ds)...)
}

func (m *member) settleTokens(ctx context.Context, v sdk.Verdict, ts ...sdk.Token) error {
	ctx, cancel := context.WithTimeout(ctx, m.b.e.h.Patience)
	defer cancel()
	batch := make([]sdk.Settlement, len(ts))
	for i, t := range ts {
		batch[i] = sdk.Settlement{Token: t, Verdict: v}
	}
	if err := m.src.Settle(ctx, batch); err != nil {
		return fmt.Errorf("settling %d deliveries of %s with %s: %w", len(ts), m.b.topic, v, err)
	}
	return nil
}

// ack acks and waits until the broker is known to have it, where the driver can tell.
func (m *member) ack(ctx context.Context, ds ...sdk.Delivery) error {
	if err := m.settle(ctx, sdk.Ack, ds...); err != nil {
		return err
	}
	return m.barrier(ctx)
}

func (m *member) barrier(ctx context.Context) error {
	bar, ok := m.src.(sdk.Barrier)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, m.b.e.h.Patience)
	defer cancel()
	if err := bar.Barrier(ctx); err != nil {
		return fmt.Errorf("barrier on %s: %w", m.b.topic, err)
	}
	return nil
}

func (m *member) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.b.e.h.Patience)
	defer cancel()
	if err := m.src.Close(ctx); err != nil {
		return fmt.Errorf("closing a source of %s: %w", m.b.topic, err)
	}
	return nil
}

// same compares a delivery with what was sent, byte for byte.
func same(d sdk.Delivery, sent sdk.Message) error {
	switch {
	case d.Err != nil:
		return fmt.Errorf("message %s came as undecodable: %w", sent.ID, d.Err)
	case d.ID != sent.ID:
		return fmt.Errorf("message %s came with identity %q", sent.ID, d.ID)
	case d.Key != sent.Key:
		return fmt.Errorf("message %s came with key %q, want %q", sent.ID, d.Key, sent.Key)
	case string(d.Payload) != string(sent.Payload):
		return fmt.Errorf("message %s came with %d other bytes than the %d sent", sent.ID, len(d.Payload), len(sent.Payload))
	case !maps.Equal(d.Metadata, sent.Metadata):
		return fmt.Errorf("message %s came with %d metadata entries that differ from the %d sent",
			sent.ID, len(d.Metadata), len(sent.Metadata))
	default:
		return nil
	}
}

// exactly fails unless the deliveries are the messages, each once, in any order.
func exactly(got []sdk.Delivery, want ...sdk.Message) error {
	count := map[string]int{}
	for _, d := range got {
		count[d.ID]++
	}
	for _, w := range want {
		if count[w.ID] != 1 {
			return fmt.Errorf("message %s came %d times, want once", w.ID, count[w.ID])
		}
		delete(count, w.ID)
	}
	if len(count) > 0 {
		return fmt.Errorf("received what was not expected: %s", strings.Join(slices.Sorted(maps.Keys(count)), ", "))
	}
	return nil
}

// inOrder fails unless the deliveries are the messages in their order.
func inOrder(got []sdk.Delivery, want ...sdk.Message) error {
	if err := exactly(got, want...); err != nil {
		return err
	}
	for i, w := range want {
		if got[i].ID != w.ID {
			return fmt.Errorf("position %d: message %s, want %s", i, got[i].ID, w.ID)
		}
	}
	return nil
}

// noneOf fails if one of the messages is among the deliveries.
func noneOf(got []sdk.Delivery, msgs ...sdk.Message) error {
	for _, d := range got {
		for _, m := range msgs {
			if d.ID == m.ID {
				return fmt.Errorf("message %s was delivered (attempt %d), and should not have been", d.ID, d.Attempt)
			}
		}
	}
	return nil
}

func tokens(ds []sdk.Delivery) []sdk.Token {
	ts := make([]sdk.Token, len(ds))
	for i, d := range ds {
		ts[i] = d.Token
	}
	return ts
}

func ids(ds []sdk.Delivery) string {
	if len(ds) == 0 {
		return "none"
	}
	const most = 10
	var out []string
	for _, d := range ds[:min(len(ds), most)] {
		out = append(out, d.ID)
	}
	if len(ds) > most {
		out = append(out, "…")
	}
	return strings.Join(out, " ")
}
