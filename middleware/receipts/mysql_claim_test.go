package receipts_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// TestMySQLIdentityTorture claims random identities of bytes that servers like to take for one another, and finds each with its
// own fingerprint.
func TestMySQLIdentityTorture(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	_, err := db.store.Check(t.Context())
	must(t, err)
	n := 100_000
	if testing.Short() {
		n = 5_000
	}
	const size = 1000
	r := rand.New(rand.NewPCG(7, 8))
	seen := make(map[string]bool, n)
	alike := []byte("aAáÁ bB\t\x00%_\\'\"ßs\xff\xfeéEe")
	for len(seen) < n {
		claims := make([]receipts.Claim, 0, size)
		for len(claims) < size {
			key := make([]byte, 1+r.IntN(12))
			if len(claims)%50 == 0 {
				key = make([]byte, 1+r.IntN(receipts.MaxKey))
			}
			for i := range key {
				key[i] = alike[r.IntN(len(alike))]
				if len(claims)%3 == 0 {
					key[i] = byte(r.IntN(256))
				}
			}
			if !seen[string(key)] {
				seen[string(key)] = true
				c := claim("")
				c.Key, c.Fingerprint = key, append([]byte("of "), key...)
				claims = append(claims, c)
			}
		}
		for _, want := range []receipts.ClaimStatus{receipts.ClaimFresh, receipts.ClaimHeld} {
			tx := db.begin(t)
			for i, result := range claimed(t, tx, claims...) {
				if result.Status != want {
					t.Fatalf("%q: status %d, want %d", claims[i].Key, result.Status, want)
				}
				if want == receipts.ClaimHeld && !bytes.Equal(result.Receipt.Fingerprint, claims[i].Fingerprint) {
					t.Fatalf("%q has the receipt of %q", claims[i].Key, result.Receipt.Fingerprint)
				}
			}
			must(t, tx.Commit(t.Context()))
		}
	}
	db.wantStats(t, len(seen), 0, 0)
}

// TestMySQLEightWorkers has eight workers on two handles claim batches of the same identities in any order. None of them sees any
// error, deadlocks least of all.
func TestMySQLEightWorkers(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	other := db.again(t)
	const workers, identities, size = 8, 1600, 40
	var group errgroup.Group
	var fresh atomic.Int64
	for w := range workers {
		s := []*receipts.MySQL{db.store, other.store}[w%2]
		r := rand.New(rand.NewPCG(9, uint64(w)))
		group.Go(func() error {
			for batch := range slices.Chunk(r.Perm(identities), size) {
				tx, err := s.Begin(context.Background(), receipts.TxOptions{Budget: time.Minute})
				if err != nil {
					return fmt.Errorf("worker %d: %w", w, err)
				}
				claims := make([]receipts.Claim, size)
				for i, n := range batch {
					claims[i] = claim(fmt.Sprintf("%05d", n))
				}
				results, err := tx.Claim(context.Background(), claims)
				if err != nil {
					return errors.Join(fmt.Errorf("worker %d: %w", w, err), tx.Rollback(context.Background()))
				}
				n := 0
				for _, result := range results {
					if result.Status == receipts.ClaimFresh {
						n++
					}
				}
				if r.IntN(5) == 0 { // it comes to nothing, and somebody else gets them
					if err := tx.Rollback(context.Background()); err != nil {
						return err
					}
					continue
				}
				if err := tx.Commit(context.Background()); err != nil {
					return fmt.Errorf("worker %d: %w", w, err)
				}
				fresh.Add(int64(n))
			}
			return nil
		})
	}
	must(t, group.Wait())
	db.wantStats(t, int(fresh.Load()), 0, 0)
	if fresh.Load() < identities*9/10 {
		t.Errorf("%d of %d identities were claimed", fresh.Load(), identities)
	}
}

// TestMySQLClaimWait measures how long a claim waits, and that the transaction's other claims are still there then.
func TestMySQLClaimWait(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	info, err := db.store.Check(t.Context())
	must(t, err)
	holder := db.begin(t)
	claimed(t, holder, claim("held"))
	for _, wait := range []time.Duration{50 * time.Millisecond, 100 * time.Millisecond, 1200 * time.Millisecond} {
		tx := db.begin(t, receipts.TxOptions{ClaimWait: wait})
		claimed(t, tx, claim("mine"))
		start := time.Now()
		_, err := tx.Claim(t.Context(), []receipts.Claim{claim("a"), claim("held"), claim("z")})
		took := time.Since(start)
		wantClass(t, db.store, err, receipts.ClassContention)
		if least := wait - time.Millisecond; took < least || took > wait+2*time.Second && info.Dialect == "mariadb" {
			t.Errorf("a claim with ClaimWait %v took %v", wait, took)
		}
		must(t, tx.Rollback(t.Context()))
	}
	must(t, holder.Commit(t.Context()))
	db.both(t, receipts.ClaimHeld, "held")
	db.both(t, receipts.ClaimFresh, "a", "mine", "z")
}

// TestMySQLSlowIsNotHeld has a claim that takes longer than ClaimWait for another reason than a lock.
func TestMySQLSlowIsNotHeld(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	db.onMariaDB(t)
	tx := db.begin(t, receipts.TxOptions{ClaimWait: time.Microsecond}) // the server is told 1 ms
	claims := make([]receipts.Claim, 500)
	for i := range claims {
		claims[i] = claim(fmt.Sprintf("%0200d", i))
	}
	for _, result := range claimed(t, tx, claims...) {
		if result.Status != receipts.ClaimFresh {
			t.Fatalf("status %d", result.Status)
		}
	}
	must(t, tx.Commit(t.Context()))
	db.wantStats(t, len(claims), 0, 0)
}

// TestMySQLCancelledClaim cancels a claim that waits: what its session had claimed is free soon.
func TestMySQLCancelledClaim(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	holder := db.begin(t)
	claimed(t, holder, claim("held"))
	tx := db.begin(t)
	claimed(t, tx, claim("mine"))
	session := sessionOf(t, tx.Raw())
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	_, err := tx.Claim(ctx, []receipts.Claim{claim("held")})
	wantClass(t, db.store, err, receipts.ClassContention)
	db.wantGone(t, session)
	db.both(t, receipts.ClaimFresh, "mine")
	if err := tx.Commit(t.Context()); err == nil {
		t.Error("Commit after a failed claim is nil")
	}
	must(t, holder.Commit(t.Context()))
}
