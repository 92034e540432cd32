package receipts_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// busy_timeout is much longer than the context: only the context can end the wait, whether the driver listens or not.
func TestBeginReturnsByContext(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		holder := migrated(t, d.open(t, path))
		db := d.open(t, path, "busy_timeout=1500")
		s := storeOn(t, db)
		held := begin(t, holder)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		start := time.Now()
		_, err := s.Begin(ctx, receipts.TxOptions{})
		if took := time.Since(start); took > time.Second {
			t.Errorf("Begin returned after %v, its context ended after 50 ms", took)
		}
		if !errors.Is(err, context.DeadlineExceeded) || s.Classify(err) != receipts.ClassContention {
			t.Errorf("Begin: %v of class %d, want the deadline as contention", err, s.Classify(err))
		}
		cancelled, cancel := context.WithCancel(t.Context())
		time.AfterFunc(20*time.Millisecond, cancel)
		if _, err := s.Begin(cancelled, receipts.TxOptions{}); !errors.Is(err, context.Canceled) ||
			s.Classify(err) != receipts.ClassOther {
			t.Errorf("cancelled Begin: %v of class %d, want other", err, s.Classify(err))
		}
		must(t, held.Rollback(t.Context()))
		// What was abandoned must not come to hold the lock, nor keep its connection.
		waitFor(t, "the abandoned connections to come back", func() bool { return db.Stats().InUse == 0 })
		wantFreeLock(t, db)
	})
}

func TestBusyIsContention(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		begin(t, migrated(t, d.open(t, path)))
		db := d.open(t, path, "busy_timeout=1")
		s := storeOn(t, db)
		if _, err := s.Begin(t.Context(), receipts.TxOptions{}); s.Classify(err) != receipts.ClassContention {
			t.Errorf("Begin: %v of class %d, want contention", err, s.Classify(err))
		}
		if err := s.MarkSent(t.Context(), []receipts.OutputRef{{}}, noon); s.Classify(err) != receipts.ClassContention {
			t.Errorf("MarkSent: %v of class %d, want contention", err, s.Classify(err))
		}
		if db.Stats().InUse != 0 {
			t.Errorf("%d connections are in use", db.Stats().InUse)
		}
	})
}

func TestPoolExhausted(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		s := migrated(t, db)
		db.SetMaxOpenConns(1)
		begin(t, s)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		_, beginErr := s.Begin(ctx, receipts.TxOptions{})
		ctx, cancel = context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		_, unsentErr := s.Unsent(ctx, receipts.UnsentQuery{Limit: 1})
		for what, err := range map[string]error{"Begin": beginErr, "Unsent": unsentErr} {
			if s.Classify(err) != receipts.ClassOutage || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v of class %d, want the deadline as an outage", what, err, s.Classify(err))
			}
		}
		if _, err := s.Begin(ctx, receipts.TxOptions{}); s.Classify(err) != receipts.ClassOther {
			t.Errorf("Begin with a context that had ended before: class %d, want other", s.Classify(err))
		}
	})
}

// The caller's context ends after Begin returned, before each of the later calls: nothing happens to the transaction.
func TestCallersContextEnds(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		s := migrated(t, db)
		mustExec(t, db, counters)
		ctx, cancel := context.WithCancel(t.Context())
		tx, err := s.Begin(ctx, receipts.TxOptions{Budget: time.Minute})
		must(t, err)
		cancel()
		if _, err := tx.Claim(ctx, []receipts.Claim{claim("a")}); !errors.Is(err, context.Canceled) {
			t.Errorf("Claim with a cancelled context: %v", err)
		}
		claimed(t, tx, claim("a"))
		increment(t, tx, "a")
		must(t, tx.Commit(ctx))
		wantStats(t, s, 1, 0, 0)
		if effect(t, db, "a") != 1 {
			t.Error("the effect is missing")
		}
	})
}

