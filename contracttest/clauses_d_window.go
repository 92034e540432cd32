package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/penstock-mq/penstock/sdk"
)

func checkD10(ctx context.Context, e *Env) error {
	const window, n = 4, 12
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	msgs, err := b.send(ctx, n)
	if err != nil {
		return err
	}
	first, err := b.open(ctx, window)
	if err != nil {
		return err
	}
	got, err := first.src.Receive(ctx, n)
	if err == nil && len(got) < window {
		var more []sdk.Delivery
		more, err = first.take(ctx, window-len(got))
		got = append(got, more...)
	}
	if err != nil {
		return err
	}
	if len(got) > window {
		return fmt.Errorf("window %d, and %d unsettled deliveries were handed out", window, len(got))
	}
	// What the first member does not hold is free for a second one: it prefetched no more than its window either.
	second, err := b.open(ctx, n)
	if err != nil {
		return err
	}
	rest, err := second.take(ctx, n-window)
	if err != nil {
		return fmt.Errorf("what a member with window %d leaves to another: %w", window, err)
	}
	if err := exactly(slices.Concat(got, rest), msgs...); err != nil {
		return err
	}
	return first.refills(ctx, second, got, rest)
}

// refills checks that a full window opens by as much as is settled. The second member gives back what it holds.
func (m *member) refills(ctx context.Context, second *member, held, rest []sdk.Delivery) error {
	if err := errors.Join(second.settle(ctx, sdk.Requeue, rest...), second.close(ctx)); err != nil {
		return err
	}
	if err := m.ack(ctx, held[0]); err != nil {
		return err
	}
	got, err := m.src.Receive(ctx, len(rest))
	for err == nil && len(got) == 0 {
		got, err = m.take(ctx, 1)
	}
	if err != nil {
		return err
	}
	if len(got) > 1 {
		return fmt.Errorf("one place in a full window was free, and Receive returned %d deliveries", len(got))
	}
	return nil
}

func checkD10Broker(ctx context.Context, e *Env) error {
	const window, n = 4, 40
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	if _, err := b.send(ctx, n); err != nil {
		return err
	}
	m, err := b.open(ctx, window)
	if err != nil {
		return err
	}
	for range n {
		d, err := m.one(ctx)
		if err != nil {
			return err
		}
		got, err := e.h.Unsettled(ctx, b.topic, b.group)
		if err != nil {
			return fmt.Errorf("hook Unsettled: %w", err)
		}
		if got < 1 || got > window {
			return fmt.Errorf("window %d, one delivery in hand: the broker counts %d unsettled", window, got)
		}
		if err := m.ack(ctx, d); err != nil {
			return err
		}
	}
	return e.unsettled(ctx, b.topic, b.group, 0)
}

// checkD11 keeps one delivery alive and lets another run out twice: its redeliveries are the clock.
func checkD11(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	binding := b.binding(benchWindow)
	binding.Lease = e.h.Lease
	if _, err := b.send(ctx, 2); err != nil {
		return err
	}
	m, err := b.openWith(ctx, binding)
	if err != nil {
		return err
	}
	ext, ok := m.src.(sdk.LeaseExtender)
	if !ok {
		return errors.New("a lease is declared, but the source is no LeaseExtender")
	}
	got, err := m.take(ctx, 2)
	if err != nil {
		return err
	}
	stop := m.keepExtending(ctx, ext, got[0])
	defer func() { _ = stop() }() // its error was taken below, unless there is a worse one
	expired := got[1]
	for range 2 {
		d, err := m.one(ctx)
		if err != nil {
			return fmt.Errorf("waiting for a lease of %s to run out: %w", e.h.Lease, err)
		}
		if d.ID != expired.ID {
			return errors.New("a delivery was handed out again although its lease was extended")
		}
		if d.Token == expired.Token {
			return errors.New("redelivered with the token whose lease ran out")
		}
		expired = d
	}
	if err := stop(); err != nil {
		return err
	}
	if err := stale("Extend of a lease that ran out", ext.Extend(ctx, tokens(got[1:]), e.h.Lease)); err != nil {
		return err
	}
	if err := m.ack(ctx, got[0]); err != nil {
		return fmt.Errorf("the lease was extended all the time: %w", err)
	}
	return errors.Join(m.close(ctx), b.absent(ctx, got[0].Message))
}

// keepExtending extends a lease every quarter of it until stop is called, which returns the first error.
func (m *member) keepExtending(ctx context.Context, ext sdk.LeaseExtender, d sdk.Delivery) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	lease := m.b.e.h.Lease
	go func() {
		var err error
		for err == nil && pause(ctx, lease/4) == nil {
			if err = ext.Extend(context.WithoutCancel(ctx), []sdk.Token{d.Token}, lease); err != nil {
				err = fmt.Errorf("extending a lease of %s: %w", lease, err)
			}
		}
		done <- err
		close(done)
	}()
	return func() error { cancel(); return <-done }
}
