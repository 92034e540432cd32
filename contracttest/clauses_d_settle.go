package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/penstock-mq/penstock/sdk"
)

const (
	textD07 = "a stale token settles nothing: the ack of an old attempt neither removes the message nor disturbs the new attempt"
	textD08 = "settling twice, requeue after ack, ack after close or after connection loss: no effect, no panic, defined error"
	textD09 = "any order of settlement: acking the third of five settles just the third"
	textD13 = "reject goes to the broker's dead-letter path where there is one, and out of the queue"
	textD14 = "settle outcome: confirmed is said only when the broker said so, else sent; a failed one is reported by token"
)

func settleClauses() []Clause {
	return []Clause{
		{ID: "D07", Name: "stale token", Text: textD07, Check: checkD07},
		{ID: "D07/session", Name: "token of an old session", Text: textD07, Capability: "redelivers", Check: checkD07Session},
		{ID: "D08", Name: "settled twice", Text: textD08, Check: checkD08},
		{ID: "D08/close", Name: "ack after close", Text: textD08, Capability: "redelivers", Check: checkD08Close},
		{ID: "D08/cut", Name: "ack after a cut", Text: textD08, Capability: "redelivers", Hooks: []string{"Cut"}, Check: checkD08Cut},
		{ID: "D09", Name: "any order", Text: textD09, Capability: "redelivers", Check: checkD09},
		{ID: "D13", Name: "reject", Text: textD13, Capability: "reject", Check: checkD13},
		{
			ID: "D13/dead-letter", Name: "dead-letter path", Text: textD13, Capability: "reject", Hooks: []string{"DeadLetterTopic"},
			Check: checkD13DeadLetter,
		},
		{ID: "D14", Name: "failed settlement named", Text: textD14, Check: checkD14},
		{
			ID: "D14/broker", Name: "confirmed is settled", Text: textD14, Capability: "settle-confirmed", Hooks: []string{"Unsettled"},
			Check: checkD14Broker,
		},
		{
			ID: "D14/stall", Name: "no answer, not confirmed", Text: textD14, Capability: "settle-confirmed", Hooks: []string{"Stall"},
			Check: checkD14Stall,
		},
	}
}

// stale fails unless err says that the only entry's token is stale.
func stale(what string, err error) error {
	if got := sdk.EntryErrors(err, 1)[0]; !errors.Is(got, sdk.ErrStaleToken) {
		return fmt.Errorf("%s gave %w, want ErrStaleToken", what, orNil(got))
	}
	return nil
}

// renewed opens a member that requeued a message once: old is the first attempt, now the one in flight. The window is
// full, so that a second member gets all that is sent later.
func (e *Env) renewed(ctx context.Context) (m *member, old, now sdk.Delivery, err error) {
	b, err := e.bench(ctx)
	if err != nil {
		return nil, old, now, err
	}
	if _, err = b.send(ctx, 1); err != nil {
		return nil, old, now, err
	}
	if m, err = b.open(ctx, 1); err != nil {
		return nil, old, now, err
	}
	if old, err = m.one(ctx); err != nil {
		return nil, old, now, err
	}
	if err = m.settle(ctx, sdk.Requeue, old); err != nil {
		return nil, old, now, err
	}
	now, err = m.one(ctx)
	return m, old, now, err
}

func checkD07(ctx context.Context, e *Env) error {
	m, old, now, err := e.renewed(ctx)
	if err != nil {
		return err
	}
	for _, v := range []sdk.Verdict{sdk.Ack, sdk.Requeue, sdk.Ack} {
		if err := stale(v.String()+" of an old attempt", m.settle(ctx, v, old)); err != nil {
			return err
		}
	}
	other, err := m.b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := other.fence(ctx)
	if err != nil {
		return err
	}
	if err := noneOf(got, now.Message); err != nil {
		return fmt.Errorf("the new attempt was disturbed: %w", err)
	}
	if err := other.close(ctx); err != nil {
		return err
	}
	if err := m.settle(ctx, sdk.Requeue, now); err != nil {
		return fmt.Errorf("the new attempt after the ack of the old one: %w", err)
	}
	last, err := m.one(ctx)
	if err != nil {
		return fmt.Errorf("the ack of an old attempt removed the message: %w", err)
	}
	return errors.Join(same(last, now.Message), m.ack(ctx, last))
}

