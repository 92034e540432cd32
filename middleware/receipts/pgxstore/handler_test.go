package pgxstore_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

func TestHandlersCannotEndTheTransaction(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	tx := db.claimed(t, "a")
	raw := tx.Raw()
	if err := raw.Commit(t.Context()); !errors.Is(err, pgxstore.ErrOwned) {
		t.Error(err)
	}
	if err := raw.Rollback(t.Context()); !errors.Is(err, pgxstore.ErrOwned) {
		t.Error(err)
	}
	must(t, raw.Err())
	raw.Queue(add, "a")
	must(t, tx.Commit(t.Context()))
	db.wantEffect(t, "a", 1)
	db.wantStats(t, 1, 0, 0)
	if err := raw.Err(); err == nil {
		t.Error("no error after the end")
	}
	if _, err := raw.Exec(t.Context(), `SELECT 1`); !errors.Is(err, pgx.ErrTxClosed) {
		t.Error(err)
	}
	raw.Queue(add, "a")
	if err := tx.Commit(t.Context()); !errors.Is(err, pgx.ErrTxClosed) {
		t.Error(err)
	}
	must(t, tx.Rollback(t.Context()))
	db.wantEffect(t, "a", 1)
	db.wantClean(t)
}

const seen = `SELECT value FROM counters WHERE name = 'x'`

// one expects one row.
func one(rows pgx.Rows, err error) error {
	if err != nil {
		return err
	}
	_, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
	return err
}

// sendsBatch reads the results in each way there is.
func sendsBatch(ctx context.Context, tx *pgxstore.Tx) error {
	b := &pgx.Batch{}
	b.Queue(seen)
	b.Queue(seen)
	b.Queue(`SELECT 1`)
	results := tx.SendBatch(ctx, b)
	err := errors.Join(one(results.Query()), results.QueryRow().Scan(new(int)))
	_, execErr := results.Exec()
	return errors.Join(err, execErr, results.Close())
}

// copies queues while it copies.
func copies(ctx context.Context, tx *pgxstore.Tx) error {
	n, err := tx.CopyFrom(ctx, pgx.Identifier{"counters"}, []string{"name", "value"}, pgx.CopyFromFunc(func() func() ([]any, error) {
		left := 2
		return func() ([]any, error) {
			tx.Queue(add, "from inside")
			if left--; left < 0 {
				return nil, nil
			}
			return []any{strings.Repeat("c", left+1), 1}, nil
		}
	}()))
	if err == nil && n != 2 {
		err = errors.New("not all copied")
	}
	return errors.Join(err, tx.QueryRow(ctx, seen).Scan(new(int)))
}

