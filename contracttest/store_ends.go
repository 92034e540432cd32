package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// endingClauses are about transactions that somebody else ends.
func endingClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S16", Name: "the handler ends the transaction", Hooks: []string{"End"},
				Text: "a handler commits, rolls back, executes COMMIT as text or a statement that commits by itself: Keep and Commit say ErrTxEnded, and no receipt of that " +
					"transaction is ever whole, a neighbour's neither: it is not there, and then nor is any effect, or it is torn",
			},
			check: endedInside[T],
		},
		{
			Clause: Clause{
				ID: "S17", Name: "the handler swallows an error", Hooks: []string{"Errors"},
				Text: "a handler ignores an error that ended the transaction, or left it useless, and writes on: Commit is nil and " +
					"everything is there, or it is an error and there is neither receipt nor effect, or the receipts are torn",
			},
			check: errorSwallowed[T],
		},
		{
			Clause: Clause{
				ID: "S18", Name: "the answer to COMMIT is lost", Hooks: []string{"OpenFaulty"},
				Text: "COMMIT's answer is lost, or COMMIT itself: ErrCommitUnknown, and Resolve tells through another handle which it was",
			},
			check: commitLost[T],
		},
		{
			Clause: Clause{
				ID: "S19", Name: "the session is killed", Hooks: []string{"Kill"},
				Text: "a session that is killed from outside leaves nothing, its claims are free, and its connection is not used again",
			},
			check: sessionKilled[T],
		},
		{
			Clause: Clause{
				ID: "S20", Name: "Resolve knows every end",
				Text: "Resolve says committed of a transaction that committed with fresh claims, and of no other",
			},
			check: resolvesAll[T],
		},
		{
			Clause: Clause{
				ID: "S21", Name: "connections come back clean",
				Text: "however a transaction ended, the handle's connections are all there and clean afterwards: what the next ones roll " +
					"back is rolled back, and what they commit is committed",
			},
			check: comeBackClean[T],
		},
	}
}

// partsOrNot is whether to work in parts: both where the store has them.
func (e *storeEnv[T]) partsOrNot() []bool {
	if e.info.Parts {
		return []bool{false, true}
	}
	return []bool{false}
}

func endedInside[T any](ctx context.Context, e *storeEnv[T]) error {
	for _, how := range e.s.endings() {
		for _, parts := range e.partsOrNot() {
			if err := e.endInside(ctx, how, parts); err != nil {
				return fmt.Errorf("the handler ends it by %s, in a part %t: %w", how, parts, err)
			}
		}
	}
	return nil
}

// endInside has a handler, after a neighbour, write, end the transaction and write on.
func (e *storeEnv[T]) endInside(ctx context.Context, how Ending, parts bool) error {
	name := fmt.Sprintf("%s-%t", how, parts)
	names := []string{name, name + "-neighbour"}
	before, err := e.look.Effects(ctx)
	if err != nil {
		return fmt.Errorf("the hook Effects: %w", err)
	}
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, names...)
	if err != nil {
		return err
	}
	if err := e.neighbour(ctx, tx, names[1], parts); err != nil {
		return err
	}
	if parts {
		if err := tx.Part(ctx); err != nil {
			return fmt.Errorf("Part: %w", err)
		}
	}
	if err := e.apply(ctx, tx, names[0], 1); err != nil {
		return err
	}
	raw := tx.Raw()
	_ = e.s.End(ctx, raw, how) // a store may refuse
	_ = e.s.Apply(ctx, raw, names[0]+"-afterwards", 1)
	if parts {
		if err := isError("Keep", tx.Keep(ctx), receipts.ErrTxEnded); err != nil {
			return err
		}
		if err := tx.Rollback(ctx); err != nil {
			return fmt.Errorf("Rollback: %w", err)
		}
	} else if err := isError("Commit", tx.Commit(ctx), receipts.ErrTxEnded); err != nil {
		return err
	}
	return e.neverWhole(ctx, tx.Nonce(), before, names...)
}

