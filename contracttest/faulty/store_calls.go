package faulty

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// StoreCallFaults gives faults of a store that show in its calls and may stay hidden from the transaction clauses. Like
// [StoreFaults] they share no state.
func StoreCallFaults[T any]() []StoreFault[T] {
	return []StoreFault[T]{
		{"migrate-forgotten", "a fresh installation does not start", MigrateForgotten[T]},
		{"migrate-afresh", "an upgrade forgets what was processed", MigrateAfresh[T]},
		{"claims-one-by-one", "two consumers deadlock over the same messages", ClaimsOneByOne[T]},
		{"lanes-overstated", "consumers stop each other", LanesOverstated[T]},
		{"refusals-forgotten", "a message without identity shares its receipt with others", RefusalsForgotten[T]},
		{"parts-unordered", "a message's claim is undone with another one's work", PartsUnordered[T]},
		{"resolve-hopes", "a COMMIT that never arrived counts as done", ResolveHopes[T]},
		{"rollback-forgotten", "a failed attempt holds its locks and its connection for ever", RollbackForgotten[T]},
		{"kill-unseen", "a message is charged because its session was killed", KillUnseen[T]},
		{"outputs-reversed", "outputs are sent in another order than they were produced in", OutputsReversed[T]},
		{"sent-mark-spreads", "outputs are lost that were never sent", SentMarkSpreads[T]},
		{"letters-repeated", "the dead-letter table grows with every redelivery", LettersRepeated[T]},
		{"torn-counted-as-done", "nobody sees that receipts prove nothing", TornCountedAsDone[T]},
		{"budget-ignored", "a handler that hangs holds its locks for ever", BudgetIgnored[T]},
		{"begin-context-rules", "a message whose context ends takes its neighbours along", BeginContextRules[T]},
		{"begin-waits", "a consumer that is to stop waits for a connection", BeginWaits[T]},
		{"everything-is-contention", "a message that can never be handled is tried for ever", EverythingIsContention[T]},
	}
}

// MigrateForgotten plants: Migrate makes no tables.
func MigrateForgotten[T any](s receipts.Store[T]) receipts.Store[T] { return unmigrated[T]{s} }

type unmigrated[T any] struct{ receipts.Store[T] }

// Migrate does nothing.
func (unmigrated[T]) Migrate(context.Context) error { return nil }

// MigrateAfresh plants: Migrate makes the tables anew, so that no receipt from before is found.
func MigrateAfresh[T any](s receipts.Store[T]) receipts.Store[T] {
	m := &migratedAfresh[T]{}
	m.Store = claimStore(s, func(c *receipts.Claim) { c.Scope += fmt.Sprint(m.times.Load()) }, nil)
	return m
}

type migratedAfresh[T any] struct {
	receipts.Store[T]
	times atomic.Int64
}

// Migrate forgets.
func (m *migratedAfresh[T]) Migrate(ctx context.Context) error {
	m.times.Add(1)
	return m.Store.Migrate(ctx)
}

// ClaimsOneByOne plants: claims are inserted as they come, each in a statement of its own.
func ClaimsOneByOne[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return oneByOne[T]{tx} })
}

type oneByOne[T any] struct{ under[T] }

// roundTrip is the time of a statement over a network.
const roundTrip = time.Millisecond

// Claim claims one after the other.
func (t oneByOne[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	if len(claims) > 64 {
		return t.under.Claim(ctx, claims)
	}
	var all []receipts.ClaimResult
	for i := range claims {
		time.Sleep(roundTrip)
		results, err := t.under.Claim(ctx, claims[i:i+1])
		if err != nil {
			return nil, err
		}
		all = append(all, results...)
	}
	return all, nil
}

// LanesOverstated plants: Check names many lanes where there is a single writer.
func LanesOverstated[T any](s receipts.Store[T]) receipts.Store[T] {
	writer := make(chan struct{}, 1)
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		select {
		case writer <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		tx, err := s.Begin(ctx, opts)
		if err != nil {
			<-writer
			return nil, err
		}
		return oneWriter[T]{tx, sync.OnceFunc(func() { <-writer })}, nil
	}}
}

type oneWriter[T any] struct {
	under[T]
	done func()
}

// Commit lets the next one write.
func (t oneWriter[T]) Commit(ctx context.Context) error {
	defer t.done()
	return t.under.Commit(ctx)
}

// Rollback lets the next one write.
func (t oneWriter[T]) Rollback(ctx context.Context) error {
	defer t.done()
	return t.under.Rollback(ctx)
}

// RefusalsForgotten plants: what is no identity is made one.
func RefusalsForgotten[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return acceptsAll[T]{tx} })
}

type acceptsAll[T any] struct{ under[T] }

// Claim claims what it can and calls the others fresh.
func (t acceptsAll[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.under.Claim(ctx, claims)
	if err != nil && slices.ContainsFunc(claims, func(c receipts.Claim) bool { return len(c.Key) == 0 }) {
		return slices.Repeat([]receipts.ClaimResult{{Status: receipts.ClaimFresh}}, len(claims)), nil
	}
	return results, err
}

// PartsUnordered plants: a part is kept where somebody forgot to, before a claim.
func PartsUnordered[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return keepsSilently[T]{tx} })
}

type keepsSilently[T any] struct{ under[T] }

