package contracttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// The times that clauses for stores work with.
const (
	// shortWait is a ClaimWait, and a deadline for calls that have to wait for somebody.
	shortWait = 100 * time.Millisecond
	// shortBudget is a Budget that ends while a handler is busy.
	shortBudget = 300 * time.Millisecond
)

// at is a time that every database keeps exactly, n seconds after the first one.
func at(n int) time.Time {
	return time.Date(2026, 3, 1, 12, 0, n, 123456000, time.UTC)
}

// printOf is the fingerprint of a name.
func printOf(name string) []byte { return []byte("print of " + name) }

// claim is that of one name in the clause's scope.
func (e *storeEnv[T]) claim(name string) receipts.Claim {
	return receipts.Claim{Scope: e.scope, Key: []byte(name), Fingerprint: printOf(name), State: receipts.StateDone, At: at(0)}
}

func (e *storeEnv[T]) claims(names ...string) []receipts.Claim {
	claims := make([]receipts.Claim, len(names))
	for i, name := range names {
		claims[i] = e.claim(name)
	}
	return claims
}

// numbered gives n names.
func numbered(prefix string, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = prefix + strconv.Itoa(i)
	}
	return names
}

// begin begins a transaction, which is rolled back with the clause where it is still open then.
func (e *storeEnv[T]) begin(ctx context.Context, s receipts.Store[T], opts receipts.TxOptions) (receipts.Tx[T], error) {
	tx, err := s.Begin(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("Begin: %w", err)
	}
	e.atEnd(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), e.h.Patience)
		defer cancel()
		_ = tx.Rollback(ctx)
		return nil
	})
	return tx, nil
}

// beginClaimed begins a transaction and claims names that have to be fresh.
func (e *storeEnv[T]) beginClaimed(
	ctx context.Context, s receipts.Store[T], opts receipts.TxOptions, names ...string,
) (receipts.Tx[T], error) {
	tx, err := e.begin(ctx, s, opts)
	if err != nil {
		return nil, err
	}
	return tx, e.claimFresh(ctx, tx, names...)
}

// claimFresh claims names that have to be fresh.
func (e *storeEnv[T]) claimFresh(ctx context.Context, tx receipts.Tx[T], names ...string) error {
	results, err := tx.Claim(ctx, e.claims(names...))
	if err != nil {
		return fmt.Errorf("Claim of %q: %w", brief(names), err)
	}
	return answers(names, results, receipts.ClaimFresh)
}

// brief keeps messages short.
func brief(names []string) []string { return names[:min(3, len(names))] }

// answers compares answers to claims with one status.
func answers(names []string, results []receipts.ClaimResult, want receipts.ClaimStatus) error {
	if len(results) != len(names) {
		return fmt.Errorf("Claim gave %d answers to %d claims", len(results), len(names))
	}
	for i, r := range results {
		if r.Status != want {
			return fmt.Errorf("the claim of %q is %s, want %s", names[i], status(r.Status), status(want))
		}
	}
	return nil
}

// status names a claim's status for people.
func status(s receipts.ClaimStatus) string {
	switch s {
	case receipts.ClaimFresh:
		return "fresh"
	case receipts.ClaimHeld:
		return "held"
	case receipts.ClaimTorn:
		return "torn"
	default:
		return fmt.Sprintf("ClaimStatus(%d)", s)
	}
}