// begins goes through every method of a transaction inside.
func begins(ctx context.Context, tx *pgxstore.Tx) error {
	inner, err := tx.Begin(ctx)
	if err != nil {
		return err
	}
	if err := inner.QueryRow(ctx, seen).Scan(new(int)); err != nil {
		return err
	}
	b := &pgx.Batch{}
	b.Queue(seen)
	if err := inner.SendBatch(ctx, b).Close(); err != nil {
		return err
	}
	if _, err := inner.CopyFrom(ctx, pgx.Identifier{"counters"}, []string{"name", "value"}, pgx.CopyFromRows([][]any{{"nested", 1}})); err != nil {
		return err
	}
	deeper, err := inner.Begin(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(one(deeper.Query(ctx, seen)), deeper.Rollback(ctx)); err != nil {
		return err
	}
	return inner.Commit(ctx)
}

// TestEveryMethodSendsWhatIsQueuedBefore: each sees the row that was queued, or acts after it.
func TestEveryMethodSendsWhatIsQueuedBefore(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for name, f := range map[string]func(ctx context.Context, tx *pgxstore.Tx) error{
		"Exec": func(ctx context.Context, tx *pgxstore.Tx) error {
			tag, err := tx.Exec(ctx, `UPDATE counters SET value = 2 WHERE name = 'x'`)
			if err == nil && tag.RowsAffected() != 1 {
				err = errors.New("it was not there")
			}
			return err
		},
		"Query":     func(ctx context.Context, tx *pgxstore.Tx) error { return one(tx.Query(ctx, seen)) },
		"QueryRow":  func(ctx context.Context, tx *pgxstore.Tx) error { return tx.QueryRow(ctx, seen).Scan(new(int)) },
		"SendBatch": sendsBatch,
		"SendBatch with functions": func(ctx context.Context, tx *pgxstore.Tx) error {
			b := &pgx.Batch{}
			b.Queue(seen).QueryRow(func(row pgx.Row) error {
				tx.Queue(add, "from inside") // must not stand still
				return row.Scan(new(int))
			})
			return tx.SendBatch(ctx, b).Close()
		},
		"CopyFrom": copies,
		"Prepare": func(ctx context.Context, tx *pgxstore.Tx) error {
			if _, err := tx.Prepare(ctx, "seen", seen); err != nil {
				return err
			}
			return tx.QueryRow(ctx, "seen").Scan(new(int))
		},
		"Begin": begins,
		// It passes by the queue, and leaves it alone.
		"LargeObjects": func(ctx context.Context, tx *pgxstore.Tx) error {
			objects := tx.LargeObjects()
			_, err := objects.Create(ctx, 0)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			tx := db.claimed(t, name)
			raw := member(tx, 0)
			raw.Queue(`INSERT INTO counters VALUES ('x', 1)`)
			must(t, f(t.Context(), raw))
			raw.Queue(`DELETE FROM counters`)
			raw.Queue(add, name)
			must(t, tx.Commit(t.Context()))
			db.wantEffect(t, name, 1)
			db.wantEffect(t, "x", 0)
			db.wantClean(t)
		})
	}
}

// TestAnEarlierMembersErrorIsNotTheRunningOnes: it comes to whoever sends it, in whatever way, and names the right one.
func TestAnEarlierMembersErrorIsNotTheRunningOnes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for name, f := range map[string]func(tx *pgxstore.Tx) error{
		"Exec":     func(tx *pgxstore.Tx) error { _, err := tx.Exec(t.Context(), `SELECT 1`); return err },
		"Query":    func(tx *pgxstore.Tx) error { _, err := tx.Query(t.Context(), `SELECT 1`); return err },
		"QueryRow": func(tx *pgxstore.Tx) error { return tx.QueryRow(t.Context(), `SELECT 1`).Scan(new(int)) },
		"Begin":    func(tx *pgxstore.Tx) error { _, err := tx.Begin(t.Context()); return err },
		"SendBatch": func(tx *pgxstore.Tx) error {
			b := &pgx.Batch{}
			b.Queue(`SELECT 1`)
			return tx.SendBatch(t.Context(), b).Close()
		},
		"CopyFrom": func(tx *pgxstore.Tx) error {
			_, err := tx.CopyFrom(t.Context(), pgx.Identifier{"counters"}, []string{"name", "value"}, pgx.CopyFromRows(nil))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			tx := db.claimed(t, name+"1", name+"2")
			member(tx, 0).Queue(`INSERT INTO counters VALUES ('x', 5000)`)
			raw := member(tx, 1)
			held := f(raw)
			wantMember(t, held, 0)
			var server *pgconn.PgError
			if !errors.As(held, &server) || server.Code != "23514" || db.store.Classify(held) != receipts.ClassOther {
				t.Errorf("its cause: %v", held)
			}
			wantMember(t, raw.Err(), 0)
			wantMember(t, f(raw), 0)                 // again, where it was ignored
			wantMember(t, tx.Commit(t.Context()), 0) // and at the end
			db.wantStats(t, 0, 0, 0)
			db.wantClean(t)
		})
	}
}

