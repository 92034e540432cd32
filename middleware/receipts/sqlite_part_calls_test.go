package receipts_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestPartsOutOfOrder(t *testing.T) {
	d := modernc()
	s := checked(t, d.open(t, d.file(t), "synchronous=OFF"))
	ctx := context.Background()
	a := []receipts.Claim{claim("a")}
	cases := map[string]struct {
		inPart bool
		call   func(tx receipts.Tx[*sql.Tx]) error
	}{
		"Keep before Part":    {false, func(tx receipts.Tx[*sql.Tx]) error { return tx.Keep(ctx) }},
		"Undo before Part":    {false, func(tx receipts.Tx[*sql.Tx]) error { return tx.Undo(ctx) }},
		"Part inside a part":  {true, func(tx receipts.Tx[*sql.Tx]) error { return tx.Part(ctx) }},
		"Unclaim in a part":   {true, func(tx receipts.Tx[*sql.Tx]) error { return tx.Unclaim(ctx, a) }},
		"Claim inside a part": {true, func(tx receipts.Tx[*sql.Tx]) error { _, err := tx.Claim(ctx, a); return err }},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			tx := begin(t, s)
			claimed(t, tx, claim(name))
			if c.inPart {
				must(t, tx.Part(ctx))
			}
			if err := c.call(tx); err == nil {
				t.Fatal("it returned nil")
			}
			if c.inPart {
				must(t, tx.Keep(ctx)) // nothing was done, so it goes on
			}
			must(t, tx.Commit(ctx))
		})
	}
	t.Run("Commit inside a part", func(t *testing.T) {
		tx := begin(t, s)
		claimed(t, tx, a...)
		must(t, tx.Part(ctx))
		if err := tx.Commit(ctx); err == nil || errors.Is(err, receipts.ErrCommitUnknown) {
			t.Fatalf("Commit: %v, want a refusal", err)
		}
		wantStats(t, s, len(cases), 0, 0)
	})
	t.Run("cancelled", func(t *testing.T) {
		tx := begin(t, s)
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		if err := tx.Part(cancelled); !errors.Is(err, context.Canceled) {
			t.Fatalf("Part: %v, want the context's error", err)
		}
		must(t, tx.Part(ctx))
		must(t, tx.Keep(cancelled)) // what a handler has done is not lost by a context
		must(t, tx.Commit(cancelled))
	})
}

// The budget ends inside a part: the part cannot be ended, and the reason is the budget.
func TestBudgetEndsInPart(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := checked(t, db)
		for name, end := range map[string]func(tx receipts.Tx[*sql.Tx], ctx context.Context) error{
			"Keep": receipts.Tx[*sql.Tx].Keep, "Undo": receipts.Tx[*sql.Tx].Undo,
		} {
			tx := begin(t, s, 50*time.Millisecond)
			claimed(t, tx, claim("a"))
			must(t, tx.Part(t.Context()))
			increment(t, tx, "a")
			waitFor(t, "the budget to end", func() bool { return db.Stats().InUse == 0 })
			if err := end(tx, t.Context()); !errors.Is(err, receipts.ErrBudgetEnded) || errors.Is(err, receipts.ErrTxEnded) {
				t.Errorf("%s: %v, want ErrBudgetEnded", name, err)
			}
			if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrBudgetEnded) {
				t.Errorf("Commit: %v, want ErrBudgetEnded", err)
			}
		}
		wantStats(t, s, 0, 0, 0)
	})
}
