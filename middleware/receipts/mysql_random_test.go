package receipts_test

import (
	"database/sql"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// myModel is what the tables should hold.
type myModel struct {
	effects, outputs map[string]int
	receipts         map[string]receipts.Nonce
	letters          map[string]bool
}

func (m myModel) clone() myModel {
	return myModel{maps.Clone(m.effects), maps.Clone(m.outputs), maps.Clone(m.receipts), maps.Clone(m.letters)}
}

// TestMySQLRandomTransactions runs random transactions: claims of old and new identities, parts that are kept or undone, outputs
// and dead letters inside and between them, claims given up and made again, and ends of all kinds. What is in the database
// afterwards is what was committed, and nothing else.
func TestMySQLRandomTransactions(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	db := newMyDB(t)
	_, err := db.store.Check(t.Context())
	must(t, err)
	now := myModel{map[string]int{}, map[string]int{}, map[string]receipts.Nonce{}, map[string]bool{}}
	for range 80 {
		now = (&myRandom{t: t, rng: rng, db: db, mine: map[string]bool{}}).run(now)
	}
	db.wantStats(t, len(now.receipts), 0, 0)
	for key := range 200 {
		if got := db.effect(t, itoa(key)); got != now.effects[itoa(key)] {
			t.Errorf("effect of %d: %d, want %d", key, got, now.effects[itoa(key)])
		}
	}
	if got := db.effect(t, "later"); got != 0 {
		t.Errorf("%d writes after the end of a transaction", got)
	}
	outputs, err := db.store.Unsent(t.Context(), receipts.UnsentQuery{Limit: 100_000})
	must(t, err)
	got := map[string]int{}
	for _, o := range outputs {
		got[string(o.Key)]++
	}
	if !maps.Equal(got, now.outputs) {
		t.Errorf("outputs %v, want %v", got, now.outputs)
	}
	letters, err := db.store.DeadLetters(t.Context(), 100_000)
	must(t, err)
	if len(letters) != len(now.letters) {
		t.Errorf("%d dead letters, want %d", len(letters), len(now.letters))
	}
}

// myRandom is one random transaction.
type myRandom struct {
	t    *testing.T
	rng  *rand.Rand
	db   *myDB
	tx   receipts.Tx[*sql.Tx]
	is   myModel
	mine map[string]bool
}

func (r *myRandom) run(before myModel) myModel {
	r.t.Helper()
	r.tx, r.is = r.db.begin(r.t), before.clone()
	for range 1 + r.rng.IntN(12) {
		switch r.rng.IntN(5) {
		case 0:
			r.claim()
		case 1:
			r.store()
		case 2:
			r.giveUp()
		default:
			r.part()
		}
	}
	switch r.rng.IntN(8) {
	case 0:
		must(r.t, r.tx.Rollback(r.t.Context()))
		return before
	case 1:
		must(r.t, r.tx.Part(r.t.Context()))
		handled(r.t, r.tx.Raw(), "ROLLBACK")
		r.db.add(r.t, r.tx.Raw(), "later")
		wantErr(r.t, r.tx.Keep(r.t.Context()), receipts.ErrTxEnded)
		must(r.t, r.tx.Rollback(r.t.Context()))
		return before
	default:
		must(r.t, r.tx.Commit(r.t.Context()))
		return r.is
	}
}

func (r *myRandom) claim() {
	r.t.Helper()
	var claims []receipts.Claim
	for _, key := range r.rng.Perm(200)[:1+r.rng.IntN(30)] {
		claims = append(claims, claim(itoa(key)))
	}
	for i, result := range claimed(r.t, r.tx, claims...) {
		key := string(claims[i].Key)
		owner, held := r.is.receipts[key]
		if held != (result.Status == receipts.ClaimHeld) || held && result.Receipt.Nonce != owner {
			r.t.Fatalf("claim of %s: status %d, nonce %s; it is held: %t, by %s", key, result.Status, result.Receipt.Nonce, held, owner)
		}
		if !held {
			r.is.receipts[key], r.mine[key] = r.tx.Nonce(), true
		}
	}
}

// store stores an output and a dead letter of one of the claims, in whatever part there is.
func (r *myRandom) store() (key string) {
	r.t.Helper()
	if len(r.mine) == 0 {
		return ""
	}
	keys := slices.Sorted(maps.Keys(r.mine))
	key = keys[r.rng.IntN(len(keys))]
	_, err := r.tx.AddOutputs(r.t.Context(), []receipts.Output{{Scope: "billing", Key: []byte(key), Topic: "t", UUID: key, At: noon}})
	must(r.t, err)
	must(r.t, r.tx.Divert(r.t.Context(), []receipts.DeadLetter{{Scope: "billing", Key: []byte(key), Kind: receipts.KindConflict, At: noon}}))
	r.is.outputs[key]++
	r.is.letters[key] = true
	return key
}

// giveUp gives up some claims. Their outputs stay: nobody does that but this test.
func (r *myRandom) giveUp() {
	r.t.Helper()
	var given []receipts.Claim
	for key := range r.mine {
		if r.rng.IntN(4) == 0 && r.is.outputs[key] == 0 {
			given = append(given, claim(key))
			delete(r.mine, key)
			delete(r.is.receipts, key)
		}
	}
	must(r.t, r.tx.Unclaim(r.t.Context(), given))
}

func (r *myRandom) part() {
	r.t.Helper()
	before := r.is.clone()
	must(r.t, r.tx.Part(r.t.Context()))
	for range r.rng.IntN(3) {
		key := itoa(r.rng.IntN(200))
		r.db.add(r.t, r.tx.Raw(), key)
		r.is.effects[key]++
	}
	if r.rng.IntN(2) == 0 {
		r.store()
	}
	if r.rng.IntN(4) == 0 {
		handled(r.t, r.tx.Raw(), fmt.Sprint("SAVEPOINT handlers_", r.rng.IntN(2)))
		r.db.add(r.t, r.tx.Raw(), "1")
		r.is.effects["1"]++
	}
	if r.rng.IntN(3) == 0 {
		must(r.t, r.tx.Undo(r.t.Context()))
		r.is = before
		return
	}
	must(r.t, r.tx.Keep(r.t.Context()))
}