// neighbour is a message before the one in question, in a part of its own where there are parts.
func (e *storeEnv[T]) neighbour(ctx context.Context, tx receipts.Tx[T], name string, parts bool) error {
	if parts {
		if err := tx.Part(ctx); err != nil {
			return fmt.Errorf("Part: %w", err)
		}
	}
	if err := e.apply(ctx, tx, name, 1); err != nil {
		return err
	}
	if _, err := tx.AddOutputs(ctx, []receipts.Output{e.output(name, 0)}); err != nil {
		return fmt.Errorf("AddOutputs: %w", err)
	}
	if parts {
		if err := tx.Keep(ctx); err != nil {
			return fmt.Errorf("Keep: %w", err)
		}
	}
	return nil
}

// neverWhole wants no receipt of a transaction to be held: all of them are torn, or there is nothing of it.
func (e *storeEnv[T]) neverWhole(ctx context.Context, nonce receipts.Nonce, before map[string]int64, names ...string) error {
	results, err := e.ask(ctx, names...)
	if err != nil {
		return err
	}
	for i, r := range results {
		switch {
		case r.Status == receipts.ClaimHeld:
			return fmt.Errorf("the receipt of %q looks whole", names[i])
		case r.Status != results[0].Status:
			return fmt.Errorf("%q is %s, and %q is %s", names[0], status(results[0].Status), names[i], status(r.Status))
		case r.Status == receipts.ClaimTorn && r.Receipt.Nonce != nonce:
			return fmt.Errorf("the torn receipt of %q has nonce %s, want %s", names[i], r.Receipt.Nonce, nonce)
		}
		unsent, err := e.look.Store.Unsent(ctx, receipts.UnsentQuery{Limit: 10, Scope: e.scope, Key: []byte(names[i])})
		if err != nil {
			return fmt.Errorf("Unsent: %w", err)
		}
		if len(unsent) > 0 {
			return fmt.Errorf("Unsent lists an output of %q, whose receipt is %s", names[i], status(r.Status))
		}
	}
	if results[0].Status == receipts.ClaimFresh {
		err = e.effects(ctx, withoutZero(before))
	}
	return errors.Join(err, e.resolves(ctx, e.b, nonce, false))
}

func withoutZero(counters map[string]int64) map[string]int64 {
	all := maps.Clone(counters)
	maps.DeleteFunc(all, func(_ string, n int64) bool { return n == 0 })
	return all
}

func errorSwallowed[T any](ctx context.Context, e *storeEnv[T]) error {
	ways := maps.Clone(e.s.Errors)
	if e.s.Violate != nil {
		ways["a violated constraint"] = e.s.Violate
	}
	for _, way := range slices.Sorted(maps.Keys(ways)) {
		for _, parts := range e.partsOrNot() {
			if err := e.swallow(ctx, way, parts, ways[way]); err != nil {
				return fmt.Errorf("%s, in a part %t: %w", way, parts, err)
			}
		}
	}
	return nil
}

// swallow has a handler, after a neighbour, write, meet an error, write on and return nil.
func (e *storeEnv[T]) swallow(ctx context.Context, way string, parts bool, fail func(context.Context, T) error) error {
	name := fmt.Sprintf("%s-%t", way, parts)
	names := []string{name, name + "-neighbour"}
	before, err := e.look.Effects(ctx)
	if err != nil {
		return fmt.Errorf("the hook Effects: %w", err)
	}
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, names...)
	if err != nil {
		return err
	}
	if err := e.neighbour(ctx, tx, names[1], parts); err != nil {
		return err
	}
	if parts {
		if err := tx.Part(ctx); err != nil {
			return fmt.Errorf("Part: %w", err)
		}
	}
	if err := e.apply(ctx, tx, names[0], 1); err != nil {
		return err
	}
	raw := tx.Raw()
	if fail(ctx, raw) == nil {
		return errors.New("the hook has met no error")
	}
	after := e.s.Apply(ctx, raw, names[0]+"-afterwards", 1)
	err = nil
	if parts {
		err = tx.Keep(ctx)
	}
	if err == nil {
		err = tx.Commit(ctx)
	}
	if err != nil {
		if err := tx.Rollback(ctx); err != nil {
			return fmt.Errorf("Rollback: %w", err)
		}
		return e.neverWhole(ctx, tx.Nonce(), before, names...)
	}
	want := withoutZero(before)
	want[names[0]], want[names[1]] = 1, 1
	if after == nil {
		want[names[0]+"-afterwards"] = 1
	}
	return errors.Join(e.effects(ctx, want), e.provenHeld(ctx, tx.Nonce(), names...))
}

