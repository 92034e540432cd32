package faulty

import (
	"context"
	"errors"
	"slices"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// ParkerFaults gives faults of stores that are a [receipts.Parker], too; around others they plant nothing. Like [StoreFaults]
// they share no state.
func ParkerFaults[T any]() []StoreFault[T] {
	return []StoreFault[T]{
		{"park-forgotten", "a message that was set aside is gone", plantParker[T](func(p parker) receipts.Parker { return parksNothing{p} })},
		{"park-reversed", "messages that were set aside come back in another order", plantParker[T](func(p parker) receipts.Parker { return parksReversed{p} })},
		{"park-repeats", "a message that was set aside twice is handled twice", plantParker[T](func(p parker) receipts.Parker { return parksAgain{p} })},
		{"unpark-takes-neighbours", "messages that were set aside are lost", plantParker[T](func(p parker) receipts.Parker { return unparksAll{p} })},
	}
}

// parker is the healthy one below a planted fault.
type parker interface{ receipts.Parker }

// plantParker puts another Parker beside the same Store.
func plantParker[T any](plant func(parker) receipts.Parker) func(receipts.Store[T]) receipts.Store[T] {
	return func(s receipts.Store[T]) receipts.Store[T] {
		p, ok := s.(receipts.Parker)
		if !ok {
			return s
		}
		return struct {
			receipts.Store[T]
			receipts.Parker
		}{s, plant(p)}
	}
}

type parksNothing struct{ parker }

// Park forgets.
func (parksNothing) Park(context.Context, []receipts.Parked) error { return nil }

type parksReversed struct{ parker }

// Park stores the last one first.
func (p parksReversed) Park(ctx context.Context, messages []receipts.Parked) error {
	turned := slices.Clone(messages)
	slices.Reverse(turned)
	return p.parker.Park(ctx, turned)
}

type parksAgain struct{ parker }

// Park makes of what is there already another message.
func (p parksAgain) Park(ctx context.Context, messages []receipts.Parked) error {
	for _, m := range messages {
		before, err := p.Parked(ctx, m.Scope, m.OrderKey, 0, 1000)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(before, func(o receipts.Parked) bool { return o.UUID == m.UUID }) {
			m.UUID += " again"
		}
		if err := p.parker.Park(ctx, []receipts.Parked{m}); err != nil {
			return err
		}
	}
	return nil
}

type unparksAll struct{ parker }

// Unpark deletes the neighbours, too.
func (p unparksAll) Unpark(ctx context.Context, positions []int64) error {
	var errs []error
	for _, at := range positions {
		errs = append(errs, p.parker.Unpark(ctx, []int64{at - 1, at, at + 1, at + 2, at + 3}))
	}
	return errors.Join(errs...)
}
