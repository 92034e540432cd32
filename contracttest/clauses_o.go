package contracttest

import (
	"context"
	"fmt"
	"slices"

	"github.com/penstock-mq/penstock/sdk"
)

const (
	textO01 = "window 1: delivered in the order sent, per publisher"
	textO02 = "window n: messages of one key in order"
	textO03 = "order kept across a requeue"
)

func orderClauses() []Clause {
	return []Clause{
		{ID: "O01", Name: "order, window 1", Text: textO01, Capability: "ordered", Check: checkO01},
		{ID: "O02", Name: "order per key", Text: textO02, Capability: "key-ordered", Check: checkO02},
		{ID: "O03", Name: "order across a requeue", Text: textO03, Capability: "order-after-requeue", Check: checkO03},
	}
}

func checkO01(ctx context.Context, e *Env) error {
	const n = 30
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	m, err := b.open(ctx, 1)
	if err != nil {
		return err
	}
	msgs := b.messages(n)
	for i := 0; i < n; i += 3 { // batches of one and of two
		if err := b.sendAll(ctx, msgs[i]); err != nil {
			return err
		}
		if err := b.sendAll(ctx, msgs[i+1:i+3]...); err != nil {
			return err
		}
	}
	got, err := m.drain(ctx, n, 1)
	if err != nil {
		return err
	}
	return inOrder(got, msgs...)
}

func checkO02(ctx context.Context, e *Env) error {
	const keys, n, window = 3, 60, 16
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	m, err := b.open(ctx, window)
	if err != nil {
		return err
	}
	msgs := b.messages(n)
	byKey := map[string][]sdk.Message{}
	for i := range msgs {
		msgs[i].Key = fmt.Sprintf("key %d", i%keys)
		byKey[msgs[i].Key] = append(byKey[msgs[i].Key], msgs[i])
	}
	if err := b.sendAll(ctx, msgs...); err != nil {
		return err
	}
	var all []sdk.Delivery
	for len(all) < n {
		got, err := m.take(ctx, min(window-3, n-len(all)))
		if err != nil {
			return err
		}
		all = append(all, got...)
		slices.Reverse(got)
		if err := m.settle(ctx, sdk.Ack, got...); err != nil {
			return err
		}
	}
	for key, want := range byKey {
		of := slices.DeleteFunc(slices.Clone(all), func(d sdk.Delivery) bool { return d.Key != key })
		if err := inOrder(of, want...); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

func checkO03(ctx context.Context, e *Env) error {
	const n = 6
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	msgs, err := b.send(ctx, n)
	if err != nil {
		return err
	}
	m, err := b.open(ctx, n)
	if err != nil {
		return err
	}
	got, err := m.take(ctx, 3)
	if err != nil {
		return err
	}
	if err := m.settle(ctx, sdk.Requeue, got[1]); err != nil {
		return err
	}
	rest, err := m.take(ctx, n-2)
	if err != nil {
		return err
	}
	want := []sdk.Message{msgs[1], msgs[3], msgs[4], msgs[5]}
	if err := inOrder(rest, want...); err != nil {
		return fmt.Errorf("the second of three was requeued: %w", err)
	}
	return nil
}
