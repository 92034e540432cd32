package memstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// answer is what came of a call that may wait.
type answer struct {
	status receipts.ClaimStatus
	err    error
	at     time.Duration // since the bubble began
}

// waiting claims one key in a goroutine of its own.
func waiting(t *testing.T, ctx context.Context, tx receipts.Tx[*Tx], key string, began time.Time) <-chan answer { //nolint:revive // t first
	t.Helper()
	got := make(chan answer, 1)
	go func() {
		results, err := tx.Claim(ctx, claimsOf(key))
		a := answer{err: err, at: time.Since(began)}
		if err == nil {
			a.status = results[0].Status
		}
		got <- a
	}()
	return got
}

// A unique insert waits for the one that was first, and its answer depends on that one's end.
func TestClaimWaitsForAnotherOpenClaim(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(tx receipts.Tx[*Tx]) error
		want receipts.ClaimStatus
	}{
		"committed":              {func(tx receipts.Tx[*Tx]) error { return tx.Commit(context.Background()) }, held},
		"rolled back":            {func(tx receipts.Tx[*Tx]) error { return tx.Rollback(context.Background()) }, fresh},
		"committed by a handler": {func(tx receipts.Tx[*Tx]) error { return tx.Raw().Commit() }, torn},
		"given back, committed": {func(tx receipts.Tx[*Tx]) error {
			return errors.Join(tx.Unclaim(context.Background(), claimsOf("a")), tx.Commit(context.Background()))
		}, fresh},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := NewDatabase().Store()
				first, second := begin(t, s), begin(t, s)
				assert.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, first, "a"))
				assert.Equal(t, []receipts.ClaimStatus{fresh}, statuses(t, second, "b"), "another identity waits for nobody")
				got := waiting(t, t.Context(), second, "a", time.Now())
				time.Sleep(time.Hour)
				require.Empty(t, got, "it has waited for an hour")
				require.NoError(t, c.end(first))
				assert.Equal(t, answer{status: c.want, at: time.Hour}, <-got)
				rollback(t, first)
				commit(t, second)
			})
		})
	}
}

// Those who wait come in the order in which they began, each with the answer of its own moment.
func TestClaimsQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewDatabase().Store()
		first := begin(t, s)
		statuses(t, first, "a")
		const n = 5
		txs, got := make([]receipts.Tx[*Tx], n), make([]<-chan answer, n)
		for i := range n {
			txs[i] = begin(t, s)
			got[i] = waiting(t, t.Context(), txs[i], "a", time.Now())
			synctest.Wait()
		}
		rollback(t, first)
		for i := range n - 1 {
			assert.Equal(t, fresh, (<-got[i]).status)
			synctest.Wait()
			require.Empty(t, got[i+1], "the next one waits for number %d", i)
			if i < n-2 {
				rollback(t, txs[i])
			}
		}
		commit(t, txs[n-2])
		assert.Equal(t, held, (<-got[n-1]).status)
		commit(t, txs[n-1])
		assert.Empty(t, s.db.locks)
	})
}

func TestClaimGivesUp(t *testing.T) {
	for name, c := range map[string]struct {
		wait  time.Duration
		bound func(ctx context.Context) (context.Context, context.CancelFunc)
		also  error
		after time.Duration
	}{
		"ClaimWait is over": {
			100 * time.Millisecond, func(ctx context.Context) (context.Context, context.CancelFunc) { return ctx, func() {} },
			nil, 100 * time.Millisecond,
		},
		"its deadline passes": {
			0, func(ctx context.Context) (context.Context, context.CancelFunc) {
				return context.WithTimeout(ctx, time.Second)
			},
			context.DeadlineExceeded, time.Second,
		},
		"it is cancelled": {
			time.Minute, func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(ctx)
				time.AfterFunc(time.Second, cancel)
				return ctx, cancel
			},
			context.Canceled, time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := NewDatabase().Store()
				first := begin(t, s)
				statuses(t, first, "c")
				second := beginWith(t, s, receipts.TxOptions{ClaimWait: c.wait})
				ctx, cancel := c.bound(t.Context())
				defer cancel()
				began := time.Now()
				results, err := second.Claim(ctx, claimsOf("d", "c", "b"))
				assert.Nil(t, results)
				require.ErrorIs(t, err, ErrBusy)
				if c.also != nil {
					require.ErrorIs(t, err, c.also)
				}
				assert.Equal(t, receipts.ClassContention, s.Classify(err))
				assert.Equal(t, c.after, time.Since(began))

				// All or nothing: the earlier one, b, is free for others.
				third := begin(t, s)
				assert.Equal(t, []receipts.ClaimStatus{fresh, fresh}, statuses(t, third, "b", "d"))
				commit(t, third)
				require.ErrorIs(t, second.Part(t.Context()), ErrFailed)
				rollback(t, second)
				commit(t, first)
				assert.Equal(t, 3, stats(t, s).Done)
				assert.Empty(t, s.db.locks)
			})
		})
	}
}

