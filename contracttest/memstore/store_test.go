package memstore

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// claimOf asks for an identity in scope s.
func claimOf(key string) receipts.Claim {
	return receipts.Claim{Scope: "s", Key: []byte(key), Fingerprint: []byte("of " + key), State: receipts.StateDone, At: time.Unix(1, 0)}
}

func claimsOf(keys ...string) []receipts.Claim {
	list := make([]receipts.Claim, len(keys))
	for i, k := range keys {
		list[i] = claimOf(k)
	}
	return list
}

func begin(t *testing.T, s *Store) receipts.Tx[*Tx] {
	t.Helper()
	return beginWith(t, s, receipts.TxOptions{})
}

func beginWith(t *testing.T, s *Store, opts receipts.TxOptions) receipts.Tx[*Tx] {
	t.Helper()
	tx, err := s.Begin(t.Context(), opts)
	require.NoError(t, err)
	return tx
}

// statuses are the answers to claims, in words.
func statuses(t *testing.T, tx receipts.Tx[*Tx], keys ...string) []receipts.ClaimStatus {
	t.Helper()
	results, err := tx.Claim(t.Context(), claimsOf(keys...))
	require.NoError(t, err)
	list := make([]receipts.ClaimStatus, len(results))
	for i, r := range results {
		list[i] = r.Status
		if r.Status != receipts.ClaimFresh {
			assert.Equal(t, "of "+keys[i], string(r.Receipt.Fingerprint), "the answers come in the order of the claims")
		}
	}
	return list
}

func commit(t *testing.T, tx receipts.Tx[*Tx]) {
	t.Helper()
	require.NoError(t, tx.Commit(t.Context()))
}

func rollback(t *testing.T, tx receipts.Tx[*Tx]) {
	t.Helper()
	require.NoError(t, tx.Rollback(t.Context()))
}

const (
	fresh = receipts.ClaimFresh
	held  = receipts.ClaimHeld
	torn  = receipts.ClaimTorn
)

func TestCheckSaysWhatItIs(t *testing.T) {
	for name, c := range map[string]struct {
		db   *Database
		want receipts.Info
	}{
		"usual":         {NewDatabase(), receipts.Info{Dialect: "memory", Lanes: 16, Parts: true, Schema: 1}},
		"one writer":    {NewDatabaseWith(Options{Serial: true}), receipts.Info{Dialect: "memory", Lanes: 1, Parts: true, Schema: 1}},
		"without parts": {NewDatabaseWith(Options{WithoutParts: true}), receipts.Info{Dialect: "memory", Lanes: 16, Schema: 1}},
	} {
		info, err := c.db.Store().Check(t.Context())
		require.NoError(t, err, name)
		assert.Equal(t, c.want, info, name)
		assert.NoError(t, c.db.Store().Migrate(t.Context()), name)
	}
}

func TestClaimsAreAnsweredInTheirOrder(t *testing.T) {
	s := NewDatabase().Store()
	one := begin(t, s)
	assert.Equal(t, []receipts.ClaimStatus{fresh, fresh}, statuses(t, one, "d", "b"))
	commit(t, one)
	two := begin(t, s)
	assert.Equal(t, []receipts.ClaimStatus{fresh, held, fresh, held}, statuses(t, two, "e", "d", "a", "b"))
	again, err := two.Claim(t.Context(), claimsOf("e"))
	require.NoError(t, err)
	assert.Equal(t, held, again[0].Status, "claimed earlier by the same transaction")
	assert.Equal(t, two.Nonce(), again[0].Receipt.Nonce)
	rollback(t, two)
	three := begin(t, s)
	assert.Equal(t, []receipts.ClaimStatus{fresh, fresh}, statuses(t, three, "a", "e"))
	rollback(t, three)
}

func TestWhatAClaimMustNotBe(t *testing.T) {
	s := NewDatabase().Store()
	tx := begin(t, s)
	long := make([]byte, receipts.MaxKey+1)
	for name, claims := range map[string][]receipts.Claim{
		"twice in one call": claimsOf("a", "b", "a"),
		"no key":            claimsOf(""),
		"a key too long":    claimsOf(string(long)),
		"a scope too long":  {{Scope: string(long), Key: []byte("a"), State: receipts.StateDone}},
		"no state":          {{Scope: "s", Key: []byte("a")}},
	} {
		_, err := tx.Claim(t.Context(), claims)
		require.Error(t, err, name)
		assert.Equal(t, receipts.ClassOther, s.Classify(err), name)
	}
	assert.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, tx, "a"), "nothing was claimed by them")
	rollback(t, tx)
}

