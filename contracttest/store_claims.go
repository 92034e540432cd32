package contracttest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// claimClauses are about what a claim answers, and what becomes of it.
func claimClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S02", Name: "fresh once, then held",
				Text: "an identity is fresh once; after the commit every process finds it held, with the receipt as it was stored, " +
					"whatever the later claim says. Done and diverted are told apart",
			},
			check: freshThenHeld[T],
		},
		{
			Clause: Clause{
				ID: "S03", Name: "rolled back is as if it never was",
				Text: "after Rollback there is no receipt, effect, output or dead letter, and what was locked is free at once. " +
					"Rollback after Commit, and again, does nothing; Commit after Rollback is an error",
			},
			check: rolledBack[T],
		},
		{
			Clause: Clause{
				ID: "S04", Name: "effect and receipt commit together",
				Text: "before Commit nobody else sees receipt, effect, outputs or dead letters; when Commit has returned nil " +
					"everybody sees all of them",
			},
			check: allAtOnce[T],
		},
		{
			Clause: Clause{
				ID: "S05", Name: "answers in the order of the claims",
				Text: "one call claims 1 to 1,000 identities, some new, some held, in any order: each gets its own answer",
			},
			check: answersInOrder[T],
		},
	}
}

func freshThenHeld[T any](ctx context.Context, e *storeEnv[T]) error {
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "done")
	if err != nil {
		return err
	}
	diverted := e.claim("diverted")
	diverted.State, diverted.At = receipts.StateDiverted, at(1)
	// Of a claim that this very transaction has made earlier it says so.
	results, err := tx.Claim(ctx, []receipts.Claim{e.claim("done"), diverted})
	if err != nil {
		return fmt.Errorf("Claim: %w", err)
	}
	if len(results) != 2 || results[0].Status != receipts.ClaimHeld || results[1].Status != receipts.ClaimFresh {
		return fmt.Errorf("claiming an own and a new identity answers %+v, want held and fresh", results)
	}
	if err := sameReceipt(results[0].Receipt, e.claim("done"), tx.Nonce()); err != nil {
		return fmt.Errorf("the receipt of an own claim: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("Commit: %w", err)
	}
	if err := e.stats(ctx, receipts.Stats{Done: 1, Diverted: 1}); err != nil {
		return err
	}
	for _, s := range []receipts.Store[T]{e.b, e.a} {
		if err := e.claimOtherwise(ctx, s, tx.Nonce(), e.claim("done"), diverted); err != nil {
			return err
		}
	}
	return errors.Join(e.stats(ctx, receipts.Stats{Done: 1, Diverted: 1}), e.provenHeld(ctx, tx.Nonce(), "done"))
}

// claimOtherwise claims what is held with other particulars, and commits that.
func (e *storeEnv[T]) claimOtherwise(ctx context.Context, s receipts.Store[T], nonce receipts.Nonce, stored ...receipts.Claim) error {
	tx, err := e.begin(ctx, s, receipts.TxOptions{})
	if err != nil {
		return err
	}
	for i := range stored {
		c := stored[i]
		c.Fingerprint, c.State, c.At = []byte("another"), 3-c.State, at(9)
		results, err := tx.Claim(ctx, []receipts.Claim{c})
		if err != nil {
			return fmt.Errorf("Claim: %w", err)
		}
		if err := answers([]string{string(c.Key)}, results, receipts.ClaimHeld); err != nil {
			return err
		}
		if err := sameReceipt(results[0].Receipt, stored[i], nonce); err != nil {
			return fmt.Errorf("the receipt of %q: %w", c.Key, err)
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("Commit without a fresh claim: %w", err)
	}
	return nil
}

// writeAll writes one of everything that belongs to a name.
func (e *storeEnv[T]) writeAll(ctx context.Context, tx receipts.Tx[T], name string) error {
	if err := e.apply(ctx, tx, name, 1); err != nil {
		return err
	}
	if _, err := tx.AddOutputs(ctx, []receipts.Output{e.output(name, 0)}); err != nil {
		return fmt.Errorf("AddOutputs: %w", err)
	}
	if err := tx.Divert(ctx, []receipts.DeadLetter{e.letter(name, "1")}); err != nil {
		return fmt.Errorf("Divert: %w", err)
	}
	return nil
}

// allOf are the counts after writeAll of n names whose claims were committed.
func allOf(n int) receipts.Stats {
	if n == 0 {
		return receipts.Stats{}
	}
	return receipts.Stats{
		Done: n, Outputs: n, Unsent: n, OldestUnsent: at(0), DeadLetters: map[receipts.DeadLetterKind]int{receipts.KindConflict: n},
	}
}

func rolledBack[T any](ctx context.Context, e *storeEnv[T]) error {
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "k")
	if err != nil {
		return err
	}
	if err := e.writeAll(ctx, tx, "k"); err != nil {
		return err
	}
	for _, which := range []string{"first", "second"} {
		if err := tx.Rollback(ctx); err != nil {
			return fmt.Errorf("the %s Rollback: %w", which, err)
		}
	}
	if tx.Commit(ctx) == nil {
		return errors.New("Commit after Rollback is nil")
	}
	// At once: there is nobody to wait for.
	other, err := e.beginClaimed(ctx, e.b, receipts.TxOptions{ClaimWait: shortWait}, "k")
	if err != nil {
		return fmt.Errorf("after Rollback: %w", err)
	}
	if err := errors.Join(e.untouched(ctx), e.apply(ctx, other, "k", 1), other.Commit(ctx), other.Rollback(ctx)); err != nil {
		return err
	}
	if other.Commit(ctx) == nil {
		return errors.New("a second Commit is nil")
	}
	return errors.Join(e.effects(ctx, map[string]int64{"k": 1}), e.provenHeld(ctx, other.Nonce(), "k"))
}

