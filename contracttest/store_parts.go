package contracttest

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// partClauses are about messages that share a transaction.
func partClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S13", Name: "one message's work is undone alone", Capability: capabilityParts,
				Text: "Undo takes back effect, outputs and dead letters of its part, not of another one nor what is between them; Keep keeps " +
					"them, but nobody sees them before Commit. A part in which a statement failed can be undone",
			},
			check: undoneAlone[T],
		},
		{
			Clause: Clause{
				ID: "S14", Name: "parts follow each other", Capability: capabilityParts,
				Text: "Claim, Unclaim, Part and Commit inside a part, and Keep and Undo outside one, are refused",
			},
			check: partsFollow[T],
		},
		{
			Clause: Clause{
				ID: "S15", Name: "a claim is given up",
				Text: "Unclaim deletes the receipts it names, of this transaction's own fresh claims only; they may be claimed again in it. " +
					"Where none is left, Commit writes no marker, and Resolve says so",
			},
			check: givenUp[T],
		},
	}
}

func undoneAlone[T any](ctx context.Context, e *storeEnv[T]) error {
	names := []string{"kept", "undone", "again", "last"}
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, names...)
	if err != nil {
		return err
	}
	steps := []struct {
		name string
		fail bool
		end  func(context.Context) error
	}{
		{"kept", false, tx.Keep},
		{"undone", false, tx.Undo},
		{"again", true, tx.Undo},
		{"again", false, tx.Keep},
		{"undone", false, tx.Undo},
		{"last", false, tx.Keep},
	}
	for i, s := range steps {
		if err := e.between(ctx, tx, i); err != nil {
			return err
		}
		if err := tx.Part(ctx); err != nil {
			return fmt.Errorf("Part number %d: %w", i, err)
		}
		if err := e.writeAll(ctx, tx, s.name); err != nil {
			return err
		}
		if s.fail && e.s.Violate != nil {
			if e.s.Violate(ctx, tx.Raw()) == nil {
				return errors.New("the hook Violate gave no error")
			}
		}
		if err := s.end(ctx); err != nil {
			return fmt.Errorf("ending part number %d: %w", i, err)
		}
		if err := e.untouched(ctx); err != nil {
			return fmt.Errorf("after part number %d, before Commit: %w", i, err)
		}
	}
	if err := tx.Unclaim(ctx, e.claims("undone")); err != nil {
		return fmt.Errorf("Unclaim: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("Commit: %w", err)
	}
	want := allOf(3)
	want.Done, want.Outputs, want.Unsent = 3+len(steps), 3+len(steps), 3+len(steps)
	return errors.Join(
		e.effects(ctx, map[string]int64{"kept": 1, "again": 1, "last": 1}), e.stats(ctx, want),
		e.provenHeld(ctx, tx.Nonce(), "kept", "again", "last"), e.wants(ctx, receipts.ClaimFresh, "undone"),
		e.positionsRise(ctx, "kept", "again", "last"),
	)
}

// between claims, and stores an output, outside of parts.
func (e *storeEnv[T]) between(ctx context.Context, tx receipts.Tx[T], i int) error {
	name := fmt.Sprintf("between-%d", i)
	if err := e.claimFresh(ctx, tx, name); err != nil {
		return err
	}
	if _, err := tx.AddOutputs(ctx, []receipts.Output{e.output(name, 0)}); err != nil {
		return fmt.Errorf("AddOutputs: %w", err)
	}
	return nil
}

// positionsRise wants one output of each name, in this order.
func (e *storeEnv[T]) positionsRise(ctx context.Context, names ...string) error {
	last := -1
	for _, name := range names {
		outputs, err := e.look.Store.Outputs(ctx, e.scope, []byte(name))
		if err != nil {
			return fmt.Errorf("Outputs: %w", err)
		}
		if len(outputs) != 1 {
			return fmt.Errorf("%d outputs of %q, want 1", len(outputs), name)
		}
		if p := outputs[0].Position; p <= last {
			return fmt.Errorf("the output of %q has position %d, the one before it %d", name, p, last)
		}
		last = outputs[0].Position
	}
	return nil
}

