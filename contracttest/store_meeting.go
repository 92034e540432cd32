package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// meetingClauses are about transactions that want the same, and those that do not.
func meetingClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S06", Name: "the first one commits",
				Text: "two transactions claim one identity: the second waits for the first, and when that has committed finds its receipt",
			},
			check: func(ctx context.Context, e *storeEnv[T]) error { return e.meets(ctx, true) },
		},
		{
			Clause: Clause{
				ID: "S07", Name: "the first one rolls back",
				Text: "two transactions claim one identity: the second waits for the first, and when that has rolled back the " +
					"identity is fresh",
			},
			check: func(ctx context.Context, e *storeEnv[T]) error { return e.meets(ctx, false) },
		},
		{
			Clause: Clause{
				ID: "S08", Name: "the wait has an end", Capability: capabilityLanes,
				Text: "a claim waits for another open transaction until TxOptions.ClaimWait is over or its context is done, and that " +
					"is contention; the other one is not disturbed",
			},
			check: waitEnds[T],
		},
		{
			Clause: Clause{
				ID: "S09", Name: "opposite orders", Capability: capabilityLanes,
				Text: "two transactions that claim the same identities in opposite orders do not deadlock: one gets all, the other finds them",
			},
			check: oppositeOrders[T],
		},
		{
			Clause: Clause{
				ID: "S10", Name: "nothing in common", Capability: capabilityLanes,
				Text: "as many transactions as Info.Lanes says are open at a time, and those with nothing in common do not wait for each other",
			},
			check: nothingInCommon[T],
		},
	}
}

// meets has a second transaction claim what a first one has claimed, and ends the first.
func (e *storeEnv[T]) meets(ctx context.Context, commit bool) error {
	const name = "k"
	first, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, name)
	if err != nil {
		return err
	}
	if err := e.apply(ctx, first, name, 1); err != nil {
		return err
	}
	end, want := first.Rollback, receipts.ClaimFresh
	if commit {
		end, want = first.Commit, receipts.ClaimHeld
	}
	var second receipts.Tx[T]
	err = during(func(letGo func()) error {
		err := pause(ctx, shortWait) // so that the other one is there
		letGo()
		return errors.Join(err, end(ctx))
	}, func() error {
		var err error
		if second, err = e.begin(ctx, e.b, receipts.TxOptions{}); err != nil {
			return err
		}
		results, err := second.Claim(ctx, e.claims(name))
		if err != nil {
			return fmt.Errorf("Claim of an identity that another transaction had claimed: %w", err)
		}
		if err := answers([]string{name}, results, want); err != nil || want == receipts.ClaimFresh {
			return err
		}
		return sameReceipt(results[0].Receipt, e.claim(name), first.Nonce())
	})
	if err != nil {
		return err
	}
	nonce := first.Nonce()
	if want == receipts.ClaimFresh {
		nonce = second.Nonce()
		err = e.apply(ctx, second, name, 1)
	}
	if err := errors.Join(err, second.Commit(ctx)); err != nil {
		return err
	}
	return errors.Join(e.effects(ctx, map[string]int64{name: 1}), e.provenHeld(ctx, nonce, name))
}

// inTime runs f, which has to return soon after limit although nothing else ends it.
func (e *storeEnv[T]) inTime(what string, limit time.Duration, f func() error) error {
	start := time.Now()
	err := f()
	if took := time.Since(start); took > limit+promptGrace {
		return errors.Join(fmt.Errorf("%s took %s, want about %s at most", what, took, limit), err)
	}
	return err
}

func waitEnds[T any](ctx context.Context, e *storeEnv[T]) error {
	first, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "k")
	if err != nil {
		return err
	}
	ways := map[string]struct {
		wait time.Duration
		ctx  func() (context.Context, context.CancelFunc)
	}{
		"ClaimWait": {shortWait, func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, e.h.Patience)
		}},
		"its deadline": {0, func() (context.Context, context.CancelFunc) { return context.WithTimeout(ctx, shortWait) }},
		"a cancelled context": {0, func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(shortWait, cancel)
			return ctx, cancel
		}},
	}
	for _, name := range []string{"ClaimWait", "its deadline", "a cancelled context"} {
		way := ways[name]
		second, err := e.begin(ctx, e.b, receipts.TxOptions{ClaimWait: way.wait})
		if err != nil {
			return err
		}
		what := "a claim that waits until the end of " + name
		err = e.inTime(what, shortWait, func() error {
			ctx, cancel := way.ctx()
			defer cancel()
			_, err := second.Claim(ctx, e.claims("j", "k", "l"))
			return isClass(e.b, what, err, receipts.ClassContention)
		})
		if err := errors.Join(err, second.Rollback(ctx)); err != nil {
			return err
		}
	}
	if err := first.Commit(ctx); err != nil {
		return fmt.Errorf("Commit of the one that was waited for: %w", err)
	}
	return errors.Join(e.provenHeld(ctx, first.Nonce(), "k"), e.wants(ctx, receipts.ClaimFresh, "j", "l"))
}

func oppositeOrders[T any](ctx context.Context, e *storeEnv[T]) error {
	const rounds, size = 20, 30
	for round := range rounds {
		names := numbered(fmt.Sprintf("%d-", round), size)
		turned := slices.Clone(names)
		slices.Reverse(turned)
		start := make(chan struct{})
		fresh := make(chan int, 2)
		errs := make(chan error, 2)
		for i, s := range []receipts.Store[T]{e.a, e.b} {
			tx, err := e.begin(ctx, s, receipts.TxOptions{})
			if err != nil {
				return err
			}
			order := [][]string{names, turned}[i]
			go func() {
				<-start
				n, err := e.claimAndCommit(ctx, tx, order)
				fresh <- n
				errs <- err
			}()
		}
		close(start)
		n, err := <-fresh+<-fresh, errors.Join(<-errs, <-errs)
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if n != size {
			return fmt.Errorf("round %d: of %d identities %d were fresh for two transactions", round, size, n)
		}
	}
	return nil
}

// claimAndCommit claims in one call and commits. It tells how many were fresh.
func (e *storeEnv[T]) claimAndCommit(ctx context.Context, tx receipts.Tx[T], names []string) (fresh int, err error) {
	results, err := tx.Claim(ctx, e.claims(names...))
	if err != nil {
		return 0, errors.Join(fmt.Errorf("Claim: %w", err), tx.Rollback(ctx))
	}
	for _, r := range results {
		if r.Status == receipts.ClaimFresh {
			fresh++
		}
	}
	return fresh, tx.Commit(ctx)
}

func nothingInCommon[T any](ctx context.Context, e *storeEnv[T]) error {
	n := e.info.Lanes
	if e.info.Pool > 0 && n > e.info.Pool {
		return fmt.Errorf("Check says %d lanes, and that the handle has %d connections", n, e.info.Pool)
	}
	names := numbered("n", n)
	want := map[string]int64{}
	ctx, cancel := context.WithTimeout(ctx, e.h.Patience)
	defer cancel()
	txs := make([]receipts.Tx[T], n)
	for i, name := range names {
		tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{ClaimWait: shortWait}, name, name+" too")
		if err != nil {
			return fmt.Errorf("with %d others open: %w", i, err)
		}
		if err := e.apply(ctx, tx, name, 1); err != nil {
			return err
		}
		txs[i], want[name] = tx, 1
	}
	for _, tx := range slices.Backward(txs) {
		if err := tx.Commit(ctx); err != nil {
			return fmt.Errorf("Commit: %w", err)
		}
	}
	return errors.Join(e.effects(ctx, want), e.stats(ctx, receipts.Stats{Done: 2 * n}))
}
