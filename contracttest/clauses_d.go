package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

const (
	textD01 = "an unsettled delivery is not handed out again inside its group while the lease or connection lives"
	textD02 = "acked and confirmed (or acked, then a barrier) is gone: not after reconnect, not after reopen, not for a second member of the group"
	textD03 = "requeued comes back, with a new token"
	textD04 = "requeue(after d): not before d, and not lost"
	textD06 = "close (or kill -9) with unsettled deliveries: all of them come back, none lost; confirmed acks do not"
	textD10 = "in flight never exceeds the window, seen from the broker's side"
	textD11 = "lease: an expired one is redelivered; an extended one is not, though the handler runs longer than the lease"
	textD17 = "one message's trouble leaves its prefetched neighbours' attempt counts alone"
	textD18 = "its Attempt is one higher"
)

// deliveryClauses are those about handing out; settleClauses has those about settling.
func deliveryClauses() []Clause {
	return []Clause{
		{ID: "D01", Name: "handed out once", Text: textD01, Check: checkD01},
		{ID: "D02", Name: "acked is gone", Text: textD02, Check: checkD02},
		{ID: "D02/cut", Name: "acked is gone after a cut", Text: textD02, Hooks: []string{"Cut"}, Check: checkD02Cut},
		{ID: "D03", Name: "requeue", Text: textD03, Check: checkD03},
		{ID: "D04", Name: "delayed requeue", Text: textD04, Capability: "delayed-requeue", Check: checkD04},
		{ID: "D06", Name: "closed source", Text: textD06, Capability: "redelivers", Check: checkD06},
		{ID: "D06/driver", Name: "closed driver", Text: textD06, Capability: "redelivers", Check: checkD06Driver},
		{
			ID: "D06/kill", Name: "killed consumer", Text: textD06, Capability: "redelivers", Hooks: []string{"KillConsumer"},
			Check: checkD06Kill,
		},
		{ID: "D10", Name: "window", Text: textD10, Check: checkD10},
		{ID: "D10/broker", Name: "window at the broker", Text: textD10, Hooks: []string{"Unsettled"}, Check: checkD10Broker},
		{ID: "D11", Name: "lease", Text: textD11, Capability: "lease", Check: checkD11},
		{ID: "D17", Name: "neighbours not charged", Text: textD17, Check: checkD17},
		{ID: "D18", Name: "attempts counted", Text: textD18, Capability: "delivery-count", Check: checkD18},
	}
}