// Claim keeps an open part.
func (t keepsSilently[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	_ = t.Keep(ctx) // there may be none
	return t.under.Claim(ctx, claims)
}

// ResolveHopes plants: a transaction that is asked about has committed.
func ResolveHopes[T any](s receipts.Store[T]) receipts.Store[T] { return hopes[T]{s} }

type hopes[T any] struct{ receipts.Store[T] }

// Resolve hopes.
func (s hopes[T]) Resolve(ctx context.Context, n receipts.Nonce) (bool, error) {
	_, err := s.Store.Resolve(ctx, n)
	return err == nil, err
}

// RollbackForgotten plants: Rollback does nothing.
func RollbackForgotten[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return staysOpen[T]{tx} })
}

type staysOpen[T any] struct{ under[T] }

// Rollback forgets.
func (staysOpen[T]) Rollback(context.Context) error { return nil }

// errLost is what is left of an error without its code.
var errLost = errors.New("the connection was lost")

// KillUnseen plants: the error of a session that is gone loses its code on the way.
func KillUnseen[T any](s receipts.Store[T]) receipts.Store[T] {
	lost := func(err error) error {
		if err != nil && s.Classify(err) == receipts.ClassOutage {
			return errLost
		}
		return err
	}
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] {
		return losesCodes[T]{commitTx[T]{under: tx, commit: func(ctx context.Context) error { return lost(tx.Commit(ctx)) }}, lost}
	})
}

type losesCodes[T any] struct {
	commitTx[T]
	lost func(error) error
}

// Keep loses the code.
func (t losesCodes[T]) Keep(ctx context.Context) error { return t.lost(t.commitTx.Keep(ctx)) }

// OutputsReversed plants: the last output of a call is stored first.
func OutputsReversed[T any](s receipts.Store[T]) receipts.Store[T] {
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return reversesOutputs[T]{tx} })
}

type reversesOutputs[T any] struct{ under[T] }

// AddOutputs reverses.
func (t reversesOutputs[T]) AddOutputs(ctx context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	turned := slices.Clone(outputs)
	slices.Reverse(turned)
	return t.under.AddOutputs(ctx, turned)
}

// SentMarkSpreads plants: with one output all of its transaction are marked as sent.
func SentMarkSpreads[T any](s receipts.Store[T]) receipts.Store[T] { return marksAll[T]{s} }

type marksAll[T any] struct{ receipts.Store[T] }

// MarkSent marks neighbours, too.
func (s marksAll[T]) MarkSent(ctx context.Context, refs []receipts.OutputRef, at time.Time) error {
	all := slices.Clone(refs)
	for _, r := range refs {
		for p := range 16 {
			all = append(all, receipts.OutputRef{Nonce: r.Nonce, Position: p})
		}
	}
	return s.Store.MarkSent(ctx, all, at)
}

// LettersRepeated plants: a dead letter that is there already is stored again.
func LettersRepeated[T any](s receipts.Store[T]) receipts.Store[T] {
	var n atomic.Int64
	return wrapTx(s, func(tx receipts.Tx[T]) receipts.Tx[T] { return repeatsLetters[T]{tx, &n} })
}

type repeatsLetters[T any] struct {
	under[T]
	n *atomic.Int64
}

// Divert makes each letter another one.
func (t repeatsLetters[T]) Divert(ctx context.Context, letters []receipts.DeadLetter) error {
	letters = slices.Clone(letters)
	for i := range letters {
		letters[i].Fingerprint = fmt.Appendf(slices.Clone(letters[i].Fingerprint), "#%d", t.n.Add(1))
	}
	return t.under.Divert(ctx, letters)
}

// TornCountedAsDone plants: Stats does not look at markers.
func TornCountedAsDone[T any](s receipts.Store[T]) receipts.Store[T] { return countsTorn[T]{s} }

type countsTorn[T any] struct{ receipts.Store[T] }

// Stats counts torn receipts with the others.
func (s countsTorn[T]) Stats(ctx context.Context) (receipts.Stats, error) {
	stats, err := s.Store.Stats(ctx)
	stats.Done, stats.Torn = stats.Done+stats.Torn, 0
	return stats, err
}

// BudgetIgnored plants: a transaction may stay open for ever.
func BudgetIgnored[T any](s receipts.Store[T]) receipts.Store[T] {
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		opts.Budget = 0
		return s.Begin(ctx, opts)
	}}
}

// BeginContextRules plants: the end of Begin's context rolls the transaction back, as database/sql's BeginTx does.
func BeginContextRules[T any](s receipts.Store[T]) receipts.Store[T] {
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		tx, err := s.Begin(ctx, opts)
		if err == nil {
			context.AfterFunc(ctx, func() { _ = tx.Rollback(context.WithoutCancel(ctx)) })
		}
		return tx, err
	}}
}

// BeginWaits plants: Begin does not listen to its context while it waits.
func BeginWaits[T any](s receipts.Store[T]) receipts.Store[T] {
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		const patience = 10 * time.Second
		deaf, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		return s.Begin(deaf, opts)
	}}
}

// EverythingIsContention plants: every error is said to be somebody else's.
func EverythingIsContention[T any](s receipts.Store[T]) receipts.Store[T] { return blamesOthers[T]{s} }

type blamesOthers[T any] struct{ receipts.Store[T] }

// Classify blames others.
func (blamesOthers[T]) Classify(error) receipts.Class { return receipts.ClassContention }