// ClaimWait bounds the whole call, not each wait of it.
func TestClaimWaitIsForTheWholeCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewDatabase().Store()
		a, b := begin(t, s), begin(t, s)
		statuses(t, a, "a")
		statuses(t, b, "b")
		time.AfterFunc(70*time.Millisecond, func() { _ = a.Commit(context.Background()) })
		time.AfterFunc(140*time.Millisecond, func() { _ = b.Commit(context.Background()) })
		tx := beginWith(t, s, receipts.TxOptions{ClaimWait: 100 * time.Millisecond})
		began := time.Now()
		_, err := tx.Claim(t.Context(), claimsOf("b", "a"))
		require.ErrorIs(t, err, ErrBusy)
		assert.Equal(t, 100*time.Millisecond, time.Since(began))
		rollback(t, tx)
		time.Sleep(time.Second)
	})
}

func TestCounterIsARow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := NewDatabaseWith(Options{LockWait: time.Minute})
		s := db.Store()
		first, second := begin(t, s), begin(t, s)
		require.NoError(t, first.Raw().Add("n", 1))
		require.NoError(t, second.Raw().Add("m", 1), "another row")
		time.AfterFunc(time.Second, func() { _ = first.Commit(context.Background()) })
		began := time.Now()
		require.NoError(t, second.Raw().Add("n", 1))
		assert.Equal(t, time.Second, time.Since(began), "it waited")
		commit(t, second)
		assert.Equal(t, map[string]int64{"n": 2, "m": 1}, db.Counters())

		third, fourth := begin(t, s), begin(t, s)
		require.NoError(t, third.Raw().Add("n", 1))
		began = time.Now()
		err := fourth.Raw().Add("n", 1)
		require.ErrorIs(t, err, ErrBusy)
		assert.Equal(t, receipts.ClassContention, s.Classify(err))
		assert.Equal(t, time.Minute, time.Since(began))
		require.ErrorIs(t, fourth.Raw().Add("m", 1), ErrFailed)
		require.ErrorIs(t, fourth.Commit(t.Context()), receipts.ErrTxEnded, "an error swallowed must not lose the effect alone")
		rollback(t, third)
		assert.Empty(t, db.locks)
	})
}

// Two that wait for each other do not wait: the last one fails at once and the other goes on.
func TestDeadlockIsSeenAtOnce(t *testing.T) {
	touch := map[byte]func(tx receipts.Tx[*Tx], key string) error{
		'+': func(tx receipts.Tx[*Tx], key string) error { return tx.Raw().Add(key, 1) },
		'c': func(tx receipts.Tx[*Tx], key string) error {
			_, err := tx.Claim(context.Background(), claimsOf(key))
			return err
		},
		'd': func(tx receipts.Tx[*Tx], key string) error {
			return tx.Divert(context.Background(), []receipts.DeadLetter{{Scope: "s", Key: []byte(key)}})
		},
	}
	for _, rows := range []string{"+x +y", "cx cy", "+x cy", "dx +y", "+x +y +z", "cx +x dx"} {
		t.Run(rows, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := NewDatabase().Store()
				began := time.Now()
				all := strings.Fields(rows)
				txs := make([]receipts.Tx[*Tx], len(all))
				for i, r := range all {
					txs[i] = begin(t, s)
					require.NoError(t, touch[r[0]](txs[i], r[1:]))
				}
				ends := make(chan error, len(all)-1)
				for i := range len(all) - 1 { // each waits for the next one
					r := all[i+1]
					go func() {
						ends <- errors.Join(touch[r[0]](txs[i], r[1:]), txs[i].Commit(context.Background()))
					}()
					synctest.Wait()
				}
				last := txs[len(all)-1]
				require.ErrorIs(t, touch[all[0][0]](last, all[0][1:]), ErrBusy)
				rollback(t, last)
				for range len(all) - 1 {
					require.NoError(t, <-ends)
				}
				assert.Zero(t, time.Since(began), "nobody waited for a limit")
				assert.Empty(t, s.db.locks)
			})
		})
	}
}

// Waiting for one who waits for a third is no deadlock.
func TestChainIsNoDeadlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := NewDatabase()
		s := db.Store()
		a, b, c := begin(t, s), begin(t, s), begin(t, s)
		require.NoError(t, a.Raw().Add("x", 1))
		require.NoError(t, b.Raw().Add("y", 1))
		done := make(chan error, 2)
		go func() { done <- errors.Join(b.Raw().Add("x", 1), b.Commit(context.Background())) }()
		synctest.Wait()
		go func() { done <- errors.Join(c.Raw().Add("y", 1), c.Commit(context.Background())) }()
		synctest.Wait()
		require.Empty(t, done)
		commit(t, a)
		require.NoError(t, <-done)
		require.NoError(t, <-done)
		assert.Equal(t, map[string]int64{"x": 2, "y": 2}, db.Counters())
	})
}