func allAtOnce[T any](ctx context.Context, e *storeEnv[T]) error {
	names := numbered("n", 3)
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, names...)
	if err != nil {
		return err
	}
	if err := e.untouched(ctx); err != nil {
		return fmt.Errorf("after Claim, before Commit: %w", err)
	}
	want := map[string]int64{}
	for _, name := range names {
		if err := e.writeAll(ctx, tx, name); err != nil {
			return err
		}
		want[name] = 1
	}
	if err := e.untouched(ctx); err != nil {
		return fmt.Errorf("before Commit: %w", err)
	}
	if e.lanes() {
		if err := e.claimedElsewhere(ctx, names[0]); err != nil {
			return err
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("Commit: %w", err)
	}
	return errors.Join(e.effects(ctx, want), e.stats(ctx, allOf(len(names))), e.provenHeld(ctx, tx.Nonce(), names...))
}

// claimedElsewhere wants a name to be claimed by another transaction that is open.
func (e *storeEnv[T]) claimedElsewhere(ctx context.Context, name string) error {
	tx, err := e.begin(ctx, e.b, receipts.TxOptions{ClaimWait: shortWait})
	if err != nil {
		return err
	}
	results, err := tx.Claim(ctx, e.claims(name))
	if err == nil {
		return fmt.Errorf("an identity that another open transaction has claimed is %s", status(results[0].Status))
	}
	return errors.Join(isClass(e.b, "a claim that waits for too long", err, receipts.ClassContention), tx.Rollback(ctx))
}

// claimSizes are how many identities one call claims.
func claimSizes() []int { return []int{1, 2, 3, 17, 255, 256, 257, 1000} }

// answersInOrder claims a third of some identities first, and then all of them, shuffled, with others in between.
func answersInOrder[T any](ctx context.Context, e *storeEnv[T]) error {
	shuffle := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same every time
	for _, size := range claimSizes() {
		names := numbered(fmt.Sprintf("%d-", size), size)
		held := map[string]bool{}
		var before []string
		for i := 0; i < size; i += 3 {
			before = append(before, names[i])
			held[names[i]] = true
		}
		nonce, err := e.commits(ctx, e.a, before, nil)
		if err != nil {
			return err
		}
		shuffle.Shuffle(size, func(i, j int) { names[i], names[j] = names[j], names[i] })
		tx, err := e.begin(ctx, e.b, receipts.TxOptions{})
		if err != nil {
			return err
		}
		results, err := tx.Claim(ctx, e.claims(names...))
		if err != nil {
			return fmt.Errorf("Claim of %d: %w", size, err)
		}
		if err := e.eachItsAnswer(names, results, held, nonce); err != nil {
			return fmt.Errorf("%d claims in one call: %w", size, err)
		}
		if err := tx.Commit(ctx); err != nil {
			return fmt.Errorf("Commit: %w", err)
		}
		if err := e.wants(ctx, receipts.ClaimHeld, names...); err != nil {
			return fmt.Errorf("%d claims in one call: %w", size, err)
		}
	}
	return nil
}

func (e *storeEnv[T]) eachItsAnswer(names []string, results []receipts.ClaimResult, held map[string]bool, nonce receipts.Nonce) error {
	if len(results) != len(names) {
		return fmt.Errorf("%d answers", len(results))
	}
	for i, name := range names {
		want := receipts.ClaimFresh
		if held[name] {
			want = receipts.ClaimHeld
		}
		if err := answers(names[i:i+1], results[i:i+1], want); err != nil {
			return err
		}
		if want == receipts.ClaimHeld {
			if err := sameReceipt(results[i].Receipt, e.claim(name), nonce); err != nil {
				return fmt.Errorf("the receipt of %q: %w", name, err)
			}
		}
	}
	return nil
}
