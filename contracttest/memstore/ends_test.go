package memstore

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// The end of the budget frees everything although the handler still believes in its transaction.
func TestBudgetEnds(t *testing.T) {
	for _, opts := range []Options{{}, {Serial: true}} {
		synctest.Test(t, func(t *testing.T) {
			db := NewDatabaseWith(opts)
			s := db.Store()
			tx := beginWith(t, s, receipts.TxOptions{Budget: time.Second})
			statuses(t, tx, "a")
			require.NoError(t, tx.Raw().Add("n", 1))
			began := time.Now()
			other := make(chan answer, 1)
			go func() {
				next, err := s.Begin(context.Background(), receipts.TxOptions{})
				if err != nil {
					other <- answer{err: err}
					return
				}
				results, err := next.Claim(context.Background(), claimsOf("a"))
				err = errors.Join(err, next.Raw().Add("n", 1), next.Commit(context.Background()))
				other <- answer{status: results[0].Status, err: err, at: time.Since(began)}
			}()
			assert.Equal(t, answer{status: fresh, at: time.Second}, <-other)
			require.ErrorIs(t, tx.Raw().Add("n", 1), ErrEnded)
			require.ErrorIs(t, tx.Keep(t.Context()), receipts.ErrBudgetEnded)
			require.ErrorIs(t, tx.Commit(t.Context()), receipts.ErrBudgetEnded)
			rollback(t, tx)
			assert.Equal(t, map[string]int64{"n": 1}, db.Counters())
			assert.Equal(t, 1, stats(t, s).Done)

			inTime := beginWith(t, s, receipts.TxOptions{Budget: time.Second})
			statuses(t, inTime, "b")
			commit(t, inTime)
			time.Sleep(time.Minute)
			assert.Equal(t, 2, stats(t, s).Done)
		})
	}
}

// A statement that waits returns when its own transaction is ended, by whomever.
func TestEndWakesItsOwnStatements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewDatabase().Store()
		first := begin(t, s)
		statuses(t, first, "a")
		require.NoError(t, first.Raw().Add("n", 1))
		second := beginWith(t, s, receipts.TxOptions{Budget: time.Second})
		began := time.Now()
		added := make(chan error, 2)
		for range 2 { // handlers may write from several goroutines
			go func() { added <- second.Raw().Add("n", 1) }()
		}
		got := waiting(t, t.Context(), second, "a", began)
		assert.ErrorIs(t, <-added, ErrEnded)
		assert.ErrorIs(t, <-added, ErrEnded)
		a := <-got
		require.ErrorIs(t, a.err, receipts.ErrBudgetEnded)
		assert.Equal(t, time.Second, a.at)
		commit(t, first)
		assert.Empty(t, s.db.locks)
	})
}

// Several goroutines of one transaction get the row together.
func TestOneTransactionWaitsTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := NewDatabase()
		s := db.Store()
		first, second := begin(t, s), begin(t, s)
		require.NoError(t, first.Raw().Add("n", 1))
		added := make(chan error, 2)
		for range 2 {
			go func() { added <- second.Raw().Add("n", 1) }()
		}
		synctest.Wait()
		commit(t, first)
		require.NoError(t, errors.Join(<-added, <-added))
		commit(t, second)
		assert.Equal(t, map[string]int64{"n": 3}, db.Counters())
	})
}

// With one writer they take turns, in order, and a wait that is over is contention.
func TestSerialTakesTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := NewDatabaseWith(Options{Serial: true})
		s := db.Store()
		first := begin(t, s)
		var order []int
		done := make(chan error, 3)
		for i := range 3 {
			go func() {
				tx, err := s.Begin(context.Background(), receipts.TxOptions{})
				if err == nil {
					order = append(order, i) // one writer at a time
					err = errors.Join(tx.Raw().Add("n", 1), tx.Commit(context.Background()))
				}
				done <- err
			}()
			synctest.Wait()
		}
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := s.Begin(short, receipts.TxOptions{})
		require.ErrorIs(t, err, ErrBusy)
		assert.Equal(t, receipts.ClassContention, s.Classify(err))
		require.ErrorIs(t, s.MarkSent(short, nil, time.Now()), context.DeadlineExceeded)
		cancelled, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		_, err = s.Begin(cancelled, receipts.TxOptions{})
		require.ErrorIs(t, err, context.Canceled)
		assert.Equal(t, receipts.ClassOther, s.Classify(err))
		assert.Empty(t, order)
		commit(t, first)
		for range 3 {
			require.NoError(t, <-done)
		}
		assert.Equal(t, []int{0, 1, 2}, order)
		require.NoError(t, s.MarkSent(t.Context(), nil, time.Now()))
		assert.Empty(t, db.locks)
	})
}

// What one goroutine of a handler ran into is the end of what the others still wait for.
func TestFailureIsForAllGoroutines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := NewDatabaseWith(Options{LockWait: time.Second})
		s := db.Store()
		first, second := begin(t, s), begin(t, s)
		require.NoError(t, first.Raw().Add("n", 1))
		require.NoError(t, first.Raw().Add("m", 1))
		added := make(chan error, 2)
		go func() { added <- second.Raw().Add("n", 1) }()
		time.Sleep(time.Second / 2)
		go func() { added <- second.Raw().Add("m", 1) }()
		require.ErrorIs(t, <-added, ErrBusy)
		commit(t, first)
		require.ErrorIs(t, <-added, ErrFailed)
		require.ErrorIs(t, second.Commit(t.Context()), receipts.ErrTxEnded)
		assert.Equal(t, map[string]int64{"n": 1, "m": 1}, db.Counters())
		assert.Empty(t, db.locks)
	})
}

func TestCommitInsideAPartIsRefused(t *testing.T) {
	s := NewDatabase().Store()
	tx := begin(t, s)
	require.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, tx, "k"))
	require.NoError(t, tx.Part(t.Context()))
	require.NoError(t, tx.Raw().Add("n", 1))
	require.Error(t, tx.Commit(t.Context()))
	assert.Empty(t, s.db.Counters())
	assert.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, begin(t, s), "k"), "nothing is locked any more")
}

func TestKilledSessionIsAnOutage(t *testing.T) {
	s := NewDatabase().Store()
	tx := begin(t, s)
	require.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, tx, "k"))
	tx.Raw().Kill()
	for what, err := range map[string]error{
		"a statement": tx.Raw().Add("n", 1), "Part": tx.Part(t.Context()), "Commit": tx.Commit(t.Context()),
	} {
		assert.Equal(t, receipts.ClassOutage, s.Classify(err), what)
	}
	require.NoError(t, tx.Rollback(t.Context()))
	assert.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, begin(t, s), "k"), "nothing is locked any more")
}