// A failed part can be undone, and what it had locked is free at once.
func TestPartThatMetContentionCanBeUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := NewDatabaseWith(Options{LockWait: time.Second})
		s := db.Store()
		other := begin(t, s)
		require.NoError(t, other.Raw().Add("busy", 1))

		tx := begin(t, s)
		statuses(t, tx, "a", "b")
		require.NoError(t, tx.Part(t.Context()))
		require.NoError(t, tx.Raw().Add("mine", 1))
		require.NoError(t, tx.Keep(t.Context()))
		require.NoError(t, tx.Part(t.Context()))
		require.NoError(t, tx.Raw().Add("both", 1))
		require.ErrorIs(t, tx.Raw().Add("busy", 1), ErrBusy)
		require.NoError(t, other.Raw().Add("both", 1), "released already")
		require.ErrorIs(t, tx.Raw().Add("mine", 1), ErrFailed)
		require.ErrorIs(t, tx.Keep(t.Context()), receipts.ErrTxEnded)
		require.NoError(t, tx.Undo(t.Context()))
		require.NoError(t, tx.Unclaim(t.Context(), claimsOf("b")))
		commit(t, tx)
		commit(t, other)
		assert.Equal(t, map[string]int64{"mine": 1, "both": 1, "busy": 1}, db.Counters())
		assert.Equal(t, 1, stats(t, s).Done)
		assert.Empty(t, db.locks)
	})
}

// Outside a part a failure is the whole transaction's.
func TestFailureOutsideAPartCannotBeUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewDatabase().Store()
		other := begin(t, s)
		statuses(t, other, "a")
		tx := beginWith(t, s, receipts.TxOptions{ClaimWait: time.Millisecond})
		_, err := tx.Claim(t.Context(), claimsOf("a"))
		require.ErrorIs(t, err, ErrBusy)
		require.Error(t, tx.Undo(t.Context()))
		require.ErrorIs(t, tx.Raw().Commit(), ErrFailed, "and a handler cannot commit the rest")
		rollback(t, other)
	})
}

// The end of a part that is undone lets others have its rows; one that is kept does not.
func TestUndoReleasesAndKeepDoesNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := NewDatabase()
		s := db.Store()
		tx := begin(t, s)
		require.NoError(t, tx.Part(t.Context()))
		require.NoError(t, tx.Raw().Add("kept", 1))
		require.NoError(t, tx.Keep(t.Context()))
		require.NoError(t, tx.Part(t.Context()))
		require.NoError(t, tx.Raw().Add("kept", 1))
		require.NoError(t, tx.Raw().Add("undone", 1))
		other, third := begin(t, s), begin(t, s)
		got := make(chan string, 2)
		add := func(tx receipts.Tx[*Tx], name string) {
			assert.NoError(t, tx.Raw().Add(name, 1))
			got <- name
		}
		go add(other, "undone")
		go add(third, "kept")
		synctest.Wait()
		require.Empty(t, got)
		require.NoError(t, tx.Undo(t.Context()))
		assert.Equal(t, "undone", <-got)
		synctest.Wait()
		require.Empty(t, got)
		commit(t, tx)
		assert.Equal(t, "kept", <-got)
		commit(t, other)
		commit(t, third)
		assert.Equal(t, map[string]int64{"kept": 2, "undone": 1}, db.Counters())
	})
}

// Dead letters are unique while they are not committed yet, too.
func TestDivertWaitsForTheSameLetter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewDatabase().Store()
		letters := []receipts.DeadLetter{{Scope: "s", Key: []byte("a"), Kind: receipts.KindConflict}}
		first, second := begin(t, s), begin(t, s)
		require.NoError(t, first.Divert(t.Context(), letters))
		time.AfterFunc(time.Second, func() { _ = first.Commit(context.Background()) })
		began := time.Now()
		require.NoError(t, second.Divert(t.Context(), letters))
		assert.Equal(t, time.Second, time.Since(began))
		commit(t, second)
		found, err := s.DeadLetters(t.Context(), 10)
		require.NoError(t, err)
		assert.Len(t, found, 1)

		third := begin(t, s)
		require.NoError(t, third.Divert(t.Context(), letters), "one that is there locks nothing")
		fourth := begin(t, s)
		require.NoError(t, fourth.Divert(t.Context(), letters))
		commit(t, fourth)
		commit(t, third)
	})
}

// One duplicate that is held open elsewhere stops nobody else.
func TestNeighboursGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewDatabase().Store()
		first := begin(t, s)
		statuses(t, first, "007")
		began := time.Now()
		blocked := begin(t, s)
		got := waiting(t, t.Context(), blocked, "007", began)
		for i := range 256 {
			if i == 7 {
				continue
			}
			tx := begin(t, s)
			statuses(t, tx, fmt.Sprintf("%03d", i))
			commit(t, tx)
		}
		assert.Zero(t, time.Since(began))
		time.Sleep(5 * time.Second)
		commit(t, first)
		assert.Equal(t, answer{status: held, at: 5 * time.Second}, <-got)
		rollback(t, blocked)
	})
}
