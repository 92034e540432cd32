package receipts_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestPostgresCheck(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		info, err := db.store.Check(t.Context())
		must(t, err)
		if info.Dialect != "postgres" || info.Lanes != 11 || info.Parts || info.Pool != 12 || info.Schema != 2 || len(info.Warnings) != 0 {
			t.Errorf("info: %+v", info)
		}
	})
}

func TestPostgresFlow(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		var claims []receipts.Claim
		for i := range 300 {
			claims = append(claims, claim(fmt.Sprint("key ", i)))
		}
		tx := db.begin(t)
		for i, r := range claimed(t, tx, claims...) {
			if r.Status != receipts.ClaimFresh {
				t.Fatalf("claim %d: %+v", i, r)
			}
			db.add(t, tx.Raw(), "effect")
		}
		must(t, tx.Commit(t.Context()))
		db.wantStats(t, 300, 0, 0)

		tx = db.begin(t)
		results := claimed(t, tx, append(claims, claim("another"))...)
		for i, r := range results {
			want := receipts.ClaimHeld
			if i == len(claims) {
				want = receipts.ClaimFresh
			}
			if r.Status != want {
				t.Fatalf("claim %d: %+v", i, r)
			}
		}
		must(t, tx.Rollback(context.Background()))
		db.wantStats(t, 300, 0, 0)
		db.wantIdle(t)
		if n := db.effect(t, "effect"); n != 300 {
			t.Errorf("effect: %d", n)
		}
	})
}