func checkD07Session(ctx context.Context, e *Env) error {
	m, old, err := e.held(ctx)
	if err != nil {
		return err
	}
	if err := m.close(ctx); err != nil {
		return err
	}
	next, err := m.b.open(ctx, 1)
	if err != nil {
		return err
	}
	now, err := next.one(ctx)
	if err != nil {
		return err
	}
	if now.Token == old.Token {
		return errors.New("a new session handed out the token of an old one")
	}
	if err := stale("ack with a token of a closed session", next.settle(ctx, sdk.Ack, old)); err != nil {
		return err
	}
	if err := next.close(ctx); err != nil {
		return err
	}
	last, err := m.b.open(ctx, 1)
	if err != nil {
		return err
	}
	d, err := last.one(ctx)
	if err != nil {
		return fmt.Errorf("a token of a closed session removed the message: %w", err)
	}
	return errors.Join(same(d, old.Message), last.ack(ctx, d))
}

func checkD08(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	if err := m.ack(ctx, d); err != nil {
		return err
	}
	if err := stale("a second ack", m.settle(ctx, sdk.Ack, d)); err != nil {
		return err
	}
	if err := stale("a requeue after the ack", m.settle(ctx, sdk.Requeue, d)); err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err != nil {
		return err
	}
	if err := noneOf(got, d.Message); err != nil {
		return fmt.Errorf("requeued after the ack: %w", err)
	}
	return m.twiceInOneBatch(ctx)
}

// twiceInOneBatch checks that contradicting verdicts on one token in one batch do no harm, nor a verdict that is none.
func (m *member) twiceInOneBatch(ctx context.Context) error {
	msgs, err := m.b.send(ctx, 1)
	if err != nil {
		return err
	}
	d, err := m.one(ctx)
	if err != nil {
		return err
	}
	for _, v := range []sdk.Verdict{0, 99} {
		if err := m.settle(ctx, v, d); !errors.Is(err, sdk.ErrUnsupported) {
			return fmt.Errorf("a verdict that is none (%d) gave %w, want ErrUnsupported", v, orNil(err))
		}
	}
	answers := sdk.EntryErrors(m.src.Settle(ctx, []sdk.Settlement{
		{Token: d.Token, Verdict: sdk.Ack}, {Token: d.Token, Verdict: sdk.Requeue},
	}), 2)
	if answers[0] != nil || !errors.Is(answers[1], sdk.ErrStaleToken) {
		return fmt.Errorf("ack and requeue of one token in one batch gave %w and %w, want nil and ErrStaleToken",
			orNil(answers[0]), orNil(answers[1]))
	}
	if err := m.barrier(ctx); err != nil {
		return err
	}
	return errors.Join(m.close(ctx), m.b.absent(ctx, msgs...))
}

func checkD08Close(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	if err := m.close(ctx); err != nil {
		return err
	}
	if err := wantClosed("ack after Close", m.settle(ctx, sdk.Ack, d)); err != nil {
		return err
	}
	return m.b.comesAgain(ctx, d)
}

// comesAgain fails unless the message is handed to a new member.
func (b *bench) comesAgain(ctx context.Context, d sdk.Delivery) error {
	var next *member
	err := b.e.eventually(ctx, func() (err error) { next, err = b.open(ctx, benchWindow); return err })
	if err != nil {
		return err
	}
	again, err := next.one(ctx)
	if err != nil {
		return fmt.Errorf("the message has to come again: %w", err)
	}
	return errors.Join(same(again, d.Message), next.ack(ctx, again))
}

func checkD08Cut(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	if err := e.h.Cut(ctx); err != nil {
		return fmt.Errorf("hook Cut: %w", err)
	}
	if m.settle(ctx, sdk.Ack, d) == nil && m.barrier(ctx) == nil {
		return errors.New("ack after the connection was lost gave nil")
	}
	return m.b.comesAgain(ctx, d)
}