// The identity is bytes: nothing is folded, and scope and key do not run into each other.
func TestIdentitiesAreBytes(t *testing.T) {
	tx := begin(t, NewDatabase().Store())
	for _, c := range []struct{ scope, key string }{{"s", "a"}, {"s", "A"}, {"s", "a "}, {"s", "a\x00"}, {"sa", "b"}, {"s", "ab"}} {
		claim := claimOf(c.key)
		claim.Scope = c.scope
		results, err := tx.Claim(t.Context(), []receipts.Claim{claim})
		require.NoError(t, err)
		assert.Equal(t, fresh, results[0].Status, "%q", c)
	}
	rollback(t, tx)
}

func TestUnclaimLeavesTheMessageWithoutReceipt(t *testing.T) {
	s := NewDatabase().Store()
	earlier := begin(t, s)
	statuses(t, earlier, "theirs")
	commit(t, earlier)

	tx := begin(t, s)
	assert.Equal(t, []receipts.ClaimStatus{fresh, held, fresh}, statuses(t, tx, "a", "theirs", "b"))
	require.NoError(t, tx.Unclaim(t.Context(), claimsOf("a", "theirs", "unknown")))
	assert.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, tx, "a"), "it can be claimed again")
	require.NoError(t, tx.Unclaim(t.Context(), claimsOf("a")))
	commit(t, tx)

	after := begin(t, s)
	assert.Equal(t, []receipts.ClaimStatus{fresh, held, held}, statuses(t, after, "a", "b", "theirs"))
	rollback(t, after)
}

// A marker is written where a fresh claim is left, and only there.
func TestMarkerNeedsAFreshClaim(t *testing.T) {
	s := NewDatabase().Store()
	for name, c := range map[string]struct {
		do   func(tx receipts.Tx[*Tx]) error
		want bool
	}{
		"nothing":            {func(receipts.Tx[*Tx]) error { return nil }, false},
		"an effect":          {func(tx receipts.Tx[*Tx]) error { return tx.Raw().Add("n", 1) }, false},
		"a claim":            {func(tx receipts.Tx[*Tx]) error { _, err := tx.Claim(t.Context(), claimsOf("m1")); return err }, true},
		"a claim given back": {claimAndUnclaim(t), false},
	} {
		tx := begin(t, s)
		require.NoError(t, c.do(tx), name)
		commit(t, tx)
		got, err := s.Resolve(t.Context(), tx.Nonce())
		require.NoError(t, err, name)
		assert.Equal(t, c.want, got, name)
	}
}

func claimAndUnclaim(t *testing.T) func(tx receipts.Tx[*Tx]) error {
	return func(tx receipts.Tx[*Tx]) error {
		_, err := tx.Claim(t.Context(), claimsOf("m2"))
		return errors.Join(err, tx.Unclaim(t.Context(), claimsOf("m2")))
	}
}

func TestNothingIsSeenBeforeCommit(t *testing.T) {
	db := NewDatabase()
	s := db.Store()
	tx := begin(t, s)
	statuses(t, tx, "a")
	require.NoError(t, tx.Raw().Add("n", 2))
	require.NoError(t, tx.Raw().Add("n", 3))
	_, err := tx.AddOutputs(t.Context(), []receipts.Output{{Scope: "s", Key: []byte("a")}})
	require.NoError(t, err)
	require.NoError(t, tx.Divert(t.Context(), []receipts.DeadLetter{{Kind: receipts.KindRefused}}))
	empty := receipts.Stats{DeadLetters: map[receipts.DeadLetterKind]int{}}
	assert.Equal(t, empty, stats(t, s))
	assert.Empty(t, db.Counters())

	rollback(t, tx)
	assert.Equal(t, empty, stats(t, s))
	again := begin(t, s)
	require.NoError(t, again.Raw().Add("n", 1))
	statuses(t, again, "a")
	commit(t, again)
	rollback(t, again) // does nothing
	assert.Equal(t, map[string]int64{"n": 1}, db.Counters())
	assert.Equal(t, 1, stats(t, s).Done)
}

