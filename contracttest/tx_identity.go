package contracttest

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// identityClauses are about what counts as the same message.
func identityClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T05", Name: "one identity at the same moment",
				Text: "two deliveries of one identity at the same moment on two subscribers: one effect, none diverted",
			},
			check: twinSubscribers[T],
		},
		{
			Clause: Clause{
				ID: "T06", Name: "same identity, other payload",
				Text: "same identity, other payload: effect unchanged; acked only after its dead letter is committed, counted " +
					"as conflicted, never as handled or replayed; a repeated one adds no row",
			},
			check: conflict[T],
		},
		{
			Clause: Clause{
				ID: "T09", Name: "identities are bytes",
				Text: "identities: empty refused, each such message with a dead letter of its own; bytewise distinct (case, trailing blank, NUL, 1 byte to the limit); scope " +
					"separates consumers",
			},
			check: identities[T],
		},
		{
			Clause: Clause{
				ID: "T25", Name: "the books balance",
				Text: "receipts in state done = distinct identities applied = effects; the broker holds nothing unsettled; no " +
					"torn receipt unexplained",
			},
			check: booksBalance[T],
		},
	}
}

// twinSubscribers holds the handler of the first copy open until the second copy is handed out too.
func twinSubscribers[T any](ctx context.Context, e *txEnv[T]) error {
	id := e.messageID()
	both := make(chan struct{})
	handle := func(ctx context.Context, tx T, msg *message.Message) error {
		select {
		case <-both:
			return e.apply(ctx, tx, msg)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for range 2 {
		if _, err := e.consume(ctx, plan[T]{window: 1, handle: handle}); err != nil {
			return err
		}
	}
	if err := e.send(ctx, id, id); err != nil {
		return err
	}
	err := e.eventually(ctx, func() error {
		if n := len(e.w.tokens(id)); n < 2 {
			return fmt.Errorf("%d of 2 copies are handed out", n)
		}
		return nil
	})
	close(both)
	if err != nil {
		return err
	}
	if err := e.ackedTimes(ctx, id, 2); err != nil {
		return err
	}
	return e.balance(ctx, once(id))
}

// conflict sends one payload, another one twice, and the first one again.
func conflict[T any](ctx context.Context, e *txEnv[T]) error {
	id := e.messageID()
	c, err := e.consume(ctx, plan[T]{})
	if err != nil {
		return err
	}
	var early atomic.Int64
	for i, payload := range []string{"first", "second", "second", "first"} {
		if i == 1 {
			e.w.set(func(w *watch) { w.onAck = e.unlessDiverted(&early) })
		}
		if err := e.used[0].sendAll(ctx, sdk.Message{ID: id, Payload: []byte(payload)}); err != nil {
			return err
		}
		if err := e.ackedTimes(ctx, id, i+1); err != nil {
			return err
		}
	}
	if early.Load() > 0 {
		return fmt.Errorf("a conflict was acknowledged before its dead letter was committed")
	}
	r := c.m.Report()
	if r.Handled != 1 || r.Conflicted != 2 || r.Replayed != 1 {
		return fmt.Errorf("counted %d handled, %d conflicted, %d replayed; want 1, 2, 1", r.Handled, r.Conflicted, r.Replayed)
	}
	want := once(id)
	want.dead = map[receipts.DeadLetterKind]int{receipts.KindConflict: 1}
	return e.balance(ctx, want)
}

// unlessDiverted counts acks that come while no dead letter is committed.
func (e *txEnv[T]) unlessDiverted(early *atomic.Int64) func(context.Context, string) {
	return func(ctx context.Context, _ string) {
		letters, err := e.db.Store.DeadLetters(ctx, 1)
		if err != nil || len(letters) == 0 {
			early.Add(1)
		}
	}
}

// The metadata fields of the identity clause: identities travel as hexadecimal digits, because not every broker takes any
// bytes, and a decorator of the subscriber turns them back.
const (
	hexField      = "hex"
	identityField = "identity"
)

// distinct are identities of which no two are the same bytes, though some systems take them for the same text.
func distinct() []string {
	longest := strings.Repeat("k", receipts.MaxKey)
	return []string{
		"a", "A", "a ", "a  ", " a", "a\x00", "a\x00b", "a\t", "á", "a\u0301", "ß", "ss", "ﬀ", "\xff", "\xff\xfe", "\x00", " ", "'", "%",
		longest, longest[1:], longest[1:] + "l", longest[1:] + "K",
	}
}

// identities sends every identity, with one payload, to two consumers, and some that are no identities.
func identities[T any](ctx context.Context, e *txEnv[T]) error {
	want := account{effects: map[string]int64{}, dead: map[receipts.DeadLetterKind]int{}}
	for _, name := range []string{"suite", "other"} {
		group := e.group + name
		if err := e.prepare(ctx, e.topic, group); err != nil {
			return err
		}
		if _, err := e.consume(ctx, e.byIdentity(name, group)); err != nil {
			return err
		}
		for _, id := range distinct() {
			want.effects[name+":"+hex.EncodeToString([]byte(id))] = 1
		}
		want.dead[receipts.KindRefused] += 5 // all but the second copy of a message
	}
	e.used = e.used[1:] // nobody consumes in the clause's own group
	var msgs []sdk.Message
	for _, id := range distinct() {
		msgs = append(msgs, e.identified(id, "the same for all"))
	}
	tooLong := strings.Repeat("k", receipts.MaxKey+1)
	twice := e.identified("", "empty")
	msgs = append(msgs, twice, twice, e.identified("", "empty"), e.identified(tooLong, "too long"),
		sdk.Message{ID: e.messageID(), Payload: []byte("no such field")},
		sdk.Message{ID: e.messageID(), Payload: []byte("no such field")})
	if err := e.used[0].sendAll(ctx, msgs...); err != nil {
		return err
	}
	return e.balance(ctx, want)
}

// identified is a message with that identity.
func (e *txEnv[T]) identified(id, payload string) sdk.Message {
	return sdk.Message{
		ID: e.messageID(), Payload: []byte(payload),
		Metadata: map[string]string{hexField: hex.EncodeToString([]byte(id))},
	}
}

// byIdentity is a consumer that goes by the metadata field and counts by consumer and identity.
func (e *txEnv[T]) byIdentity(name, group string) plan[T] {
	decode := func(msg *message.Message) {
		if digits, ok := msg.Metadata[hexField]; ok {
			id, _ := hex.DecodeString(digits) // the clause has encoded it
			msg.Metadata.Set(identityField, string(id))
		}
	}
	return plan[T]{
		group:  group,
		config: idempotency.Config{Consumer: name, IdentityField: identityField},
		wire: func(c *consumer[T]) error {
			sub, err := c.subscribe("")
			if err != nil {
				return err
			}
			c.router.AddSubscriberDecorators(message.MessageTransformSubscriberDecorator(decode))
			c.router.AddConsumerHandler("apply", e.topic, sub, c.m.Handle(func(ctx context.Context, tx T, msg *message.Message) error {
				return e.s.Apply(ctx, tx, name+":"+msg.Metadata.Get(hexField), 1)
			}))
			return nil
		},
	}
}

// booksBalance mixes everything that happens every day: duplicates, a conflict, a failure, a refusal by the handler.
func booksBalance[T any](ctx context.Context, e *txEnv[T]) error {
	ids := e.ids(6)
	failed := make(chan struct{}, 1)
	refused := e.messageID()
	_, err := e.consume(ctx, plan[T]{handle: func(ctx context.Context, tx T, msg *message.Message) error {
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		switch msg.UUID {
		case ids[2]:
			select {
			case failed <- struct{}{}:
				return fmt.Errorf("the first attempt of %s fails", msg.UUID)
			default:
			}
		case refused:
			return idempotency.Permanent(fmt.Errorf("%s can never be handled", msg.UUID))
		}
		return nil
	}})
	if err != nil {
		return err
	}
	for _, batch := range [][]string{ids, ids[:3], {ids[2], refused, ids[5], refused}} {
		if err := e.send(ctx, batch...); err != nil {
			return err
		}
	}
	if err := e.applied(ctx, ids...); err != nil {
		return err
	}
	if err := e.used[0].sendAll(ctx, sdk.Message{ID: ids[0], Payload: []byte("other")}); err != nil {
		return err
	}
	want := once(ids...)
	want.dead = map[receipts.DeadLetterKind]int{receipts.KindConflict: 1, receipts.KindPermanent: 1}
	return e.balance(ctx, want)
}
