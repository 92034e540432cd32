package contracttest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/middleware/idempotency"
)

// outageClauses are about a database that does not answer, or answers no.
func outageClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T04", Name: "the answer to COMMIT is lost",
				Text: "COMMIT forwarded but its answer cut, and COMMIT cut before it arrives: one effect in both, never acked on " +
					"unknown",
			},
			store: []string{"OpenFaulty"}, check: commitAnswerLost[T],
		},
		{
			Clause: Clause{
				ID: "T26", Name: "the database does not work",
				Text: "database stopped, read-only, disk full, pool exhausted under load: nothing acked, charged or diverted; " +
					"resumes by itself",
			},
			store: []string{"OpenFaulty"}, check: outages[T],
		},
	}
}

// commitAnswerLost loses COMMIT, or its answer, as a bad connection and as an error that says nothing.
func commitAnswerLost[T any](ctx context.Context, e *txEnv[T]) error {
	var early atomic.Int64
	e.w.set(func(w *watch) { w.onAck = e.unlessApplied(&early) })
	var all []string
	for _, forwarded := range []bool{true, false} {
		for _, asBadConn := range []bool{true, false} {
			ids := e.ids(2)
			all = append(all, ids...)
			if err := e.loseCommit(ctx, ids, forwarded, asBadConn); err != nil {
				return fmt.Errorf("forwarded %t, as a bad connection %t: %w", forwarded, asBadConn, err)
			}
			if early.Load() > 0 {
				return fmt.Errorf("forwarded %t, as a bad connection %t: acked though nothing is committed", forwarded, asBadConn)
			}
		}
	}
	return e.balance(ctx, once(all...))
}

// loseCommit loses the COMMIT of the first of those messages.
func (e *txEnv[T]) loseCommit(ctx context.Context, ids []string, forwarded, asBadConn bool) error {
	db, faults, err := e.s.OpenFaulty(ctx, e.dir)
	if err != nil {
		return fmt.Errorf("opening the faulty handle: %w", err)
	}
	if faults.LoseCommit == nil {
		return errors.Join(errors.New("the hook OpenFaulty has no LoseCommit"), db.Close())
	}
	c, err := e.consume(ctx, plan[T]{db: &db, window: 1})
	if err != nil {
		return err
	}
	fired := faults.LoseCommit(forwarded, asBadConn)
	if err := e.send(ctx, ids...); err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	return errors.Join(wantFired(int64(fired())), e.quiet(ctx), c.stop())
}

// outages switches each outage on under load and off again.
func outages[T any](ctx context.Context, e *txEnv[T]) error {
	db, faults, err := e.s.OpenFaulty(ctx, e.dir)
	if err != nil {
		return fmt.Errorf("opening the faulty handle: %w", err)
	}
	if len(faults.Outages) == 0 {
		return errors.Join(errors.New("the hook OpenFaulty has no outages"), db.Close())
	}
	// A pool without a free connection is known for an outage when the budget has passed.
	c, err := e.consume(ctx, plan[T]{db: &db, config: idempotency.Config{TxBudget: cmp.Or(faults.Budget, budget)}})
	if err != nil {
		return err
	}
	var all []string
	for _, name := range slices.Sorted(maps.Keys(faults.Outages)) {
		ids := e.ids(4)
		all = append(all, ids...)
		if err := e.outage(ctx, c, faults.Outages[name], all, ids); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if r := c.m.Report(); r.Failed+r.Diverted+r.Conflicted+r.Torn > 0 {
			return fmt.Errorf("%s: %d attempts were charged, %d messages diverted", name, r.Failed, r.Diverted+r.Conflicted+r.Torn)
		}
	}
	return e.balance(ctx, once(all...))
}

// outage lets one message through, begins the outage, sends the others, sees that nothing happens to them, and ends it.
func (e *txEnv[T]) outage(
	ctx context.Context, c *consumer[T], begin func(context.Context) (func(), func() int, error), all, ids []string,
) error {
	if err := errors.Join(e.send(ctx, ids[0]), e.ackedTimes(ctx, ids[0], 1)); err != nil {
		return fmt.Errorf("before it: %w", err)
	}
	end, fired, err := begin(ctx)
	if err != nil {
		return fmt.Errorf("beginning it: %w", err)
	}
	defer end()
	if err := e.send(ctx, ids[1:]...); err != nil {
		return err
	}
	if err := e.eventually(ctx, func() error { return wantFired(int64(fired())) }); err != nil {
		return err
	}
	err = e.eventually(ctx, func() error {
		if !c.m.Report().Health.Paused {
			return errors.New("health does not say that the lane is paused")
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := pause(ctx, 300*time.Millisecond); err != nil { // several tries into the outage
		return err
	}
	for _, id := range ids[1:] {
		if e.w.ackCount(id) > 0 {
			return fmt.Errorf("%q was acked during it", id)
		}
	}
	if e.readable(ctx) {
		if err := e.compare(ctx, once(all[:len(all)-3]...)); err != nil {
			return fmt.Errorf("during it: %w", err)
		}
	}
	end()
	if err := e.applied(ctx, ids...); err != nil {
		return fmt.Errorf("after it: %w", err)
	}
	return e.eventually(ctx, func() error {
		if c.m.Report().Health.Paused {
			return errors.New("health still says paused")
		}
		return nil
	})
}

// readable tells whether the clause itself can read what is committed: not from a server that is gone. What happens during that
// outage is then seen after it. Clients may not hear of the end of a context while their server does not answer.
func (e *txEnv[T]) readable(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, budget)
	read := make(chan error, 1)
	go func() {
		defer cancel()
		_, err := e.db.Effects(ctx)
		read <- err
	}()
	select {
	case err := <-read:
		return err == nil
	case <-ctx.Done():
		return false
	}
}
