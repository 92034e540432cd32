package contracttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/penstock-mq/penstock/sdk"
)

const (
	textP01 = "what is sent arrives byte for byte: UUID, payload (empty, 1 byte, NULs, invalid UTF-8, 1 MiB), metadata (empty value, unicode, 100 keys)"
	textP02 = "concurrent senders: all arrive, none twice in a fault-free run"
	textP03 = "a batch keeps its order; 10,000 messages in one Send arrive, each once"
	textP04 = "nil from Send means at least the declared boundary: a durable one survives closing and reopening the driver"
	textP05 = "a message that no queue takes is an error, not success, unless the publisher was told to accept it"
	textP06 = "a Send whose answer is lost reports outcome unknown; a Send that was refused reports rejected; sending again with the same identity is safe"
	textP07 = "payload over the declared maximum: permanent error before anything is sent, and the next message still goes through"
	textP08 = "Send with an expired context returns by its deadline, also when the broker does not answer at all"
	textP09 = "Send, Receive, Settle, Prepare after Close: ErrClosed"
)

func publishClauses() []Clause {
	return []Clause{
		{ID: "P01", Name: "byte for byte", Text: textP01, Check: checkP01},
		{ID: "P02", Name: "concurrent senders", Text: textP02, Check: checkP02},
		{ID: "P03", Name: "batches", Text: textP03, Check: checkP03},
		{ID: "P04", Name: "publish boundary", Text: textP04, Capability: "durable", Check: checkP04},
		{ID: "P05", Name: "unroutable", Text: textP05, Capability: "unroutable-detected", Check: checkP05},
		{ID: "P06/cut", Name: "answer lost by a cut", Text: textP06, Hooks: []string{"Stall", "Cut"}, Check: checkP06Cut},
		{ID: "P06/refuse", Name: "refused", Text: textP06, Hooks: []string{"Refuse"}, Check: checkP06Refuse},
		{ID: "P06/stall", Name: "answer lost in time", Text: textP06, Hooks: []string{"Stall"}, Check: checkP06Stall},
		{ID: "P07", Name: "too large", Text: textP07, Capability: "max-payload", Check: checkP07},
		{ID: "P08", Name: "expired context", Text: textP08, Check: checkP08},
		{ID: "P08/stall", Name: "silent broker", Text: textP08, Hooks: []string{"Stall"}, Check: checkP08Stall},
		{ID: "P09", Name: "after Close", Text: textP09, Check: checkP09},
	}
}

func checkP01(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	if err := b.d.Send(ctx, b.topic, nil); err != nil {
		return fmt.Errorf("an empty batch is not an error: %w", err)
	}
	sent := samples(e, b.d.Capabilities().MaxPayload)
	handed := make([]sdk.Message, len(sent))
	for i, m := range sent {
		handed[i] = m
		handed[i].Payload, handed[i].Metadata = bytes.Clone(m.Payload), maps.Clone(m.Metadata)
	}
	if err := b.sendAll(ctx, handed...); err != nil {
		return err
	}
	for i := range handed { // the driver must not keep what it was given
		for j := range handed[i].Payload {
			handed[i].Payload[j] ^= 0xff
		}
		clear(handed[i].Metadata)
	}
	m, err := b.open(ctx, len(sent))
	if err != nil {
		return err
	}
	got, err := m.take(ctx, len(sent))
	if err != nil {
		return err
	}
	byID := map[string]sdk.Delivery{}
	for _, d := range got {
		byID[d.ID] = d
	}
	var errs []error
	for _, want := range sent {
		errs = append(errs, same(byID[want.ID], want))
	}
	return errors.Join(errs...)
}

// samples are messages with the payloads and metadata that brokers stumble over.
func samples(e *Env, maxPayload int) []sdk.Message {
	large := 1 << 20
	if maxPayload > 0 {
		large = min(large, maxPayload)
	}
	many := map[string]string{}
	for i := range 100 {
		many[fmt.Sprintf("key-%d", i)] = fmt.Sprintf("value %d", i)
	}
	payloads := [][]byte{
		nil,
		{},
		{7},
		{0},
		{0, 0, 'a', 0},
		{0xff, 0xfe, 0xc3, 0x28},
		[]byte("{\"a\": 'not quite JSON'"), []byte("one\r\ntwo\n"),
		bytes.Repeat([]byte{0, 1, 0xfe, 0xff}, large/4),
	}
	metadata := []map[string]string{
		nil, {}, {"empty": ""}, {"schlüssel": "wörter ✓ 漢字"}, {"x-death": "taken by a broker", "content-type": "text/x; a=b"}, many,
	}
	var msgs []sdk.Message
	for _, p := range payloads {
		msgs = append(msgs, sdk.Message{ID: e.messageID(), Payload: p, Metadata: map[string]string{"a": "b"}})
	}
	for _, md := range metadata {
		msgs = append(msgs, sdk.Message{ID: e.messageID(), Payload: []byte("p"), Metadata: md})
	}
	return append(msgs, sdk.Message{ID: e.messageID(), Key: "order key ✓", Payload: []byte("keyed")})
}

