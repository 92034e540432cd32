package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/penstock-mq/penstock/middleware/idempotency"
)

// upgradeClauses are about consumers of two versions in one system.
func upgradeClauses[T any]() []txClause[T] {
	return []txClause[T]{{
		Clause: Clause{
			ID: "T33", Name: "two versions side by side", Capability: "redelivers",
			Text: "two versions of the consumer side by side, switched on in a running system; schema N and N+1; a role without " +
				"DDL; through PgBouncer in transaction mode",
		},
		store: []string{"Newer", "Limited"}, check: sideBySide[T],
	}}
}

// sideBySide switches receipts on while a consumer without them runs, has the next version of the tables made while they are
// used, and brings a second consumer beside the first, with a role that may not change tables. Both take messages of one group
// then, and the second one goes on alone.
func sideBySide[T any](ctx context.Context, e *txEnv[T]) error {
	before, err := e.consume(ctx, plan[T]{config: idempotency.Config{Guarantee: idempotency.AtLeastOnce}})
	if err != nil {
		return err
	}
	var all []string
	round := func(times int) error {
		ids := e.ids(batchSize)
		all = append(all, ids...)
		return e.handOver(ctx, times, ids)
	}
	if err := round(1); err != nil {
		return fmt.Errorf("before receipts: %w", err)
	}
	first, err := e.consume(ctx, plan[T]{})
	if err != nil {
		return err
	}
	if err := errors.Join(round(1), before.stop()); err != nil {
		return fmt.Errorf("beside a consumer without receipts: %w", err)
	}
	if err := errors.Join(round(2), e.renew(ctx, round)); err != nil {
		return err
	}
	db, err := e.s.Limited(ctx, e.dir)
	if err != nil {
		return fmt.Errorf("the hook Limited: %w", err)
	}
	second, err := e.consume(ctx, plan[T]{db: &db})
	if err != nil {
		return fmt.Errorf("a consumer whose role may not change tables: %w", err)
	}
	if err := errors.Join(round(2), first.stop(), round(2)); err != nil {
		return fmt.Errorf("side by side: %w", err)
	}
	return e.booksOf(ctx, all, first, second)
}

// handOver sends messages, each so many times, and waits until that many copies are acked.
func (e *txEnv[T]) handOver(ctx context.Context, times int, ids []string) error {
	for range times {
		if err := e.send(ctx, ids...); err != nil {
			return err
		}
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, times); err != nil {
			return err
		}
	}
	return nil
}

// renew makes the tables of the next version while a round is under way.
func (e *txEnv[T]) renew(ctx context.Context, round func(times int) error) error {
	renewed := make(chan error, 1)
	go func() { renewed <- e.s.Newer(ctx, e.dir) }()
	err := round(2)
	if newer := <-renewed; newer != nil {
		err = errors.Join(err, fmt.Errorf("the hook Newer: %w", newer))
	}
	if err := errors.Join(err, round(2)); err != nil {
		return fmt.Errorf("on the tables of the next version: %w", err)
	}
	return nil
}

// booksOf compares effects and receipts: of what the consumer without receipts has handled there are none.
func (e *txEnv[T]) booksOf(ctx context.Context, all []string, consumers ...*consumer[T]) error {
	want := once(all...)
	var reports []idempotency.Report
	for _, c := range consumers {
		r := c.m.Report()
		reports = append(reports, r)
		want.receipts += int(r.Handled)
	}
	if slices.ContainsFunc(reports, func(r idempotency.Report) bool { return r.Handled == 0 }) {
		return errors.New("one of the consumers has handled nothing")
	}
	if slices.ContainsFunc(reports, func(r idempotency.Report) bool { return r.Failed+r.Diverted+r.Conflicted+r.Torn > 0 }) {
		return errors.New("an attempt was charged, or a message diverted")
	}
	return e.balance(ctx, want)
}