// pair opens two members of one group, the first holding the deliveries of n messages. Its window is full, so that it
// cannot prefetch what the other one waits for.
func (e *Env) pair(ctx context.Context, n int) (holder, other *member, held []sdk.Delivery, err error) {
	b, err := e.bench(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	if holder, err = b.open(ctx, n); err != nil {
		return nil, nil, nil, err
	}
	if _, err = b.send(ctx, n); err != nil {
		return nil, nil, nil, err
	}
	if held, err = holder.take(ctx, n); err != nil {
		return nil, nil, nil, err
	}
	other, err = b.open(ctx, benchWindow)
	return holder, other, held, err
}

// sent turns deliveries back into what was sent, for comparing.
func sent(ds ...sdk.Delivery) []sdk.Message {
	msgs := make([]sdk.Message, len(ds))
	for i, d := range ds {
		msgs[i] = d.Message
	}
	return msgs
}

func checkD01(ctx context.Context, e *Env) error {
	holder, other, held, err := e.pair(ctx, 3)
	if err != nil {
		return err
	}
	got, err := other.fence(ctx)
	if err == nil {
		got, err = holder.linger(ctx, got)
	}
	if err != nil {
		return err
	}
	if err := noneOf(got, sent(held...)...); err != nil {
		return fmt.Errorf("unsettled in the same group: %w", err)
	}
	if err := e.unsettled(ctx, holder.b.topic, holder.b.group, len(held)); err != nil {
		return err
	}
	return holder.ack(ctx, held...)
}

func checkD02(ctx context.Context, e *Env) error {
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
	if err := m.ack(ctx, got...); err != nil {
		return err
	}
	second, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	if err := m.close(ctx); err != nil { // else it could prefetch the fences of the second one
		return err
	}
	came, err := second.fence(ctx)
	if err != nil {
		return err
	}
	if err := noneOf(came, msgs...); err != nil {
		return fmt.Errorf("a second member after the ack: %w", err)
	}
	if err := second.close(ctx); err != nil {
		return err
	}
	if err := b.absent(ctx, msgs...); err != nil {
		return fmt.Errorf("after the sources were closed: %w", err)
	}
	if err := b.d.Close(ctx); err != nil {
		return err
	}
	if b, err = b.another(ctx); err != nil {
		return err
	}
	if err := b.absent(ctx, msgs...); err != nil {
		return fmt.Errorf("after the driver was closed: %w", err)
	}
	return e.unsettled(ctx, b.topic, b.group, 0)
}

func checkD02Cut(ctx context.Context, e *Env) error {
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
	if err := m.ack(ctx, got...); err != nil {
		return err
	}
	if err := e.h.Cut(ctx); err != nil {
		return fmt.Errorf("hook Cut: %w", err)
	}
	var again *member
	err = e.eventually(ctx, func() (err error) { again, err = b.open(ctx, benchWindow); return err })
	if err != nil {
		return err
	}
	came, err := again.fence(ctx)
	if err != nil {
		return err
	}
	return noneOf(came, msgs...)
}

func checkD03(ctx context.Context, e *Env) error {
	m, first, err := e.held(ctx)
	if err != nil {
		return err
	}
	seen := []sdk.Token{first.Token}
	d := first
	for range 3 {
		if err := m.settle(ctx, sdk.Requeue, d); err != nil {
			return err
		}
		if d, err = m.one(ctx); err != nil {
			return fmt.Errorf("after a requeue: %w", err)
		}
		if err := same(d, first.Message); err != nil {
			return err
		}
		if slices.Contains(seen, d.Token) {
			return fmt.Errorf("attempt %d has the token of an earlier one", len(seen)+1)
		}
		seen = append(seen, d.Token)
	}
	if err := m.ack(ctx, d); err != nil {
		return err
	}
	return errors.Join(m.close(ctx), m.b.absent(ctx, first.Message))
}

// held opens a member that holds the delivery of one message.
func (e *Env) held(ctx context.Context) (*member, sdk.Delivery, error) {
	b, err := e.bench(ctx)
	if err != nil {
		return nil, sdk.Delivery{}, err
	}
	if _, err := b.send(ctx, 1); err != nil {
		return nil, sdk.Delivery{}, err
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return nil, sdk.Delivery{}, err
	}
	d, err := m.one(ctx)
	return m, d, err
}

func checkD04(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	delay := e.h.Lease
	start := time.Now()
	if err := m.src.Settle(ctx, []sdk.Settlement{{Token: d.Token, Verdict: sdk.Requeue, Delay: delay}}); err != nil {
		return fmt.Errorf("requeue with a delay of %s: %w", delay, err)
	}
	early, err := m.fence(ctx)
	if err != nil {
		return fmt.Errorf("others have to flow while one is delayed: %w", err)
	}
	if len(early) == 0 {
		if early, err = m.take(ctx, 1); err != nil {
			return fmt.Errorf("after a requeue with a delay of %s: %w", delay, err)
		}
	}
	if took := time.Since(start); took < delay {
		return fmt.Errorf("requeued for %s, came back after %s", delay, took)
	}
	return exactly(early, d.Message)
}

func checkD06(ctx context.Context, e *Env) error {
	return e.abandon(ctx, func(ctx context.Context, m *member) (*bench, error) { return m.b, m.close(ctx) })
}

func checkD06Driver(ctx context.Context, e *Env) error {
	return e.abandon(ctx, func(ctx context.Context, m *member) (*bench, error) {
		if err := m.b.d.Close(ctx); err != nil {
			return nil, fmt.Errorf("closing a driver with unsettled deliveries: %w", err)
		}
		return m.b.another(ctx)
	})
}

// abandon takes six of ten messages, acks two of them, ends the consumer and fails unless exactly the other eight come
// to its successor, in their old order where that is declared.
func (e *Env) abandon(ctx context.Context, end func(context.Context, *member) (*bench, error)) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	msgs, err := b.send(ctx, 10)
	if err != nil {
		return err
	}
	m, err := b.open(ctx, 6)
	if err != nil {
		return err
	}
	got, err := m.take(ctx, 6)
	if err != nil {
		return err
	}
	if err := m.ack(ctx, got[1], got[3]); err != nil {
		return err
	}
	if b, err = end(ctx, m); err != nil {
		return err
	}
	left := slices.DeleteFunc(msgs, func(msg sdk.Message) bool { return msg.ID == got[1].ID || msg.ID == got[3].ID })
	next, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	came, err := next.take(ctx, len(left))
	if err != nil {
		return err
	}
	caps := next.src.Capabilities()
	if caps.Ordered && caps.OrderAfterRequeue {
		err = inOrder(came, left...)
	}
	more, fenced := next.fence(ctx)
	return errors.Join(err, fenced, exactly(append(came, more...), left...))
}

