package contracttest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// budgetClauses are about time: budgets and contexts.
func budgetClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S26", Name: "the budget ends",
				Text: "when TxOptions.Budget is over the transaction is rolled back and what it locked is free, although its handler is " +
					"still busy: Commit, Keep and Claim say ErrBudgetEnded, and what the handler writes on comes to nothing",
			},
			check: budgetEnds[T],
		},
		{
			Clause: Clause{
				ID: "S27", Name: "contexts that are done",
				Text: "no call with a context that is done waits, or does anything. The context of Begin ends nothing once Begin has returned",
			},
			check: contextsDone[T],
		},
		{
			Clause: Clause{
				ID: "S28", Name: "Begin waits no longer than its context",
				Text: "Begin returns by its context while the single writer is busy, which is contention, or every connection of the " +
					"handle in use, which is an outage",
			},
			check: beginWaits[T],
		},
	}
}

func budgetEnds[T any](ctx context.Context, e *storeEnv[T]) error {
	calls := map[string]func(tx receipts.Tx[T]) error{
		"Commit": func(tx receipts.Tx[T]) error { return tx.Commit(ctx) },
		"Claim": func(tx receipts.Tx[T]) error {
			_, err := tx.Claim(ctx, e.claims("later"))
			return err
		},
	}
	if e.info.Parts {
		calls["Keep"] = func(tx receipts.Tx[T]) error { return tx.Keep(ctx) }
	}
	for what, call := range calls {
		budget := shortBudget
		tx, err := e.writesWithin(ctx, budget, what)
		for errors.Is(err, receipts.ErrBudgetEnded) && budget < e.h.Patience { // a slow machine
			budget *= 4
			tx, err = e.writesWithin(ctx, budget, what)
		}
		if err != nil {
			return err
		}
		raw := tx.Raw()
		err = e.inTime("the end of the budget", budget, func() error { return e.wants(ctx, receipts.ClaimFresh, what) })
		if err != nil {
			return fmt.Errorf("after the end of its budget: %w", err)
		}
		if e.s.Apply(ctx, raw, what, 1) == nil {
			return errors.New("after the end of the budget the handler can still write")
		}
		if err := isError(what+" after the end of the budget", call(tx), receipts.ErrBudgetEnded); err != nil {
			return err
		}
		if err := errors.Join(tx.Rollback(ctx), e.untouched(ctx)); err != nil {
			return err
		}
	}
	// One that ends in time is not disturbed, nor is who comes next on its connection.
	for range 3 {
		tx, err := e.begin(ctx, e.a, receipts.TxOptions{Budget: e.h.Patience})
		if err != nil {
			return err
		}
		if _, err := tx.Claim(ctx, e.claims("in time")); err != nil {
			return fmt.Errorf("Claim: %w", err)
		}
		if err := tx.Commit(ctx); err != nil {
			return fmt.Errorf("Commit in time: %w", err)
		}
	}
	return e.stats(ctx, receipts.Stats{Done: 1})
}

// writesWithin has a transaction with a budget write all it can, before that is over.
func (e *storeEnv[T]) writesWithin(ctx context.Context, budget time.Duration, what string) (receipts.Tx[T], error) {
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{Budget: budget}, what)
	if err != nil {
		return nil, err
	}
	if what == "Keep" {
		if err := tx.Part(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("Part: %w", err), tx.Rollback(ctx))
		}
	}
	if err := e.writeAll(ctx, tx, what); err != nil {
		return nil, errors.Join(err, tx.Rollback(ctx))
	}
	return tx, nil
}