func commitLost[T any](ctx context.Context, e *storeEnv[T]) error {
	want := map[string]int64{}
	for _, forwarded := range []bool{true, false} {
		for _, asBadConn := range []bool{true, false} {
			name := fmt.Sprintf("%t-%t", forwarded, asBadConn)
			if err := e.loseCommit(ctx, name, forwarded, asBadConn); err != nil {
				return fmt.Errorf("forwarded %t, as a bad connection %t: %w", forwarded, asBadConn, err)
			}
			want[name] = 1
			if err := e.effects(ctx, want); err != nil {
				return fmt.Errorf("forwarded %t, as a bad connection %t: %w", forwarded, asBadConn, err)
			}
		}
	}
	return nil
}

// loseCommit loses one COMMIT, asks what became of it, and does it again where it did not.
func (e *storeEnv[T]) loseCommit(ctx context.Context, name string, forwarded, asBadConn bool) (err error) {
	db, faults, err := e.s.OpenFaulty(ctx, e.dir)
	if err != nil {
		return fmt.Errorf("the hook OpenFaulty: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if faults.LoseCommit == nil {
		return errors.New("the hook OpenFaulty has no LoseCommit")
	}
	store := e.wrapped(db.Store)
	tx, err := e.beginClaimed(ctx, store, receipts.TxOptions{}, name)
	if err != nil {
		return err
	}
	if err := e.apply(ctx, tx, name, 1); err != nil {
		return err
	}
	fired := faults.LoseCommit(forwarded, asBadConn)
	if err := isError("Commit", tx.Commit(ctx), receipts.ErrCommitUnknown); err != nil {
		return err
	}
	if err := wantFired(int64(fired())); err != nil {
		return err
	}
	// Through another handle, and through the very one: its broken connection must be gone.
	if err := errors.Join(e.resolves(ctx, e.b, tx.Nonce(), forwarded), e.resolves(ctx, store, tx.Nonce(), forwarded)); err != nil {
		return err
	}
	if forwarded {
		return e.provenHeld(ctx, tx.Nonce(), name)
	}
	nonce, err := e.commits(ctx, store, []string{name}, func(tx receipts.Tx[T]) error { return e.apply(ctx, tx, name, 1) })
	if err != nil {
		return fmt.Errorf("the same, again: %w", err)
	}
	return e.provenHeld(ctx, nonce, name)
}

func sessionKilled[T any](ctx context.Context, e *storeEnv[T]) error {
	for _, parts := range e.partsOrNot() {
		name := fmt.Sprintf("k-%t", parts)
		tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, name)
		if err != nil {
			return err
		}
		if parts {
			if err := tx.Part(ctx); err != nil {
				return fmt.Errorf("Part: %w", err)
			}
		}
		if err := e.writeAll(ctx, tx, name); err != nil {
			return err
		}
		if err := e.s.Kill(ctx, tx.Raw()); err != nil {
			return fmt.Errorf("the hook Kill: %w", err)
		}
		if parts {
			err = tx.Keep(ctx)
		} else {
			err = tx.Commit(ctx)
		}
		if !errors.Is(err, receipts.ErrCommitUnknown) {
			if err := isClass(e.a, "ending the transaction of a killed session", err, receipts.ClassOutage); err != nil {
				return err
			}
		}
		// It may say that the connection is lost.
		if err := tx.Rollback(ctx); err != nil && e.a.Classify(err) != receipts.ClassOutage {
			return fmt.Errorf("Rollback: %w", err)
		}
		if err := errors.Join(
			e.resolves(ctx, e.b, tx.Nonce(), false), e.wants(ctx, receipts.ClaimFresh, name), e.untouched(ctx), e.allClean(ctx, nil),
		); err != nil {
			return err
		}
	}
	return nil
}