func checkD06Kill(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	msgs, err := b.send(ctx, 10)
	if err != nil {
		return err
	}
	if err := e.h.KillConsumer(ctx, b.topic, b.group, 4); err != nil {
		return fmt.Errorf("hook KillConsumer: %w", err)
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.take(ctx, len(msgs))
	if err != nil {
		return err
	}
	return exactly(got, msgs...)
}

func checkD17(ctx context.Context, e *Env) error {
	const n = 5
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	if _, err := b.send(ctx, n); err != nil {
		return err
	}
	m, err := b.open(ctx, n)
	if err != nil {
		return err
	}
	first, err := m.one(ctx)
	if err != nil {
		return err
	}
	// The trouble: a double settlement, a token that means nothing, a verdict that is none. Then its neighbours are looked at.
	if err := m.ack(ctx, first); err != nil {
		return err
	}
	for _, bad := range []sdk.Settlement{
		{Token: first.Token, Verdict: sdk.Ack}, {Token: "no such token", Verdict: sdk.Requeue}, {Token: first.Token},
	} {
		if m.src.Settle(ctx, []sdk.Settlement{bad}) == nil {
			return fmt.Errorf("settling what is not in flight with %s gave nil", bad.Verdict)
		}
	}
	got, err := m.take(ctx, n-1)
	if err != nil {
		return err
	}
	for range 3 {
		if err := m.settle(ctx, sdk.Requeue, got[0]); err != nil {
			return err
		}
		again, err := m.one(ctx)
		if err != nil {
			return err
		}
		if again.ID != got[0].ID {
			return fmt.Errorf("message %s came again, but message %s was requeued", again.ID, got[0].ID)
		}
		got[0] = again
	}
	for _, d := range got[1:] {
		if d.Attempt > 1 || d.Redelivered {
			return fmt.Errorf("message %s had no trouble, and came as attempt %d, redelivered %t", d.ID, d.Attempt, d.Redelivered)
		}
	}
	return m.ack(ctx, got...)
}

func checkD18(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	for attempt := 1; ; attempt++ {
		if d.Attempt != attempt {
			return fmt.Errorf("attempt %d came with Attempt %d", attempt, d.Attempt)
		}
		if attempt == 4 {
			return m.ack(ctx, d)
		}
		if err := m.settle(ctx, sdk.Requeue, d); err != nil {
			return err
		}
		if d, err = m.one(ctx); err != nil {
			return err
		}
	}
}