func stats(t *testing.T, s *Store) receipts.Stats {
	t.Helper()
	found, err := s.Stats(t.Context())
	require.NoError(t, err)
	return found
}

func TestPartsAreKeptOrUndoneAlone(t *testing.T) {
	db := NewDatabase()
	s := db.Store()
	tx := begin(t, s)
	statuses(t, tx, "a", "b", "c")
	part := func(key string, keep bool) {
		require.NoError(t, tx.Part(t.Context()))
		require.NoError(t, tx.Raw().Add(key, 1))
		require.NoError(t, tx.Raw().Add("all", 1))
		stored, err := tx.AddOutputs(t.Context(), []receipts.Output{{Scope: "s", Key: []byte(key), UUID: key}})
		require.NoError(t, err)
		assert.Equal(t, tx.Nonce(), stored[0].Nonce)
		require.NoError(t, tx.Divert(t.Context(), []receipts.DeadLetter{{Scope: "s", Key: []byte(key), Kind: receipts.KindTorn}}))
		if keep {
			require.NoError(t, tx.Keep(t.Context()))
			return
		}
		require.NoError(t, tx.Undo(t.Context()))
		require.NoError(t, tx.Unclaim(t.Context(), claimsOf(key)))
	}
	part("a", true)
	part("b", false)
	part("c", true)
	commit(t, tx)

	assert.Equal(t, map[string]int64{"a": 1, "c": 1, "all": 2}, db.Counters())
	got := stats(t, s)
	assert.Equal(t, 2, got.Done)
	assert.Equal(t, 2, got.DeadLetters[receipts.KindTorn])
	outputs, err := s.Unsent(t.Context(), receipts.UnsentQuery{Limit: 10})
	require.NoError(t, err)
	require.Len(t, outputs, 2)
	assert.Equal(t, "a c", outputs[0].UUID+" "+outputs[1].UUID)
	assert.NotEqual(t, outputs[0].OutputRef, outputs[1].OutputRef)
	after := begin(t, s)
	assert.Equal(t, []receipts.ClaimStatus{held, fresh, held}, statuses(t, after, "a", "b", "c"))
	rollback(t, after)
}

func TestPartsMisused(t *testing.T) {
	ctx := t.Context()
	tx := begin(t, NewDatabase().Store())
	require.ErrorContains(t, tx.Keep(ctx), "no part")
	require.ErrorContains(t, tx.Undo(ctx), "no part")
	require.NoError(t, tx.Part(ctx))
	require.ErrorContains(t, tx.Part(ctx), "inside a part")
	_, err := tx.Claim(ctx, claimsOf("a"))
	require.ErrorContains(t, err, "inside a part")
	require.ErrorContains(t, tx.Unclaim(ctx, claimsOf("a")), "inside a part")
	rollback(t, tx)

	without := begin(t, NewDatabaseWith(Options{WithoutParts: true}).Store())
	for _, f := range []func(context.Context) error{without.Part, without.Keep, without.Undo} {
		require.ErrorIs(t, f(ctx), ErrNoParts)
	}
	statuses(t, without, "a")
	commit(t, without) // none of them has done any harm
}

func TestDeadLettersAreUnique(t *testing.T) {
	s := NewDatabase().Store()
	letter := func(scope, key, fingerprint string) receipts.DeadLetter {
		return receipts.DeadLetter{Scope: scope, Key: []byte(key), Fingerprint: []byte(fingerprint), Kind: receipts.KindConflict}
	}
	tx := begin(t, s)
	require.NoError(t, tx.Divert(t.Context(), []receipts.DeadLetter{letter("s", "k", "f"), letter("s", "k", "f"), letter("s", "k", "g")}))
	require.NoError(t, tx.Part(t.Context()))
	require.NoError(t, tx.Divert(t.Context(), []receipts.DeadLetter{letter("s", "k", "f"), letter("s", "l", "f"), letter("s", "l", "f")}))
	require.NoError(t, tx.Keep(t.Context()))
	commit(t, tx)
	tx = begin(t, s)
	require.NoError(t, tx.Divert(t.Context(), []receipts.DeadLetter{letter("s", "l", "f"), letter("sl", "", "f")}))
	commit(t, tx)
	letters, err := s.DeadLetters(t.Context(), 10)
	require.NoError(t, err)
	assert.Equal(t, []receipts.DeadLetter{letter("s", "k", "f"), letter("s", "k", "g"), letter("s", "l", "f"), letter("sl", "", "f")}, letters)
	letters, err = s.DeadLetters(t.Context(), 2)
	require.NoError(t, err)
	assert.Len(t, letters, 2)
}

