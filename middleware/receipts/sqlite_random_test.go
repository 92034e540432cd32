package receipts_test

import (
	"database/sql"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// model is what the tables should hold: effects and outputs by key, and for each receipt its transaction's number.
type model struct {
	effects, outputs map[string]int
	receipts         map[string]int
}

func (m model) clone() model {
	return model{maps.Clone(m.effects), maps.Clone(m.outputs), maps.Clone(m.receipts)}
}

// Random transactions of random parts, some of which fail, give up their claims, claim again, or end the transaction: what
// is in the database afterwards is what was committed, and nothing else.
func TestRandomTransactions(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		rng := rand.New(rand.NewPCG(seed, 1))
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := checked(t, db)
		now := model{map[string]int{}, map[string]int{}, map[string]int{}}
		for n := 1; n <= 60; n++ {
			now = randomTransaction(t, rng, s, now, n)
		}
		wantStats(t, s, len(now.receipts), 0, 0)
		for key := range 400 {
			k := itoa(key)
			if got := effect(t, db, k); got != now.effects[k] {
				t.Errorf("effect of %s: %d, want %d", k, got, now.effects[k])
			}
		}
		if got := effect(t, db, "later"); got != 0 {
			t.Errorf("%d writes after the end of a transaction", got)
		}
		outputs, err := s.Unsent(t.Context(), receipts.UnsentQuery{Limit: 100_000})
		must(t, err)
		got := map[string]int{}
		positions := map[receipts.OutputRef]bool{}
		for _, o := range outputs {
			got[string(o.Key)]++
			if positions[o.OutputRef] {
				t.Errorf("two outputs have position %d of %s", o.Position, o.Nonce)
			}
			positions[o.OutputRef] = true
		}
		if !maps.Equal(got, now.outputs) {
			t.Errorf("outputs %v, want %v", got, now.outputs)
		}
	})
}

// randomTransaction runs transaction number n, and gives the state after it.
func randomTransaction(t *testing.T, rng *rand.Rand, s *receipts.SQLite, before model, n int) model {
	t.Helper()
	tx := begin(t, s)
	after := before.clone()
	var mine []receipts.Claim
	for range 1 + rng.IntN(3) {
		claims := make([]receipts.Claim, 0, 90)
		for _, key := range rng.Perm(400)[:1+rng.IntN(90)] {
			claims = append(claims, claim(itoa(key)))
		}
		results := claimed(t, tx, claims...)
		for i, r := range results {
			key := string(claims[i].Key)
			owner, held := after.receipts[key]
			if fresh := r.Status == receipts.ClaimFresh; fresh == held || held && (owner == n) != (r.Receipt.Nonce == tx.Nonce()) {
				t.Fatalf("transaction %d: claim of %s has status %d, nonce %s; it is transaction %d's", n, key, r.Status, r.Receipt.Nonce, owner)
			}
			if r.Status != receipts.ClaimFresh {
				continue
			}
			after.receipts[key] = n
			mine = append(mine, claims[i])
			var lost bool
			if mine, lost = randomPart(t, rng, tx, &after, mine, key); lost {
				must(t, tx.Rollback(t.Context()))
				return before
			}
		}
	}
	if len(mine) > 0 && rng.IntN(4) == 0 {
		given := mine[:1+rng.IntN(len(mine))]
		must(t, tx.Unclaim(t.Context(), given))
		for _, c := range given {
			delete(after.receipts, string(c.Key)) // its effect stays: nobody does that but this test
		}
	}
	if rng.IntN(6) == 0 {
		must(t, tx.Rollback(t.Context()))
		return before
	}
	must(t, tx.Commit(t.Context()))
	return after
}

// randomPart is one message. lost: it ended the transaction.
func randomPart(t *testing.T, rng *rand.Rand, tx receipts.Tx[*sql.Tx], after *model, mine []receipts.Claim, key string) (rest []receipts.Claim, lost bool) {
	t.Helper()
	must(t, tx.Part(t.Context()))
	increment(t, tx, key)
	outputs := rng.IntN(3)
	for range outputs {
		_, err := tx.AddOutputs(t.Context(), output(key))
		must(t, err)
	}
	switch what := rng.IntN(300); {
	case what == 0:
		if _, err := tx.Raw().Exec([]string{"COMMIT", "ROLLBACK"}[rng.IntN(2)]); err == nil {
			_, _ = tx.Raw().Exec(incrementSQL, "later")
		}
		if err := tx.Keep(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
			t.Fatalf("Keep: %v, want ErrTxEnded", err)
		}
		return mine, true
	case what < 60:
		must(t, tx.Undo(t.Context()))
		must(t, tx.Unclaim(t.Context(), mine[len(mine)-1:]))
		delete(after.receipts, key)
		return slices.Delete(mine, len(mine)-1, len(mine)), false
	default:
		must(t, tx.Keep(t.Context()))
		after.effects[key]++
		if outputs > 0 {
			after.outputs[key] += outputs
		}
		return mine, false
	}
}
