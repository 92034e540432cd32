package contracttest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// crowdClauses are about many transactions at once.
func crowdClauses[T any]() []storeClause[T] {
	return []storeClause[T]{{
		Clause: Clause{
			ID: "S32", Name: "eight at once",
			Text: "eight workers on two handles process the same identities, in batches, in any order: each takes effect once, and " +
				"nobody sees an error but contention",
		},
		check: eightAtOnce[T],
	}}
}

func eightAtOnce[T any](ctx context.Context, e *storeEnv[T]) error {
	const workers, identities, size = 8, 60, 6
	names := numbered("n", identities)
	errs := make(chan error, workers)
	for i := range workers {
		s := []receipts.Store[T]{e.a, e.b}[i%2]
		r := rand.New(rand.NewPCG(5, uint64(i))) //nolint:gosec // the same every time
		go func() {
			order := r.Perm(identities)
			for len(order) > 0 {
				var batch []string
				for _, n := range order[:size] {
					batch = append(batch, names[n])
				}
				order = order[size:]
				if err := e.persist(ctx, s, func() error { return e.batch(ctx, s, batch) }); err != nil {
					errs <- fmt.Errorf("worker %d: %w", i, err)
					return
				}
			}
			errs <- nil
		}()
	}
	var all []error
	for range workers {
		all = append(all, <-errs)
	}
	if err := errors.Join(all...); err != nil {
		return err
	}
	want := map[string]int64{hot: identities}
	for _, name := range names {
		want[name] = 1
	}
	return errors.Join(e.effects(ctx, want), e.stats(ctx, receipts.Stats{Done: identities}), e.wants(ctx, receipts.ClaimHeld, names...))
}

// batch processes messages in one transaction, as the middleware does: what is fresh takes effect, in key order.
func (e *storeEnv[T]) batch(ctx context.Context, s receipts.Store[T], names []string) (err error) {
	names = sortedCopy(names)
	tx, err := s.Begin(ctx, receipts.TxOptions{Budget: e.h.Patience})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = tx.Rollback(ctx)
		}
	}()
	results, err := tx.Claim(ctx, e.claims(names...))
	if err != nil {
		return err
	}
	for i, r := range results {
		if r.Status != receipts.ClaimFresh {
			continue
		}
		if err := e.inPart(ctx, tx, func() error {
			return errors.Join(e.s.Apply(ctx, tx.Raw(), names[i], 1), e.s.Apply(ctx, tx.Raw(), hot, 1))
		}); err != nil {
			return err
		}
	}
	return tx.Commit(ctx)
}

// inPart does something in a part, where there are parts.
func (e *storeEnv[T]) inPart(ctx context.Context, tx receipts.Tx[T], f func() error) error {
	if !e.info.Parts {
		return f()
	}
	if err := tx.Part(ctx); err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	return tx.Keep(ctx)
}