func TestOutputsAreListedAndMarked(t *testing.T) {
	s := NewDatabase().Store()
	store := func(claim bool, outputs ...receipts.Output) []receipts.Output {
		tx := begin(t, s)
		if claim {
			statuses(t, tx, string(outputs[0].Key))
		}
		stored, err := tx.AddOutputs(t.Context(), outputs[:1])
		require.NoError(t, err)
		more, err := tx.AddOutputs(t.Context(), outputs[1:])
		require.NoError(t, err)
		commit(t, tx)
		return append(stored, more...)
	}
	out := func(scope, key string, second int64, router bool) receipts.Output {
		return receipts.Output{Scope: scope, Key: []byte(key), At: time.Unix(second, 0), ViaRouter: router}
	}
	first := store(true, out("s", "a", 1, false), out("s", "a", 2, false))
	second := store(false, out("t", "a", 3, false), out("t", "b", 4, true)) // at-least-once has no receipt
	assert.Equal(t, receipts.OutputRef{Nonce: first[0].Nonce, Position: 1}, first[1].OutputRef)

	list := func(q receipts.UnsentQuery) []receipts.Output {
		found, err := s.Unsent(t.Context(), q)
		require.NoError(t, err)
		return found
	}
	assert.Equal(t, []receipts.Output{first[0], first[1], second[0]}, list(receipts.UnsentQuery{Limit: 10}))
	assert.Equal(t, first[:1], list(receipts.UnsentQuery{Limit: 1}))
	assert.Equal(t, first[:1], list(receipts.UnsentQuery{Limit: 10, Before: time.Unix(2, 0)}))
	assert.Equal(t, second[:1], list(receipts.UnsentQuery{Limit: 10, Prefix: "t"}))
	assert.Equal(t, first, list(receipts.UnsentQuery{Limit: 10, Scope: "s", Key: []byte("a")}))
	assert.Empty(t, list(receipts.UnsentQuery{Limit: 10, Scope: "s", Key: []byte("b")}))

	refs := []receipts.OutputRef{first[0].OutputRef, second[0].OutputRef, {Position: 7}}
	for range 2 {
		require.NoError(t, s.MarkSent(t.Context(), refs, time.Now()))
	}
	assert.Equal(t, first[1:], list(receipts.UnsentQuery{Limit: 10}))
	all, err := s.Outputs(t.Context(), "s", []byte("a"))
	require.NoError(t, err)
	require.Len(t, all, 2)
	assert.True(t, all[0].Sent)
	got := stats(t, s)
	assert.Equal(t, 4, got.Outputs)
	assert.Equal(t, 1, got.Unsent)
	assert.Equal(t, time.Unix(2, 0), got.OldestUnsent)
}

// A handler that ends its transaction leaves receipts that prove nothing.
func TestHandlerThatCommitsTears(t *testing.T) {
	db := NewDatabase()
	s := db.Store()
	tx := begin(t, s)
	statuses(t, tx, "a", "b")
	require.NoError(t, tx.Part(t.Context()))
	require.NoError(t, tx.Raw().Add("a", 1))
	_, err := tx.AddOutputs(t.Context(), []receipts.Output{{Scope: "s", Key: []byte("a")}})
	require.NoError(t, err)
	require.NoError(t, tx.Keep(t.Context()))
	require.NoError(t, tx.Part(t.Context()))
	require.NoError(t, tx.Raw().Add("b", 1))
	require.NoError(t, tx.Raw().Commit())

	require.ErrorIs(t, tx.Raw().Add("b", 1), ErrEnded)
	require.ErrorIs(t, tx.Raw().Commit(), ErrEnded)
	require.ErrorIs(t, tx.Raw().Rollback(), ErrEnded)
	require.ErrorIs(t, tx.Keep(t.Context()), receipts.ErrTxEnded)
	require.ErrorIs(t, tx.Undo(t.Context()), receipts.ErrTxEnded)
	require.ErrorIs(t, tx.Commit(t.Context()), receipts.ErrTxEnded)
	rollback(t, tx)
	assert.Equal(t, map[string]int64{"a": 1, "b": 1}, db.Counters())
	got := stats(t, s)
	assert.Equal(t, 2, got.Torn)
	assert.Zero(t, got.Unsent, "the relay leaves a torn receipt's outputs alone")
	after := begin(t, s)
	assert.Equal(t, []receipts.ClaimStatus{torn, torn}, statuses(t, after, "b", "a"))
	rollback(t, after)
}