func contextsDone[T any](ctx context.Context, e *storeEnv[T]) error {
	first, cancelFirst := context.WithCancel(ctx)
	defer cancelFirst()
	tx, err := e.begin(first, e.a, receipts.TxOptions{})
	if err != nil {
		return err
	}
	cancelFirst()
	if err := errors.Join(pause(ctx, shortWait), e.claimFresh(ctx, tx, "k"), e.apply(ctx, tx, "k", 1)); err != nil {
		return fmt.Errorf("after the end of Begin's context: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("Commit after the end of Begin's context: %w", err)
	}
	done, cancel := context.WithCancel(ctx)
	cancel()
	calls := map[string]func() error{
		"Begin":       func() error { return second(e.a.Begin(done, receipts.TxOptions{})) },
		"Check":       func() error { return second(e.a.Check(done)) },
		"Migrate":     func() error { return e.a.Migrate(done) },
		"Resolve":     func() error { return second(e.a.Resolve(done, tx.Nonce())) },
		"Unsent":      func() error { return second(e.a.Unsent(done, receipts.UnsentQuery{Limit: 1})) },
		"Outputs":     func() error { return second(e.a.Outputs(done, e.scope, []byte("k"))) },
		"MarkSent":    func() error { return e.a.MarkSent(done, []receipts.OutputRef{{Nonce: tx.Nonce()}}, at(1)) },
		"DeadLetters": func() error { return second(e.a.DeadLetters(done, 1)) },
		"Stats":       func() error { return second(e.a.Stats(done)) },
	}
	for what, call := range calls {
		if err := e.refuses(what, call); err != nil {
			return err
		}
	}
	inside := map[string]func(tx receipts.Tx[T]) error{
		"Claim":      func(tx receipts.Tx[T]) error { return second(tx.Claim(done, e.claims("j"))) },
		"Unclaim":    func(tx receipts.Tx[T]) error { return tx.Unclaim(done, e.claims("i")) },
		"AddOutputs": func(tx receipts.Tx[T]) error { return second(tx.AddOutputs(done, []receipts.Output{e.output("i", 0)})) },
		"Divert":     func(tx receipts.Tx[T]) error { return tx.Divert(done, []receipts.DeadLetter{e.letter("i", "1")}) },
	}
	for what, call := range inside {
		tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "i")
		if err != nil {
			return err
		}
		if err := errors.Join(e.refuses(what, func() error { return call(tx) }), tx.Rollback(ctx)); err != nil {
			return err
		}
	}
	return errors.Join(e.effects(ctx, map[string]int64{"k": 1}), e.stats(ctx, receipts.Stats{Done: 1}),
		e.wants(ctx, receipts.ClaimFresh, "i", "j"))
}

// second drops a value.
func second[V any](_ V, err error) error { return err }

// refuses wants a call with a context that is done to fail at once.
func (e *storeEnv[T]) refuses(what string, call func() error) error {
	what += " with a context that is done"
	return e.inTime(what, 0, func() error {
		if call() == nil {
			return fmt.Errorf("%s is nil", what)
		}
		return nil
	})
}

func beginWaits[T any](ctx context.Context, e *storeEnv[T]) error {
	n, want := 1, receipts.ClassContention
	if e.lanes() {
		n, want = e.info.Pool, receipts.ClassOutage
	}
	if n == 0 {
		e.note("the handle has any number of connections, so nobody waits in Begin")
		return nil
	}
	var open []receipts.Tx[T]
	for range n {
		tx, err := e.begin(ctx, e.a, receipts.TxOptions{})
		if err != nil {
			return err
		}
		open = append(open, tx)
	}
	const what = "Begin while there is no room"
	err := e.inTime(what, shortWait, func() error {
		ctx, cancel := context.WithTimeout(ctx, shortWait)
		defer cancel()
		_, err := e.a.Begin(ctx, receipts.TxOptions{})
		return isClass(e.a, what, err, want)
	})
	if err != nil {
		return err
	}
	err = e.inTime("Begin with a context that is cancelled", shortWait, func() error {
		ctx, cancel := context.WithCancel(ctx)
		defer time.AfterFunc(shortWait, cancel).Stop()
		defer cancel()
		if _, err := e.a.Begin(ctx, receipts.TxOptions{}); !errors.Is(err, context.Canceled) {
			return fmt.Errorf("Begin with a context that is cancelled gave %v", err) //nolint:errorlint // it is not that one
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, tx := range open {
		if err := tx.Commit(ctx); err != nil {
			return fmt.Errorf("Commit: %w", err)
		}
	}
	return e.allClean(ctx, nil)
}
