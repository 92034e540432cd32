package contracttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

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
		nil, {}, {7}, {0}, {0, 0, 'a', 0}, {0xff, 0xfe, 0xc3, 0x28}, []byte("{\"a\": 'not quite JSON'"), []byte("line\r\nline\n"),
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
	const few, many, window = 100, 10_000, 500
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
	if sent, err = b.sendMany(ctx, many); err != nil {
		return err
	}
	all, err := m.drain(ctx, many, window)
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

// orNil makes a nil error printable with %w.
func orNil(err error) error {
	if err == nil {
		return errors.New("nil")
	}
	return err
}

// outcome fails unless err is the failure of that kind of its only entry.
func outcome(err error, want sdk.Outcome) error {
	if err == nil {
		return fmt.Errorf("Send gave nil, want outcome %s", want)
	}
	if got := sdk.OutcomeOf(sdk.EntryErrors(err, 1)[0]); got != want {
		return fmt.Errorf("Send gave outcome %s, want %s: %w", got, want, err)
	}
	return nil
}

func checkP06Stall(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	resume, err := e.h.Stall(ctx)
	if err != nil {
		return fmt.Errorf("hook Stall: %w", err)
	}
	defer resume()
	msgs := b.messages(1)
	err = e.prompt(ctx, "Send", e.h.Patience/20, func(ctx context.Context) error { return b.d.Send(ctx, b.topic, msgs) })
	if err := outcome(err, sdk.OutcomeUnknown); err != nil {
		return err
	}
	resume()
	return b.sentAgain(ctx, msgs[0])
}

// sentAgain sends a message of unknown outcome again and fails unless one or two whole copies arrive.
func (b *bench) sentAgain(ctx context.Context, msg sdk.Message) error {
	if err := b.e.eventually(ctx, func() error { return b.sendAll(ctx, msg) }); err != nil {
		return err
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err != nil {
		return err
	}
	if len(got) < 1 || len(got) > 2 {
		return fmt.Errorf("a message sent twice came %d times", len(got))
	}
	for _, d := range got {
		if err := same(d, msg); err != nil {
			return err
		}
	}
	return nil
}

func checkP06Cut(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	resume, err := e.h.Stall(ctx)
	if err != nil {
		return fmt.Errorf("hook Stall: %w", err)
	}
	defer resume()
	msgs := b.messages(1)
	start := time.Now()
	answer := make(chan error, 1)
	go func() { answer <- b.sendAll(ctx, msgs...) }()
	// No event tells that the request left the process. A cut before that would rightly be answered with rejected.
	_ = pause(ctx, e.h.Patience/50)
	if err := e.h.Cut(ctx); err != nil {
		return fmt.Errorf("hook Cut: %w", err)
	}
	err = <-answer
	if err := outcome(err, sdk.OutcomeUnknown); err != nil {
		return fmt.Errorf("cut after %s: %w", time.Since(start), err)
	}
	resume()
	return b.sentAgain(ctx, msgs[0])
}

func checkP06Refuse(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	restore, err := e.h.Refuse(ctx, b.topic)
	if err != nil {
		return fmt.Errorf("hook Refuse: %w", err)
	}
	defer restore()
	msgs := b.messages(1)
	if err := outcome(b.sendAll(ctx, msgs...), sdk.OutcomeRejected); err != nil {
		return err
	}
	restore()
	if err := b.sendAll(ctx, msgs...); err != nil {
		return err
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err != nil {
		return err
	}
	return exactly(got, msgs...)
}

func checkP07(ctx context.Context, e *Env) error {
	const most = 64 << 20
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	limit := b.d.Capabilities().MaxPayload
	if limit > most {
		e.note("the declared maximum of %d bytes is too large to try", limit)
		return nil
	}
	batch := b.messages(3)
	batch[1].Payload = make([]byte, limit+1)
	answers := sdk.EntryErrors(b.d.Send(ctx, b.topic, batch), len(batch))
	if answers[1] == nil || sdk.OutcomeOf(answers[1]) != sdk.OutcomePermanent || !errors.Is(answers[1], sdk.ErrTooLarge) {
		return fmt.Errorf("a payload of %d bytes: Send gave %w, want permanent and ErrTooLarge", limit+1, orNil(answers[1]))
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err != nil {
		return fmt.Errorf("after a payload that is too large: %w", err)
	}
	var stored []sdk.Message
	for _, i := range []int{0, 2} {
		if answers[i] == nil {
			stored = append(stored, batch[i])
		}
	}
	return exactly(got, stored...)
}

func checkP08(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	msgs := b.messages(1)
	for _, ended := range []func(context.Context) (context.Context, context.CancelFunc){
		func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithDeadline(ctx, time.Now().Add(-time.Second))
		},
		func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return ctx, cancel
		},
	} {
		err := e.prompt(ctx, "Send with an expired context", 0, func(context.Context) error {
			ctx, cancel := ended(ctx)
			defer cancel()
			return b.d.Send(ctx, b.topic, msgs)
		})
		if errors.Is(err, errLate) {
			return err
		}
		if err == nil {
			e.note("Send stores although its context is over")
		}
	}
	return nil
}

func checkP08Stall(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	resume, err := e.h.Stall(ctx)
	if err != nil {
		return fmt.Errorf("hook Stall: %w", err)
	}
	defer resume()
	err = e.prompt(ctx, "Send", e.h.Patience/20, func(ctx context.Context) error {
		return b.d.Send(ctx, b.topic, b.messages(1))
	})
	if err == nil {
		return errors.New("Send gave nil although the broker did not answer")
	}
	if errors.Is(err, errLate) {
		return err
	}
	return nil
}

func checkP09(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	if _, err := b.send(ctx, 2); err != nil {
		return err
	}
	first, err := b.open(ctx, 1)
	if err != nil {
		return err
	}
	second, err := b.open(ctx, 1)
	if err != nil {
		return err
	}
	d, err := first.one(ctx)
	if err != nil {
		return err
	}
	if err := first.close(ctx); err != nil {
		return err
	}
	errs := []error{first.closed(ctx, "after Source.Close", d.Token)}
	if d, err = second.one(ctx); err != nil {
		return err
	}
	if err := b.d.Close(ctx); err != nil {
		return err
	}
	errs = append(errs, second.closed(ctx, "after Driver.Close", d.Token))
	_, opened := b.d.Open(ctx, b.binding(1))
	return errors.Join(append(errs,
		wantClosed("Send", b.d.Send(ctx, b.topic, b.messages(1))),
		wantClosed("Prepare", b.d.Prepare(ctx, b.binding(1))),
		wantClosed("Open", opened))...)
}

// closed fails unless the source answers ErrClosed.
func (m *member) closed(ctx context.Context, when string, t sdk.Token) error {
	got, err := m.src.Receive(ctx, 1)
	errs := []error{wantClosed("Receive "+when, err)}
	if len(got) > 0 {
		errs = append(errs, fmt.Errorf("Receive %s returned %s", when, ids(got)))
	}
	errs = append(errs, wantClosed("Settle "+when, m.settleTokens(ctx, sdk.Ack, t)))
	if ext, ok := m.src.(sdk.LeaseExtender); ok {
		errs = append(errs, wantClosed("Extend "+when, ext.Extend(ctx, []sdk.Token{t}, m.b.e.h.Lease)))
	}
	return errors.Join(errs...)
}

func wantClosed(call string, err error) error {
	if errors.Is(err, sdk.ErrClosed) {
		return nil
	}
	return fmt.Errorf("%s gave %w, want ErrClosed", call, orNil(err))
}