// TestQueuedContentionIsContention, and its member's.
func TestQueuedContentionIsContention(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	tx := db.claimed(t, "a", "b")
	member(tx, 0).Queue(add, "a")
	member(tx, 1).Queue(`DO $$ BEGIN RAISE '' USING ERRCODE = 'deadlock_detected'; END $$`)
	err := tx.Commit(t.Context())
	wantMember(t, err, 1)
	if c := db.store.Classify(err); c != receipts.ClassContention {
		t.Errorf("class %d", c)
	}
}

// TestNobodysStatementsFailWithoutAMember: what is queued before Member, or for nobody.
func TestNobodysStatementsFailWithoutAMember(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for name, f := range map[string]func(tx receipts.Tx[*pgxstore.Tx]) error{
		"before Member": func(tx receipts.Tx[*pgxstore.Tx]) error { tx.Raw().Queue(`SELECT 1/0`); return nil },
		"for nobody": func(tx receipts.Tx[*pgxstore.Tx]) error {
			member(tx, 0)
			member(tx, -1).Queue(`SELECT 1/0`)
			return nil
		},
	} {
		tx := db.claimed(t, name)
		must(t, f(tx))
		err := tx.Commit(t.Context())
		var m *receipts.MemberError
		if err == nil || errors.As(err, &m) {
			t.Errorf("%s: %v", name, err)
		}
	}
	db.wantStats(t, 0, 0, 0)
	db.wantClean(t)
}

// TestASavepointMakesUpForAnError: nobody is charged for it.
func TestASavepointMakesUpForAnError(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	tx := db.claimed(t, "a", "b")
	raw := member(tx, 0)
	err := pgx.BeginFunc(t.Context(), raw, func(inner pgx.Tx) error {
		_, err := inner.Exec(t.Context(), `SELECT 1/0`)
		return err
	})
	if err == nil {
		t.Fatal("no error")
	}
	member(tx, 1).Queue(add, "b")
	must(t, tx.Commit(t.Context()))
	db.wantStats(t, 2, 0, 0)
	db.wantEffect(t, "b", 1)
}

// TestAStatementsContextEnds: the connection is gone, and that is neither an outage nor anybody else's failure.
func TestAStatementsContextEnds(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	tx := db.claimed(t, "a", "b")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := member(tx, 0).Exec(ctx, `SELECT pg_sleep(60)`); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	raw := member(tx, 1)
	raw.Queue(add, "b")
	_, err := raw.Exec(t.Context(), `SELECT 1`)
	wantMember(t, err, 0)
	err = tx.Commit(t.Context())
	wantMember(t, err, 0)
	if c := db.store.Classify(err); c != receipts.ClassOther {
		t.Errorf("class %d", c)
	}
	db.wantStats(t, 0, 0, 0)
	db.wantClean(t)
}

// TestRowsLeftOpen by a handler: the commit is refused, and nothing is leaked.
func TestRowsLeftOpen(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	tx := db.claimed(t, "a")
	rows, err := tx.Raw().Query(t.Context(), `SELECT generate_series(1, 100000)`)
	must(t, err)
	if !rows.Next() {
		t.Fatal(rows.Err())
	}
	if err := tx.Commit(t.Context()); err == nil || !strings.Contains(err.Error(), "still open") {
		t.Error(err)
	}
	for rows.Next() {
	}
	rows.Close()
	db.wantStats(t, 0, 0, 0)
	db.wantClean(t)
}