func TestHandlerThatRollsBackLeavesNothing(t *testing.T) {
	db := NewDatabase()
	tx := begin(t, db.Store())
	statuses(t, tx, "a")
	require.NoError(t, tx.Raw().Add("a", 1))
	require.NoError(t, tx.Raw().Rollback())
	_, err := tx.Claim(t.Context(), claimsOf("b"))
	require.ErrorIs(t, err, receipts.ErrTxEnded)
	require.ErrorIs(t, tx.Commit(t.Context()), receipts.ErrTxEnded)
	assert.Empty(t, db.Counters())
	assert.Zero(t, stats(t, db.Store()).Torn)
}

func TestFaultsFire(t *testing.T) {
	db := NewDatabase()
	s, other := db.Store(), db.Store()
	ctx := t.Context()

	end, fired := s.Away()
	_, err := s.Begin(ctx, receipts.TxOptions{})
	require.ErrorIs(t, err, ErrAway)
	assert.Equal(t, receipts.ClassOutage, s.Classify(fmt.Errorf("wrapped: %w", err)))
	_, err = s.Unsent(ctx, receipts.UnsentQuery{Limit: 1})
	require.ErrorIs(t, err, ErrAway)
	require.ErrorIs(t, s.MarkSent(ctx, nil, time.Now()), ErrAway)
	assert.Equal(t, 3, fired())
	rollback(t, begin(t, other)) // another handle is not away
	end()

	open := begin(t, s)
	statuses(t, open, "a")
	end, _ = s.Away()
	require.ErrorIs(t, open.Raw().Add("a", 1), ErrAway)
	end()
	require.ErrorIs(t, open.Raw().Add("a", 1), ErrFailed, "its connection is gone")
	require.ErrorIs(t, open.Commit(ctx), receipts.ErrTxEnded)

	end, fired = s.Full()
	full := begin(t, s)
	statuses(t, full, "a")
	require.ErrorIs(t, full.Commit(ctx), ErrAway)
	assert.Equal(t, 1, fired())
	end()

	for _, forwarded := range []bool{true, false} {
		lost := s.LoseCommit(forwarded)
		tx := begin(t, s)
		assert.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, tx, fmt.Sprint(forwarded)))
		assert.Zero(t, lost())
		require.ErrorIs(t, tx.Commit(ctx), receipts.ErrCommitUnknown)
		assert.Equal(t, 1, lost())
		committed, err := s.Resolve(ctx, tx.Nonce())
		require.NoError(t, err)
		assert.Equal(t, forwarded, committed)
	}
	assert.Equal(t, 1, stats(t, s).Done)
}

func TestContextThatIsOver(t *testing.T) {
	s := NewDatabase().Store()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Begin(over, receipts.TxOptions{})
	require.ErrorIs(t, err, context.Canceled)
	tx := begin(t, s)
	_, err = tx.Claim(over, claimsOf("a"))
	require.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, receipts.ClassOther, s.Classify(err), "nobody was in the way")
	assert.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, tx, "a"), "and the transaction goes on")
	require.NoError(t, tx.Commit(over), "COMMIT is not torn by a deadline")
}

// What a transaction costs does not grow with what is committed.
func TestCostOfATransactionDoesNotGrow(t *testing.T) {
	db := NewDatabase()
	s := db.Store()
	n := 0
	one := func() {
		n++
		tx := begin(t, s)
		statuses(t, tx, fmt.Sprintf("%07d", n))
		if err := tx.Raw().Add("n", 1); err != nil {
			t.Error(err)
		}
		commit(t, tx)
	}
	few := testing.AllocsPerRun(100, one)
	for range 20_000 {
		one()
	}
	assert.InDelta(t, few, testing.AllocsPerRun(100, one), 10)
}
