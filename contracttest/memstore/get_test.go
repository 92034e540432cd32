package memstore

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// get reads a counter that nobody else holds.
func get(t *testing.T, tx receipts.Tx[*Tx], counter string) int64 {
	t.Helper()
	n, err := tx.Raw().Get(counter)
	require.NoError(t, err)
	return n
}

func TestGetSeesWhatIsCommittedAndItsOwn(t *testing.T) {
	s := NewDatabase().Store()
	first := begin(t, s)
	assert.Zero(t, get(t, first, "n"), "there is none")
	require.NoError(t, first.Raw().Add("n", 1))
	assert.EqualValues(t, 1, get(t, first, "n"))
	require.NoError(t, first.Part(t.Context()))
	require.NoError(t, first.Raw().Add("n", 10))
	assert.EqualValues(t, 11, get(t, first, "n"), "inside its part")
	require.NoError(t, first.Undo(t.Context()))
	assert.EqualValues(t, 1, get(t, first, "n"), "the part is undone")
	commit(t, first)
	_, err := first.Raw().Get("n")
	require.ErrorIs(t, err, ErrEnded)
	second := begin(t, s)
	assert.EqualValues(t, 1, get(t, second, "n"))
	rollback(t, second)
}

// What was read stays true: the next reader waits until the transaction is over, and then sees what it wrote.
func TestGetLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := NewDatabaseWith(Options{LockWait: time.Second})
		s := db.Store()
		first, second, third := begin(t, s), begin(t, s), begin(t, s)
		assert.Zero(t, get(t, first, "n"))
		read := make(chan int64, 1)
		go func() {
			n, err := second.Raw().Get("n")
			assert.NoError(t, err)
			read <- n
		}()
		synctest.Wait()
		require.NoError(t, first.Raw().Add("n", 5))
		commit(t, first)
		assert.EqualValues(t, 5, <-read)
		began := time.Now()
		_, err := third.Raw().Get("n")
		require.ErrorIs(t, err, ErrBusy)
		assert.Equal(t, time.Second, time.Since(began), "as long as LockWait")
		rollback(t, third)
		rollback(t, second)
	})
}
