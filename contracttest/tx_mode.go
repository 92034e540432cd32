package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// modeClauses are about handlers that do what they must not, and about the weaker guarantees.
func modeClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T30", Name: "handler ends the transaction",
				Text: "a handler that commits, rolls back or executes COMMIT as text: neighbours are not lost, torn receipts are " +
					"diverted, never replayed",
			},
			store: []string{"End"}, check: handlerEnds[T],
		},
		{
			Clause: Clause{
				ID: "T32/most", Name: "at-most-once, killed anywhere", Capability: "redelivers",
				Text: "at-most-once: killed anywhere, never twice",
			},
			processes: true, check: atMostOnce[T],
		},
		{
			Clause: Clause{
				ID: "T32/least", Name: "at-least-once, killed anywhere", Capability: "redelivers",
				Text: "at-least-once: killed anywhere, never lost",
			},
			processes: true, check: atLeastOnce[T],
		},
	}
}

// handlerEnds has the middle one of a batch end the transaction on its first run, in each way, and then a message alone.
func handlerEnds[T any](ctx context.Context, e *txEnv[T]) error {
	how := map[string]Ending{}
	var tried attempts
	c, err := e.crowd(ctx, plan[T]{handle: func(ctx context.Context, tx T, msg *message.Message) error {
		first := tried.next(msg.UUID) == 1
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		if how[msg.UUID] != "" && first {
			return e.s.End(ctx, tx, how[msg.UUID])
		}
		return nil
	}})
	if err != nil {
		return err
	}
	var all []string
	for _, ending := range e.s.endings() {
		for _, n := range []int{batchSize, 1} {
			ids := e.ids(n)
			all = append(all, ids...)
			how[ids[n/2]] = ending
			if err := e.ended(ctx, c, ids, ending); err != nil {
				return fmt.Errorf("a handler ended with %q, one of %d: %w", ending, n, err)
			}
		}
	}
	r := c.m.Report()
	if r.Replayed > 0 {
		return fmt.Errorf("%d messages were taken for replays", r.Replayed)
	}
	if ended := uint64(len(how)); r.Failed > ended {
		return fmt.Errorf("%d attempts were charged, and %d handlers ended the transaction", r.Failed, ended)
	}
	want, err := e.nothingLost(ctx, c.with(all...))
	if err != nil {
		return err
	}
	return e.balance(ctx, want)
}

// ended makes a batch of which one handler ends the transaction. A rollback proves nothing, and so leaves nothing torn.
func (e *txEnv[T]) ended(ctx context.Context, c *crowd[T], ids []string, how Ending) error {
	torn := c.m.Report().Torn
	place, err := c.gather(ctx, ids...)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	if err := errors.Join(c.ledger.together(place, ids...), e.quiet(ctx)); err != nil {
		return err
	}
	if n := c.m.Report().Torn - torn; how == EndRollback && n > 0 {
		return fmt.Errorf("%d messages were diverted", n)
	}
	_, err = e.nothingLost(ctx, c.with())
	return err
}

// nothingLost is the account of messages some of which may have lost the proof of their receipt, because a handler ended
// their transaction: each of them has taken effect once, with a receipt that proves it, or is a dead letter, and then has
// taken effect at most once. It fails where one is neither.
func (e *txEnv[T]) nothingLost(ctx context.Context, ids []string) (account, error) {
	got, err := e.effects(ctx)
	if err != nil {
		return account{}, err
	}
	letters, err := e.db.Store.DeadLetters(ctx, 1000)
	if err != nil {
		return account{}, fmt.Errorf("reading the dead letters: %w", err)
	}
	diverted := map[string]bool{}
	for _, l := range letters {
		if l.Kind != receipts.KindTorn {
			return account{}, fmt.Errorf("a dead letter of kind %s: %s", l.Kind, l.Reason)
		}
		diverted[string(l.Key)] = true
	}
	for _, id := range ids {
		if n := got[id]; n > 1 || n == 0 && !diverted[id] {
			return account{}, fmt.Errorf("the effect of %q was applied %d times (diverted: %t)", id, n, diverted[id])
		}
	}
	want := account{effects: got, receipts: noReceipts, torn: len(diverted), dead: map[receipts.DeadLetterKind]int{}}
	for id := range got {
		if !diverted[id] {
			want.receipts = max(want.receipts, 0) + 1
		}
	}
	if len(diverted) > 0 {
		want.dead[receipts.KindTorn] = len(diverted)
	}
	return want, nil
}

// atMostOnce kills at every point of the two transactions of that mode.
func atMostOnce[T any](ctx context.Context, e *txEnv[T]) error {
	deaths := []death{
		{atBegun, 1},
		{atClaimed, 1},
		{atBeforeCommit, 1},
		{atAfterCommit, 1},
		{atBegun, 2},
		{atBeforeCommit, 2},
		{atAfterCommit, 2},
		{atBeforeAck, 1},
		{atAfterAck, 1},
	}
	got, err := e.killedAnywhere(ctx, idempotency.AtMostOnce, deaths)
	if err != nil {
		return err
	}
	for id, n := range got {
		if n > 1 {
			return fmt.Errorf("%q took effect %d times", id, n)
		}
	}
	return e.balance(ctx, account{effects: got, receipts: len(deaths)})
}

// atLeastOnce kills at every point of the one transaction of that mode.
func atLeastOnce[T any](ctx context.Context, e *txEnv[T]) error {
	deaths := []death{{atBegun, 1}, {atBeforeCommit, 1}, {atAfterCommit, 1}, {atBeforeAck, 1}, {atAfterAck, 1}}
	got, err := e.killedAnywhere(ctx, idempotency.AtLeastOnce, deaths)
	if err != nil {
		return err
	}
	if len(got) < len(deaths) {
		return fmt.Errorf("%d of %d messages took effect: the others are lost", len(got), len(deaths))
	}
	return e.balance(ctx, account{effects: got, receipts: noReceipts})
}

// killedAnywhere has one message kill a child at each point, and another consumer take what comes back. It returns the
// effects.
func (e *txEnv[T]) killedAnywhere(ctx context.Context, mode idempotency.Guarantee, deaths []death) (map[string]int64, error) {
	for _, d := range deaths {
		ids := e.ids(1)
		if err := e.send(ctx, ids...); err != nil {
			return nil, err
		}
		c, err := e.spawn(ctx, childPlan{At: d.at, Nth: d.nth, Window: 1, Guarantee: mode})
		if err != nil {
			return nil, err
		}
		if err := c.killed(ctx, e.h.Patience); err != nil {
			return nil, fmt.Errorf("%s, time %d: %w", d.at, d.nth, err)
		}
		rest, err := e.consume(ctx, plan[T]{config: idempotency.Config{Guarantee: mode}})
		if err != nil {
			return nil, err
		}
		if err := e.ackedTimes(ctx, ids[0], 1); err != nil {
			return nil, fmt.Errorf("after the death %s, time %d: %w", d.at, d.nth, err)
		}
		if err := e.quiet(ctx); err != nil {
			return nil, err
		}
		if err := rest.stop(); err != nil {
			return nil, err
		}
	}
	got, err := e.effects(ctx)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(got, func(_ string, n int64) bool { return n == 0 })
	if want := len(deaths); len(got) > want {
		return nil, fmt.Errorf("effects of %v, want at most %d", slices.Collect(maps.Keys(got)), want)
	}
	return got, nil
}
