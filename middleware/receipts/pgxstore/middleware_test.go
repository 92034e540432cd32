package pgxstore_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
	"github.com/penstock-mq/penstock/sdk"
)

// Under the middleware a queued statement that fails is found at COMMIT, or by another message's handler. Its own message is
// charged, the others of the batch commit, each once.
func TestQueuedStatementThatFailsInABatch(t *testing.T) {
	t.Parallel()
	for how, read := range map[string]bool{"found at COMMIT": false, "found by another handler": true} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			m, err := idempotency.New(db.store, idempotency.Config{
				Consumer: "billing", Scope: "s", Lanes: 1, BatchTime: 5 * time.Second,
				RetryBackoff: sdk.Backoff{Min: time.Millisecond, Max: time.Millisecond},
			})
			must(t, err)
			free := make(chan struct{})
			handle := m.Handle(func(ctx context.Context, tx *pgxstore.Tx, msg *message.Message) error {
				if msg.UUID == "blocker" {
					<-free
				}
				by := 1
				if msg.UUID == "m5" {
					by = 1000 // the table has a CHECK
				}
				tx.Queue(`INSERT INTO counters VALUES ($1, $2)`, msg.UUID, by)
				if read && msg.UUID == "m9" {
					var n int
					return tx.QueryRow(ctx, `SELECT count(*) FROM counters`).Scan(&n)
				}
				return nil
			})
			var wg sync.WaitGroup
			errs := make([]error, 20)
			wg.Go(func() { must(t, handle(message.NewMessage("blocker", nil))) })
			for m.Report().Health.Pending < 1 {
				time.Sleep(time.Millisecond)
			}
			for i := range errs {
				wg.Go(func() { errs[i] = handle(message.NewMessage(fmt.Sprint("m", i), nil)) })
			}
			for m.Report().Health.Pending < 1+len(errs) {
				time.Sleep(time.Millisecond)
			}
			close(free)
			wg.Wait()
			for i, err := range errs {
				if failed := idempotency.IsFailure(err); failed != (i == 5) {
					t.Errorf("m%d: failed is %v: %v", i, failed, err)
				} else if i != 5 && err != nil {
					t.Errorf("m%d: %v", i, err)
				}
			}
			var n, sum int
			must(t, db.QueryRow(t.Context(), `SELECT count(*), sum(value) FROM counters`).Scan(&n, &sum))
			if n != 20 || sum != 20 {
				t.Errorf("%d rows with %d in all, want 20: one for each message but the one that failed", n, sum)
			}
			stats, err := db.store.Stats(t.Context())
			must(t, err)
			if stats.Done != 20 || stats.Torn != 0 {
				t.Errorf("receipts: %+v, want 20", stats)
			}
			if r := m.Report(); r.Failed != 1 || r.Handled != 20 || r.Batches.Largest < 2 {
				t.Errorf("report: %d failed, %d handled, batches %+v", r.Failed, r.Handled, r.Batches)
			}
		})
	}
}