func checkP02(ctx context.Context, e *Env) error {
	const senders, each = 8, 40
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	batches := make([][]sdk.Message, senders)
	errs := make([]error, senders)
	var group sync.WaitGroup
	for i := range senders {
		batches[i] = b.messages(each)
		group.Go(func() {
			for j := 0; j < each && errs[i] == nil; j += 1 + i { // batches of different sizes
				errs[i] = b.sendAll(ctx, batches[i][j:min(j+1+i, each)]...)
			}
		})
	}
	m, err := b.open(ctx, senders*each)
	if err != nil {
		group.Wait()
		return err
	}
	got, err := m.take(ctx, senders*each)
	group.Wait()
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	var all []sdk.Message
	for _, batch := range batches {
		all = append(all, batch...)
	}
	if err := m.ack(ctx, got...); err != nil {
		return err
	}
	more, err := m.fence(ctx)
	if err != nil {
		return err
	}
	return exactly(append(got, more...), all...)
}

func checkP03(ctx context.Context, e *Env) error {
	const few, window = 100, 500
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	m, err := b.open(ctx, window)
	if err != nil {
		return err
	}
	sent, err := b.send(ctx, few)
	if err != nil {
		return err
	}
	got, err := m.take(ctx, few)
	if err != nil {
		return err
	}
	if err := errors.Join(inOrder(got, sent...), m.ack(ctx, got...)); err != nil {
		return err
	}
	if sent, err = b.sendMany(ctx, e.h.Many); err != nil {
		return err
	}
	all, err := m.drain(ctx, len(sent), window)
	if err != nil {
		return err
	}
	return exactly(all, sent...)
}

// sendMany sends n messages in one Send, or in as few as the declared batch allows.
func (b *bench) sendMany(ctx context.Context, n int) ([]sdk.Message, error) {
	size := b.d.Capabilities().MaxBatch
	if size <= 0 {
		size = n
	}
	msgs := b.messages(n)
	for i := 0; i < n; i += size {
		if err := b.sendAll(ctx, msgs[i:min(i+size, n)]...); err != nil {
			return msgs, err
		}
	}
	return msgs, nil
}

// drain takes and acks n deliveries, at most step at a time.
func (m *member) drain(ctx context.Context, n, step int) ([]sdk.Delivery, error) {
	var all []sdk.Delivery
	for len(all) < n {
		got, err := m.take(ctx, min(step, n-len(all)))
		if err == nil {
			err = m.settle(ctx, sdk.Ack, got...)
		}
		if err != nil {
			return all, fmt.Errorf("after %d deliveries: %w", len(all), err)
		}
		all = append(all, got...)
	}
	return all, m.barrier(ctx)
}

func checkP04(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	sent, err := b.send(ctx, 20)
	if err != nil {
		return err
	}
	if err := b.d.Close(ctx); err != nil {
		return err
	}
	if b, err = b.another(ctx); err != nil {
		return err
	}
	m, err := b.open(ctx, len(sent))
	if err != nil {
		return err
	}
	got, err := m.take(ctx, len(sent))
	if err != nil {
		return err
	}
	return exactly(got, sent...)
}

func checkP05(ctx context.Context, e *Env) error {
	d, err := e.driver(ctx)
	if err != nil {
		return err
	}
	b := &bench{e: e, d: d, topic: e.fresh("t"), group: e.fresh("g")}
	if err := d.Prepare(ctx, sdk.Binding{Topic: b.topic, Declare: true}); err != nil {
		return fmt.Errorf("preparing %s for publishing: %w", b.topic, err)
	}
	lost := b.messages(1)
	if err := b.sendAll(ctx, lost...); !errors.Is(err, sdk.ErrUnroutable) {
		return fmt.Errorf("no group takes the topic's messages: Send gave %w, want ErrUnroutable", orNil(err))
	}
	if err := b.prepare(ctx); err != nil {
		return err
	}
	return b.absent(ctx, lost...) // it also shows that messages go through now
}