func TestBudget(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		s := migrated(t, db)
		mustExec(t, db, counters)
		tx := begin(t, s, 100*time.Millisecond)
		claimed(t, tx, claim("a"))
		increment(t, tx, "a")
		// The handler still runs: another writer gets the lock all the same.
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		defer cancel()
		other, err := s.Begin(ctx, receipts.TxOptions{})
		must(t, err)
		must(t, other.Rollback(ctx))
		if _, err := tx.Raw().Exec(incrementSQL, "a"); err == nil {
			t.Error("a statement after the budget succeeded")
		}
		for what, err := range map[string]error{
			"AddOutputs": func() error {
				_, err := tx.AddOutputs(ctx, []receipts.Output{{Topic: "out"}})
				return err
			}(),
			"Divert": tx.Divert(ctx, []receipts.DeadLetter{{Scope: "s"}}),
			"Commit": tx.Commit(ctx),
		} {
			if !errors.Is(err, receipts.ErrBudgetEnded) || s.Classify(err) != receipts.ClassOther {
				t.Errorf("%s: %v, want ErrBudgetEnded", what, err)
			}
		}
		must(t, tx.Rollback(ctx))
		wantStats(t, s, 0, 0, 0)
		if effect(t, db, "a") != 0 || db.Stats().InUse != 0 {
			t.Errorf("effect %d, connections in use %d; want 0 and 0", effect(t, db, "a"), db.Stats().InUse)
		}
	})
}

// Commit and the end of the budget meet: whichever is first, the answer is true.
func TestBudgetRace(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		mustExec(t, db, counters)
		commits := 0
		for i := range 60 {
			tx := begin(t, s, 2*time.Millisecond)
			_, claimErr := tx.Claim(t.Context(), []receipts.Claim{claim(itoa(i))})
			time.Sleep(time.Duration(1500+i*20) * time.Microsecond)
			err := tx.Commit(t.Context())
			switch {
			case err == nil && claimErr == nil:
				commits++
			case !errors.Is(err, receipts.ErrBudgetEnded):
				t.Fatalf("Commit: %v after Claim: %v", err, claimErr)
			}
		}
		wantStats(t, s, commits, 0, 0)
		wantFreeLock(t, db)
	})
}

func TestRollback(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		s := migrated(t, db)
		mustExec(t, db, counters)
		tx := begin(t, s)
		claimed(t, tx, claim("a"))
		increment(t, tx, "a")
		must(t, tx.Rollback(t.Context()))
		must(t, tx.Rollback(t.Context()))
		if err := tx.Commit(t.Context()); err == nil {
			t.Error("Commit after Rollback returned nil")
		}
		wantStats(t, s, 0, 0, 0)
		_, nonce := process(t, s, "a")
		if committed, err := s.Resolve(t.Context(), nonce); !committed || err != nil {
			t.Errorf("Resolve: %t, %v; want true", committed, err)
		}
		tx = begin(t, s)
		must(t, tx.Commit(t.Context()))
		must(t, tx.Rollback(t.Context()))
		wantFreeLock(t, db)
	})
}

// Rollback does not wait for a statement of the handler beyond its context.
func TestRollbackWhileAStatementRuns(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		s := migrated(t, db)
		tx := begin(t, s)
		running, stopStatement := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			var n int
			_ = tx.Raw().QueryRowContext(running, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000000)
				SELECT count(*) FROM n`).Scan(&n)
		}()
		time.Sleep(30 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		start := time.Now()
		if err := tx.Rollback(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Rollback: %v, want the deadline", err)
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("Rollback took %v", took)
		}
		stopStatement()
		<-done
		must(t, tx.Rollback(t.Context()))
		wantFreeLock(t, db)
	})
}

func TestNegativeBudget(t *testing.T) {
	d := modernc()
	s := storeOn(t, d.open(t, d.file(t)))
	if _, err := s.Begin(t.Context(), receipts.TxOptions{Budget: -1}); err == nil {
		t.Error("a negative budget was accepted")
	}
}

// Four writers on two handles: each identity once, although each is offered by all.
func TestConcurrentDuplicates(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		db := d.open(t, path)
		a, b := migrated(t, db), storeOn(t, d.open(t, path))
		mustExec(t, db, counters)
		const identities = 25
		results := make(chan receipts.ClaimStatus, 4*identities)
		for i := range 4 {
			s := a
			if i%2 == 1 {
				s = b
			}
			go func() {
				for k := range identities {
					result, _ := process(t, s, itoa(k))
					results <- result.Status
				}
			}()
		}
		seen := map[receipts.ClaimStatus]int{}
		for range cap(results) {
			select {
			case r := <-results:
				seen[r]++
			case <-time.After(20 * time.Second):
				t.Fatal("the writers stand still")
			}
		}
		if seen[receipts.ClaimFresh] != identities || seen[receipts.ClaimHeld] != 3*identities {
			t.Errorf("claims by status: %v", seen)
		}
		wantStats(t, a, identities, 0, 0)
		if sum := count(t, db, "SELECT sum(value) FROM counters"); sum != identities {
			t.Errorf("the effects sum up to %d, want %d", sum, identities)
		}
	})
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("waited 10 s for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}