// commits runs one transaction: claims, which have to be fresh, then what write does, then Commit.
func (e *storeEnv[T]) commits(
	ctx context.Context, s receipts.Store[T], names []string, write func(tx receipts.Tx[T]) error,
) (receipts.Nonce, error) {
	tx, err := e.begin(ctx, s, receipts.TxOptions{})
	if err != nil {
		return receipts.Nonce{}, err
	}
	if len(names) > 0 {
		if err := e.claimFresh(ctx, tx, names...); err != nil {
			return tx.Nonce(), err
		}
	}
	if write != nil {
		if err := write(tx); err != nil {
			return tx.Nonce(), err
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return tx.Nonce(), fmt.Errorf("Commit: %w", err)
	}
	return tx.Nonce(), nil
}

// ask claims in a transaction of its own, through the other handle, and rolls it back: what another process would see. Where
// a row is still locked it asks again.
func (e *storeEnv[T]) ask(ctx context.Context, names ...string) (results []receipts.ClaimResult, err error) {
	err = e.eventually(ctx, func() error {
		begin, cancel := context.WithTimeout(ctx, e.h.Patience/2)
		defer cancel()
		tx, err := e.b.Begin(begin, receipts.TxOptions{ClaimWait: shortWait})
		if err != nil {
			return fmt.Errorf("Begin: %w", err)
		}
		results, err = tx.Claim(ctx, e.claims(names...))
		if err := errors.Join(err, tx.Rollback(ctx)); err != nil {
			return fmt.Errorf("asking for %q: %w", brief(names), err)
		}
		return nil
	})
	return results, err
}

// wants asks for names and compares the answers with one status.
func (e *storeEnv[T]) wants(ctx context.Context, want receipts.ClaimStatus, names ...string) error {
	results, err := e.ask(ctx, names...)
	if err != nil {
		return err
	}
	return answers(names, results, want)
}

// proof is a set of names, by what another process sees of their receipts.
func (e *storeEnv[T]) provenHeld(ctx context.Context, nonce receipts.Nonce, names ...string) error {
	results, err := e.ask(ctx, names...)
	if err != nil {
		return err
	}
	if err := answers(names, results, receipts.ClaimHeld); err != nil {
		return err
	}
	for i, r := range results {
		if err := sameReceipt(r.Receipt, e.claim(names[i]), nonce); err != nil {
			return fmt.Errorf("the receipt of %q: %w", names[i], err)
		}
	}
	return nil
}

// sameReceipt compares a receipt with the claim that made it.
func sameReceipt(got receipts.Receipt, c receipts.Claim, nonce receipts.Nonce) error {
	switch {
	case !bytes.Equal(got.Fingerprint, c.Fingerprint):
		return fmt.Errorf("fingerprint %q, want %q", got.Fingerprint, c.Fingerprint)
	case got.Nonce != nonce:
		return fmt.Errorf("nonce %s, want %s", got.Nonce, nonce)
	case got.State != c.State:
		return fmt.Errorf("state %d, want %d", got.State, c.State)
	case !got.At.Equal(c.At):
		return fmt.Errorf("time %s, want %s", got.At, c.At)
	}
	return nil
}

// apply adds to a counter, the effect.
func (e *storeEnv[T]) apply(ctx context.Context, tx receipts.Tx[T], counter string, by int64) error {
	if err := e.s.Apply(ctx, tx.Raw(), counter, by); err != nil {
		return fmt.Errorf("the hook Apply: %w", err)
	}
	return nil
}

// effects compares the committed counters with those wanted; counters that stand at 0 do not count.
func (e *storeEnv[T]) effects(ctx context.Context, want map[string]int64) error {
	got, err := e.look.Effects(ctx)
	if err != nil {
		return fmt.Errorf("the hook Effects: %w", err)
	}
	maps.DeleteFunc(got, func(_ string, n int64) bool { return n == 0 })
	if want == nil {
		want = map[string]int64{}
	}
	if !maps.Equal(got, want) {
		return fmt.Errorf("the committed effects are %v, want %v", got, want)
	}
	return nil
}

// stats compares what the tables hold with what is wanted.
func (e *storeEnv[T]) stats(ctx context.Context, want receipts.Stats) error {
	return statsOf(ctx, e.look.Store, want)
}

// statsOf is stats through any handle.
func statsOf[T any](ctx context.Context, s receipts.Store[T], want receipts.Stats) error {
	got, err := s.Stats(ctx)
	if err != nil {
		return fmt.Errorf("Stats: %w", err)
	}
	maps.DeleteFunc(got.DeadLetters, func(_ receipts.DeadLetterKind, n int) bool { return n == 0 })
	same := got.Done == want.Done && got.Diverted == want.Diverted && got.Torn == want.Torn && got.Unsent == want.Unsent &&
		got.Outputs == want.Outputs && got.Parked == want.Parked && got.OldestUnsent.Equal(want.OldestUnsent) &&
		maps.Equal(got.DeadLetters, want.DeadLetters)
	if !same {
		return fmt.Errorf("Stats are %+v, want %+v", got, want)
	}
	return nil
}

// untouched wants the database as it is before anything was done.
func (e *storeEnv[T]) untouched(ctx context.Context) error {
	return errors.Join(e.effects(ctx, nil), e.stats(ctx, receipts.Stats{}))
}

// isClass wants an error of that class.
func isClass[T any](s receipts.Store[T], what string, err error, want receipts.Class) error {
	if err == nil {
		return fmt.Errorf("%s gave no error", what)
	}
	if got := s.Classify(err); got != want {
		return fmt.Errorf("%s: Classify says %d, want %d, of: %w", what, got, want, err)
	}
	return nil
}

// isError wants an error that errors.Is finds to be want.
func isError(what string, err, want error) error {
	if !errors.Is(err, want) {
		return fmt.Errorf("%s gave %v, want %q", what, err, want) //nolint:errorlint // it is not that one
	}
	return nil
}

// during runs f beside the clause while hold runs, and gives f's error. It fails where f returned before hold let go: hold
// calls its argument just before it does so.
func during(hold func(letGo func()) error, f func() error) error {
	var free atomic.Bool
	done := make(chan error, 1)
	go func() {
		err := f()
		if err == nil && !free.Load() {
			err = errors.New("it was answered while another open transaction had to be waited for")
		}
		done <- err
	}()
	err := hold(func() { free.Store(true) })
	free.Store(true)
	return errors.Join(err, <-done)
}

// sortedCopy gives the names in byte order.
func sortedCopy(names []string) []string { return slices.Sorted(slices.Values(names)) }
