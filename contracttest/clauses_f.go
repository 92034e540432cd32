package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/penstock-mq/penstock/sdk"
)

const (
	textF02 = "broker restarted under load: the same, durable messages intact"
	textF03 = "broker that accepts and never answers: every call returns by its deadline"
	textF04 = "topology deleted while consuming: re-declared, next publish is consumed"
)

func faultClauses() []Clause {
	return []Clause{
		{ID: "F02", Name: "broker restarted", Text: textF02, Capability: "durable", Hooks: []string{"Restart"}, Check: checkF02},
		{ID: "F03", Name: "broker is silent", Text: textF03, Hooks: []string{"Stall"}, Check: checkF03},
		{ID: "F04", Name: "topology deleted", Text: textF04, Hooks: []string{"DropTopology"}, Check: checkF04},
	}
}

func checkF02(ctx context.Context, e *Env) error {
	const n = 20
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	msgs, err := b.send(ctx, n)
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
	if err := m.ack(ctx, got[0], got[1]); err != nil {
		return err
	}
	if err := e.h.Restart(ctx); err != nil {
		return fmt.Errorf("hook Restart: %w", err)
	}
	more := b.messages(1) // the same driver has to work again by itself, in both directions
	if err := e.eventually(ctx, func() error { return errors.Join(b.prepare(ctx), b.sendAll(ctx, more...)) }); err != nil {
		return err
	}
	var next *member
	err = e.eventually(ctx, func() (err error) { next, err = b.open(ctx, benchWindow); return err })
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(slices.Concat(msgs, more), func(m sdk.Message) bool { return m.ID == got[0].ID || m.ID == got[1].ID })
	came, err := next.take(ctx, len(left))
	if err != nil {
		return err
	}
	return exactly(came, left...)
}

func checkF03(ctx context.Context, e *Env) error {
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
	got, err := m.take(ctx, 1)
	if err != nil {
		return err
	}
	resume, err := e.h.Stall(ctx)
	if err != nil {
		return fmt.Errorf("hook Stall: %w", err)
	}
	defer resume()
	if err := e.silent(ctx, m, got[0].Token); err != nil {
		return err
	}
	resume()
	// What was asked for in the silence may or may not have been done, but no message is lost: the two that were not
	// settled come, or are held by the consumer whose answer got lost, until that one is closed.
	if err := e.eventually(ctx, func() error { return b.d.Close(ctx) }); err != nil {
		return err
	}
	if b, err = b.another(ctx); err != nil {
		return err
	}
	next, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	came, err := next.fence(ctx)
	if err != nil {
		return err
	}
	for _, msg := range msgs {
		if msg.ID != got[0].ID && noneOf(came, msg) == nil {
			return fmt.Errorf("message %s is lost after the broker was silent", msg.ID)
		}
	}
	return nil
}

// silent makes every call of a driver and a source while the broker does not answer.
func (e *Env) silent(ctx context.Context, m *member, t sdk.Token) error {
	d, limit := m.b.d, e.h.Patience/20
	calls := []struct {
		name string
		call func(context.Context) error
	}{
		{"Receive", func(ctx context.Context) error { _, err := m.src.Receive(ctx, 1); return err }},
		{"Settle", func(ctx context.Context) error {
			return m.src.Settle(ctx, []sdk.Settlement{{Token: t, Verdict: sdk.Ack}})
		}},
		{"Send", func(ctx context.Context) error { return d.Send(ctx, m.b.topic, m.b.messages(1)) }},
		{"Prepare", func(ctx context.Context) error { return d.Prepare(ctx, m.b.binding(1)) }},
		{"Open", func(ctx context.Context) error {
			src, err := d.Open(ctx, m.b.binding(1))
			if err == nil {
				err = src.Close(ctx)
			}
			return err
		}},
		{"Extend", func(ctx context.Context) error {
			if ext, ok := m.src.(sdk.LeaseExtender); ok {
				return ext.Extend(ctx, []sdk.Token{t}, e.h.Lease)
			}
			return nil
		}},
		{"Barrier", func(ctx context.Context) error {
			if bar, ok := m.src.(sdk.Barrier); ok {
				return bar.Barrier(ctx)
			}
			return nil
		}},
		{"Source.Close", m.src.Close},
		{"Driver.Close", d.Close},
	}
	var errs []error
	for _, c := range calls {
		if err := e.prompt(ctx, c.name, limit, c.call); errors.Is(err, errLate) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func checkF04(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	m, err := b.open(ctx, 4)
	if err != nil {
		return err
	}
	if _, err := b.send(ctx, 8); err != nil {
		return err
	}
	if _, err := m.take(ctx, 2); err != nil {
		return err
	}
	if err := e.h.DropTopology(ctx, b.topic); err != nil {
		return fmt.Errorf("hook DropTopology: %w", err)
	}
	// The engine learns it from the source, or the source goes on after the topology was made again. Both are looked at.
	verify := b.binding(4)
	verify.Declare = false
	if b.d.Prepare(ctx, verify) == nil {
		return errors.New("Prepare verifies topology that was deleted")
	}
	if err := b.prepare(ctx); err != nil {
		return err
	}
	if err := m.close(ctx); err != nil {
		return err
	}
	next, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	msgs, err := b.send(ctx, 1)
	if err != nil {
		return err
	}
	got, err := next.take(ctx, 1)
	if err != nil {
		return err
	}
	return exactly(got, msgs...)
}