// TestBudgetEndsWhileAHandlerReads, and while one of its statements runs.
func TestBudgetEndsWhileAHandlerReads(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for name, f := range map[string]func(tx *pgxstore.Tx) error{
		"reads": func(tx *pgxstore.Tx) error {
			rows, err := tx.Query(context.Background(), `SELECT generate_series(1, 10000000)`)
			for err == nil && rows.Next() {
				var n int
				err = rows.Scan(&n)
			}
			rows.Close()
			return errors.Join(err, rows.Err())
		},
		"waits": func(tx *pgxstore.Tx) error {
			_, err := tx.Exec(context.Background(), `SET LOCAL statement_timeout = 0`)
			if err == nil {
				_, err = tx.Exec(context.Background(), `SELECT pg_sleep(60)`)
			}
			return err
		},
		"writes": func(tx *pgxstore.Tx) (err error) {
			for err == nil {
				_, err = tx.Exec(context.Background(), `UPDATE counters SET value = 1`)
			}
			return err
		},
		"queues": func(tx *pgxstore.Tx) (err error) {
			for err == nil {
				tx.Queue(add, "x")
				time.Sleep(time.Millisecond)
				err = tx.Err()
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			tx := db.begin(t, receipts.TxOptions{Budget: 500 * time.Millisecond})
			_, err := tx.Claim(t.Context(), []receipts.Claim{claim(name)})
			must(t, err)
			if err := f(tx.Raw()); err == nil {
				t.Error("the handler noticed nothing")
			}
			if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrBudgetEnded) {
				t.Error(err)
			}
			must(t, tx.Rollback(t.Context()))
			db.wantStats(t, 0, 0, 0)
			db.wantEffect(t, "x", 0)
			db.wantClean(t)
		})
	}
}

// TestRollbackCutsOffAStatement that runs for longer than its context.
func TestRollbackCutsOffAStatement(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	tx := db.claimed(t, "a")
	raw := tx.Raw()
	ended := make(chan error, 1)
	go func() {
		_, err := raw.Exec(context.Background(), `SELECT pg_sleep(60)`)
		ended <- err
	}()
	eventually(t, "the statement runs", func() bool {
		var n int
		must(t, db.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'`).Scan(&n))
		return n == 1
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := tx.Rollback(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if err := <-ended; err == nil {
		t.Error("the statement ran to its end")
	}
	db.wantStats(t, 0, 0, 0)
	db.wantClean(t)
}

// TestNothingSentWithoutNeed: a transaction that nobody used costs no round trip, and one without claims commits.
func TestNothingSentWithoutNeed(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	must(t, db.begin(t).Commit(t.Context()))
	tx := db.begin(t)
	tx.Raw().Queue(add, "a")
	must(t, tx.Commit(t.Context()))
	db.wantEffect(t, "a", 1)
	tx = db.begin(t)
	must(t, tx.Divert(t.Context(), []receipts.DeadLetter{{Scope: "s", Kind: receipts.KindRefused, At: noon}}))
	must(t, tx.Commit(t.Context()))
	tx = db.begin(t)
	_, _ = tx.Raw().Exec(t.Context(), `SELECT 1/0`)
	if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
		t.Error(err)
	}
	letters, err := db.store.DeadLetters(t.Context(), 9)
	must(t, err)
	if len(letters) != 1 {
		t.Errorf("%d dead letters", len(letters))
	}
	db.wantStats(t, 0, 0, 0)
	db.wantClean(t)
}

// TestDeadConnectionsAreReplaced when the first statement finds them.
func TestDeadConnectionsAreReplaced(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	var held []receipts.Tx[*pgxstore.Tx]
	var pids []uint32
	for range 4 {
		tx := db.begin(t)
		pids = append(pids, pidOf(tx))
		held = append(held, tx)
	}
	for _, tx := range held {
		must(t, tx.Rollback(t.Context()))
	}
	watch := open(t, db.at)
	for _, pid := range pids {
		watch.terminate(t, pid)
	}
	for _, key := range []string{"a", "b", "c"} {
		must(t, db.claimed(t, key).Commit(t.Context()))
	}
	watch.wantStats(t, 3, 0, 0)
}

func TestPoolExhausted(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "pool_max_conns=2")
	db.claimed(t, "a")
	db.claimed(t, "b")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := db.store.Begin(ctx, receipts.TxOptions{})
	if db.store.Classify(err) != receipts.ClassOutage {
		t.Error(err)
	}
	if _, err := db.store.Begin(t.Context(), receipts.TxOptions{Budget: -1}); err == nil {
		t.Error("a negative budget is accepted")
	}
	if _, err := pgxstore.New(nil, pgxstore.Options{}); err == nil {
		t.Error("a nil pool is accepted")
	}
}