func resolvesAll[T any](ctx context.Context, e *storeEnv[T]) error {
	committed, err := e.commits(ctx, e.a, []string{"committed"}, nil)
	if err != nil {
		return err
	}
	back, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "rolled back")
	if err != nil {
		return err
	}
	if err := back.Rollback(ctx); err != nil {
		return fmt.Errorf("Rollback: %w", err)
	}
	for _, s := range []receipts.Store[T]{e.a, e.b} {
		for range 2 { // asking twice is the same
			if err := errors.Join(
				e.resolves(ctx, s, committed, true), e.resolves(ctx, s, back.Nonce(), false), e.resolves(ctx, s, receipts.NewNonce(), false),
			); err != nil {
				return err
			}
		}
	}
	// What was asked about stays as it was, and may be claimed.
	if err := errors.Join(e.stats(ctx, receipts.Stats{Done: 1}), e.provenHeld(ctx, committed, "committed")); err != nil {
		return err
	}
	return e.wants(ctx, receipts.ClaimFresh, "rolled back")
}

// comeBackClean ends transactions in all ways, and looks at the connections after each.
func comeBackClean[T any](ctx context.Context, e *storeEnv[T]) error {
	ends := map[string]func(tx receipts.Tx[T]) error{
		"Commit":   func(tx receipts.Tx[T]) error { return tx.Commit(ctx) },
		"Rollback": func(tx receipts.Tx[T]) error { return tx.Rollback(ctx) },
		"Rollback with a context that is done": func(tx receipts.Tx[T]) error {
			done, cancel := context.WithCancel(ctx)
			cancel()
			_ = tx.Rollback(done) // it may have to leave the rest to somebody else
			return nil
		},
		"Rollback after a refused claim": func(tx receipts.Tx[T]) error {
			if _, err := tx.Claim(ctx, make([]receipts.Claim, 1)); err == nil {
				return errors.New("an empty claim is taken")
			}
			return tx.Rollback(ctx)
		},
	}
	if e.s.End != nil {
		for _, how := range e.s.endings() {
			ends["the handler's "+string(how)] = func(tx receipts.Tx[T]) error {
				_ = e.s.End(ctx, tx.Raw(), how)
				return isError("Commit", tx.Commit(ctx), receipts.ErrTxEnded)
			}
		}
	}
	for name, fail := range e.s.Errors {
		ends[name] = func(tx receipts.Tx[T]) error {
			_ = fail(ctx, tx.Raw())
			if err := tx.Rollback(ctx); e.a.Classify(err) != receipts.ClassOutage { // it says that the connection was lost
				return err
			}
			return nil
		}
	}
	for _, name := range slices.Sorted(maps.Keys(ends)) {
		for range 2 {
			tx, err := e.begin(ctx, e.a, receipts.TxOptions{})
			if err != nil {
				return err
			}
			if _, err := tx.Claim(ctx, e.claims(name)); err != nil {
				return fmt.Errorf("Claim: %w", err)
			}
			if err := ends[name](tx); err != nil {
				return fmt.Errorf("ended by %s: %w", name, err)
			}
		}
		before, err := e.look.Effects(ctx)
		if err == nil {
			err = e.allClean(ctx, before)
		}
		if err != nil {
			return fmt.Errorf("ended by %s: %w", name, err)
		}
	}
	return nil
}

// allClean runs more transactions than the first handle has connections, some of them at a time where there are lanes.
func (e *storeEnv[T]) allClean(ctx context.Context, before map[string]int64) error {
	const dirty = "dirty"
	most := 4
	if e.info.Pool > 0 {
		most = min(e.info.Pool+1, 12)
	}
	for range most {
		tx, err := e.begin(ctx, e.a, receipts.TxOptions{})
		if err != nil {
			return err
		}
		if err := e.claimFresh(ctx, tx, dirty); err != nil {
			return err
		}
		if err := errors.Join(e.apply(ctx, tx, dirty, 1), tx.Rollback(ctx)); err != nil {
			return err
		}
	}
	if err := e.effects(ctx, withoutZero(before)); err != nil {
		return fmt.Errorf("what was rolled back is there: %w", err)
	}
	return e.wants(ctx, receipts.ClaimFresh, dirty)
}
