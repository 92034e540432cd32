package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// brokenClauses are about whose failure an error is.
func brokenClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S29", Name: "an outage is an outage", Hooks: []string{"OpenFaulty"},
				Text: "while the database is stopped, read-only, full or out of connections, what fails is an outage for Classify, " +
					"however it is wrapped, and nothing is stored; afterwards the handle works again by itself",
			},
			check: outageSeen[T],
		},
		{
			Clause: Clause{
				ID: "S30", Name: "what is nobody else's failure", Hooks: []string{"Violate"},
				Text: "a violated constraint, an error of the handler's own, and nil are neither contention nor an outage",
			},
			check: ownFailure[T],
		},
	}
}

// outageTime is how long Begin and Claim are tried while the database does not work.
const outageTime = 5 * shortWait

func outageSeen[T any](ctx context.Context, e *storeEnv[T]) (err error) {
	db, faults, err := e.s.OpenFaulty(ctx, e.dir)
	if err != nil {
		return fmt.Errorf("the hook OpenFaulty: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	store := e.wrapped(db.Store)
	want := map[string]int64{}
	for _, name := range slices.Sorted(maps.Keys(faults.Outages)) {
		end, fired, err := faults.Outages[name](ctx)
		if err != nil {
			return fmt.Errorf("%s: the hook OpenFaulty: %w", name, err)
		}
		err = e.processed(ctx, store, name)
		hits := fired()
		end()
		wrapped := fmt.Errorf("wrapped: %w", errors.Join(errors.New("beside"), err))
		if err == nil {
			wrapped = nil
		}
		if err := errors.Join(isClass(store, name, wrapped, receipts.ClassOutage), wantFired(int64(hits))); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := e.effects(ctx, want); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := e.eventually(ctx, func() error { return e.processed(ctx, store, name) }); err != nil {
			return fmt.Errorf("after %s: %w", name, err)
		}
		want[name] = 1
		if err := e.effects(ctx, want); err != nil {
			return fmt.Errorf("after %s: %w", name, err)
		}
	}
	return nil
}

// processed runs the transaction of one message.
func (e *storeEnv[T]) processed(ctx context.Context, s receipts.Store[T], name string) error {
	short, cancel := context.WithTimeout(ctx, outageTime)
	defer cancel()
	tx, err := s.Begin(short, receipts.TxOptions{})
	if err != nil {
		return err
	}
	_, err = tx.Claim(short, e.claims(name))
	if err == nil {
		err = e.s.Apply(ctx, tx.Raw(), name, 1)
	}
	if err != nil {
		_ = tx.Rollback(ctx) // it may find nobody
		return err
	}
	return tx.Commit(ctx)
}

func ownFailure[T any](ctx context.Context, e *storeEnv[T]) error {
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "k")
	if err != nil {
		return err
	}
	violated := e.s.Violate(ctx, tx.Raw())
	if err := tx.Rollback(ctx); err != nil {
		return fmt.Errorf("Rollback: %w", err)
	}
	if err := isClass(e.a, "a violated constraint", violated, receipts.ClassOther); err != nil {
		return err
	}
	if err := isClass(e.a, "an error of the handler's own", errors.New("40001 deadlock, try again"), receipts.ClassOther); err != nil {
		return err
	}
	if class := e.a.Classify(nil); class != receipts.ClassOther {
		return fmt.Errorf("Classify says %d of nil", class)
	}
	return e.untouched(ctx)
}