func checkD09(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	msgs, err := b.send(ctx, 5)
	if err != nil {
		return err
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.take(ctx, len(msgs))
	if err != nil {
		return err
	}
	if err := m.ack(ctx, got[2]); err != nil {
		return err
	}
	if err := m.close(ctx); err != nil {
		return err
	}
	if m, err = b.open(ctx, benchWindow); err != nil {
		return err
	}
	rest, err := m.fence(ctx)
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(msgs, func(msg sdk.Message) bool { return msg.ID == got[2].ID })
	if len(rest) < len(left) { // a broker without order may hand out the fences first
		more, err := m.take(ctx, len(left)-len(rest))
		if err != nil {
			return err
		}
		rest = append(rest, more...)
	}
	return exactly(rest, left...)
}

func checkD13(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(m.settle(ctx, sdk.Reject, d), m.barrier(ctx)); err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err != nil {
		return err
	}
	if err := noneOf(got, d.Message); err != nil {
		return fmt.Errorf("after a reject: %w", err)
	}
	return errors.Join(m.close(ctx), m.b.absent(ctx, d.Message))
}

func checkD13DeadLetter(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	dead := &bench{e: e, d: m.b.d, topic: e.h.DeadLetterTopic(m.b.topic), group: e.fresh("dead")}
	if err := dead.prepare(ctx); err != nil {
		return err
	}
	if err := errors.Join(m.settle(ctx, sdk.Reject, d), m.barrier(ctx)); err != nil {
		return err
	}
	consumer, err := dead.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := consumer.one(ctx)
	if err != nil {
		return fmt.Errorf("waiting for the rejected message in %s: %w", dead.topic, err)
	}
	if got.ID != d.ID || string(got.Payload) != string(d.Payload) {
		return fmt.Errorf("rejected %s, and %s arrived in %s, or with another payload", d.ID, got.ID, dead.topic)
	}
	return consumer.ack(ctx, got)
}

func checkD14(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	msgs, err := b.send(ctx, 3)
	if err != nil {
		return err
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.take(ctx, len(msgs))
	if err != nil {
		return err
	}
	if err := m.ack(ctx, got[1]); err != nil {
		return err
	}
	err = m.settle(ctx, sdk.Ack, got...) // the second one is not in flight any more
	answers := sdk.EntryErrors(err, len(got))
	if answers[0] != nil || !errors.Is(answers[1], sdk.ErrStaleToken) || answers[2] != nil {
		return fmt.Errorf("of three acks the second is stale, and Settle gave %w", orNil(err))
	}
	if err := m.barrier(ctx); err != nil {
		return err
	}
	return errors.Join(m.close(ctx), b.absent(ctx, msgs...))
}

func checkD14Broker(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	const n = 10
	if _, err := b.send(ctx, n); err != nil {
		return err
	}
	m, err := b.open(ctx, n)
	if err != nil {
		return err
	}
	got, err := m.take(ctx, n)
	if err != nil {
		return err
	}
	for i, d := range got {
		if err := m.settle(ctx, sdk.Ack, d); err != nil {
			return err
		}
		left, err := e.h.Unsettled(ctx, b.topic, b.group)
		if err != nil {
			return fmt.Errorf("hook Unsettled: %w", err)
		}
		if want := n - i - 1; left != want {
			return fmt.Errorf("%d of %d acks are confirmed, and the broker counts %d unsettled", i+1, n, left)
		}
	}
	return nil
}

func checkD14Stall(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	resume, err := e.h.Stall(ctx)
	if err != nil {
		return fmt.Errorf("hook Stall: %w", err)
	}
	defer resume()
	err = e.prompt(ctx, "Settle", e.h.Patience/20, func(ctx context.Context) error {
		return m.src.Settle(ctx, []sdk.Settlement{{Token: d.Token, Verdict: sdk.Ack}})
	})
	if err == nil {
		return errors.New("Settle gave nil, which means confirmed, although the broker did not answer")
	}
	if errors.Is(err, errLate) {
		return err
	}
	return nil
}