func partsFollow[T any](ctx context.Context, e *storeEnv[T]) error {
	inside := map[string]func(tx receipts.Tx[T]) error{
		"Claim": func(tx receipts.Tx[T]) error {
			_, err := tx.Claim(ctx, e.claims("later"))
			return err
		},
		"Unclaim": func(tx receipts.Tx[T]) error { return tx.Unclaim(ctx, e.claims("k")) },
		"Part":    func(tx receipts.Tx[T]) error { return tx.Part(ctx) },
		"Commit":  func(tx receipts.Tx[T]) error { return tx.Commit(ctx) },
	}
	outside := map[string]func(tx receipts.Tx[T]) error{
		"Keep": func(tx receipts.Tx[T]) error { return tx.Keep(ctx) },
		"Undo": func(tx receipts.Tx[T]) error { return tx.Undo(ctx) },
	}
	try := func(where, what string, part bool, call func(tx receipts.Tx[T]) error) error {
		tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "k")
		if err != nil {
			return err
		}
		if part {
			if err := tx.Part(ctx); err != nil {
				return fmt.Errorf("Part: %w", err)
			}
		}
		if call(tx) == nil {
			return fmt.Errorf("%s %s a part is nil", what, where)
		}
		return tx.Rollback(ctx)
	}
	for what, call := range inside {
		if err := try("inside", what, true, call); err != nil {
			return err
		}
	}
	for what, call := range outside {
		if err := try("outside", what, false, call); err != nil {
			return err
		}
	}
	return errors.Join(e.untouched(ctx), e.wants(ctx, receipts.ClaimFresh, "k", "later"))
}

func givenUp[T any](ctx context.Context, e *storeEnv[T]) error {
	if _, err := e.commits(ctx, e.b, []string{"held"}, nil); err != nil {
		return err
	}
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "kept", "given", "again", "neighbour")
	if err != nil {
		return err
	}
	if err := tx.Unclaim(ctx, e.claims("again", "given", "held", "never")); err != nil {
		return fmt.Errorf("Unclaim: %w", err)
	}
	if err := e.claimFresh(ctx, tx, "again"); err != nil {
		return fmt.Errorf("after Unclaim: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("Commit: %w", err)
	}
	if err := errors.Join(
		e.provenHeld(ctx, tx.Nonce(), "again", "kept", "neighbour"), e.wants(ctx, receipts.ClaimHeld, "held"),
		e.wants(ctx, receipts.ClaimFresh, "given", "never"), e.resolves(ctx, e.b, tx.Nonce(), true),
	); err != nil {
		return err
	}
	return e.allGivenUp(ctx)
}

// allGivenUp commits a transaction without a claim that is left, but with a dead letter.
func (e *storeEnv[T]) allGivenUp(ctx context.Context) error {
	nonce, err := e.commits(ctx, e.a, []string{"all", "of them"}, func(tx receipts.Tx[T]) error {
		if err := tx.Divert(ctx, []receipts.DeadLetter{e.letter("all", "1")}); err != nil {
			return fmt.Errorf("Divert: %w", err)
		}
		return tx.Unclaim(ctx, e.claims("of them", "all"))
	})
	if err != nil {
		return fmt.Errorf("a transaction that gives up all its claims: %w", err)
	}
	return errors.Join(
		e.wants(ctx, receipts.ClaimFresh, "all", "of them"), e.resolves(ctx, e.b, nonce, false),
		e.stats(ctx, receipts.Stats{Done: 4, DeadLetters: map[receipts.DeadLetterKind]int{receipts.KindConflict: 1}}),
	)
}

// resolves compares what Resolve says.
func (e *storeEnv[T]) resolves(ctx context.Context, s receipts.Store[T], nonce receipts.Nonce, want bool) error {
	got, err := s.Resolve(ctx, nonce)
	if err != nil {
		return fmt.Errorf("Resolve: %w", err)
	}
	if got != want {
		return fmt.Errorf("Resolve says committed %t, want %t", got, want)
	}
	return nil
}
