package receipts_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// strangeIdentities are what identities have been lost by.
func strangeIdentities() [][]byte {
	return [][]byte{
		{0},
		{0, 0},
		{0xff},
		{0xff, 0xfe},
		[]byte("a"), []byte("A"), []byte("a "), []byte("a  "), []byte(" a"), []byte("a\x00"), []byte("a\x00 "),
		[]byte("ä"), []byte("a\u0308"), []byte("Ä"), []byte("😀"), []byte("😁"), []byte("'"), []byte("''"), []byte(`"`), []byte(`\`), []byte(`\\`),
		[]byte(`\x61`), []byte("%"), []byte("%%"), []byte("_"), []byte("{}"), []byte(`{"a"}`), []byte("NULL"), []byte("null"), []byte(","),
		[]byte("ß"), []byte("ss"), []byte("I"), []byte("ı"), []byte("\n"), []byte("\r\n"), []byte("$1"), []byte("?"),
		{0xc0, 0x80},
		{0xed, 0xa0, 0x80},
		bytes.Repeat([]byte{0}, receipts.MaxKey), bytes.Repeat([]byte("x"), receipts.MaxKey), bytes.Repeat([]byte("x"), receipts.MaxKey-1),
		append(bytes.Repeat([]byte("x"), receipts.MaxKey-1), 'y'), bytes.Repeat([]byte{0xff}, receipts.MaxKey),
	}
}

// TestPostgresIdentityTorture claims strange and random identities together, and finds each again under its own name.
func TestPostgresIdentityTorture(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // reproducible
		keys := strangeIdentities()
		for len(keys) < 3000 {
			key := make([]byte, 1+random.IntN(40))
			for i := range key {
				key[i] = byte(random.UintN(256))
			}
			keys = append(keys, key)
		}
		var claims []receipts.Claim
		seen := map[string]bool{}
		for i, key := range keys {
			scope := []string{"billing", "Billing", "billing ", "b\x00\xff'"}[i%4]
			id := scope + "/" + string(key)
			if seen[id] {
				continue
			}
			seen[id] = true
			claims = append(claims, receipts.Claim{
				Scope: scope, Key: key, Fingerprint: fmt.Appendf(nil, "%d", i), State: receipts.State(1 + i%2), At: noon.Add(time.Duration(i) * time.Second),
			})
		}
		tx := db.tx(t)
		results, err := tx.Claim(t.Context(), claims)
		must(t, err)
		for i, r := range results {
			if r.Status != receipts.ClaimFresh {
				t.Fatalf("%q in %q is not fresh: %+v", claims[i].Key, claims[i].Scope, r)
			}
		}
		must(t, tx.Commit(t.Context()))
		random.Shuffle(len(claims), func(i, j int) { claims[i], claims[j] = claims[j], claims[i] })
		second := db.tx(t)
		results, err = second.Claim(t.Context(), claims)
		must(t, err)
		for i, r := range results {
			c := claims[i]
			if r.Status != receipts.ClaimHeld || !bytes.Equal(r.Receipt.Fingerprint, c.Fingerprint) || r.Receipt.State != c.State ||
				!r.Receipt.At.Equal(c.At) || r.Receipt.Nonce != tx.Nonce() {
				t.Fatalf("%q in %q: %+v", c.Key, c.Scope, r)
			}
		}
	})
}

func TestPostgresRefusesIdentities(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		for name, c := range map[string]receipts.Claim{
			"empty key":  {Scope: "s", State: receipts.StateDone},
			"long key":   {Scope: "s", Key: make([]byte, receipts.MaxKey+1), State: receipts.StateDone},
			"long scope": {Scope: strings.Repeat("s", receipts.MaxScope+1), Key: []byte("k"), State: receipts.StateDone},
			"no state":   {Scope: "s", Key: []byte("k")},
		} {
			if _, err := db.tx(t).Claim(t.Context(), []receipts.Claim{c}); err == nil {
				t.Errorf("%s is accepted", name)
			}
		}
		if _, err := db.tx(t).Claim(t.Context(), claimList("a", "b", "a")); err == nil || !strings.Contains(err.Error(), "twice") {
			t.Error(err)
		}
	})
}

// TestPostgresStoredMessages keep every byte.
func TestPostgresStoredMessages(t *testing.T) {
	t.Parallel()
	strange := "a\x00\xff'\\\"{},NULL"
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		tx := db.claimed(t, "a")
		want, err := tx.AddOutputs(t.Context(), []receipts.Output{
			{Scope: strange, Key: []byte(strange), Topic: strange, UUID: strange, Metadata: map[string]string{strange: strange, "": ""}, Payload: []byte(strange), At: noon},
			{Scope: "billing", Key: []byte("a"), Topic: "out", UUID: "2", At: noon, Payload: bytes.Repeat([]byte{0, 1, 2, 0xff}, 1<<18)},
			{Scope: "billing", Key: []byte("a"), Topic: "out", UUID: "3", At: noon, ViaRouter: true},
		})
		must(t, err)
		letters := []receipts.DeadLetter{
			{
				Scope: strange, Key: []byte(strange), Fingerprint: []byte(strange), Kind: receipts.KindConflict, Reason: "b\x00\xff\"\\" + strings.Repeat("x", 3000),
				Consumer: strange, Handler: strange, Topic: strange, UUID: strange, Metadata: map[string]string{"k": strange}, Payload: []byte(strange), At: noon,
			},
			{Scope: "s", Kind: receipts.KindRefused, At: noon.Add(time.Second)},
		}
		must(t, tx.Divert(t.Context(), letters))
		must(t, tx.Divert(t.Context(), letters)) // again: left alone
		must(t, tx.Commit(t.Context()))

		unsent, err := db.store.Unsent(t.Context(), receipts.UnsentQuery{Limit: 10})
		must(t, err)
		if len(unsent) != 2 {
			t.Fatalf("%d unsent", len(unsent))
		}
		for i, o := range unsent {
			w := want[i]
			if o.OutputRef != w.OutputRef || o.Scope != w.Scope || !bytes.Equal(o.Key, w.Key) || o.Topic != w.Topic || o.UUID != w.UUID ||
				!bytes.Equal(o.Payload, w.Payload) || !o.At.Equal(w.At) || len(o.Metadata) != len(w.Metadata) || o.Metadata[strange] != w.Metadata[strange] {
				t.Errorf("output %d: %.200v", i, o)
			}
		}
		for _, prefix := range []string{"a\x00", "billing", "none"} {
			some, err := db.store.Unsent(t.Context(), receipts.UnsentQuery{Limit: 10, Prefix: prefix})
			must(t, err)
			if len(some) != map[string]int{"a\x00": 1, "billing": 1}[prefix] {
				t.Errorf("prefix %q: %d", prefix, len(some))
			}
		}
		must(t, db.store.MarkSent(t.Context(), []receipts.OutputRef{want[0].OutputRef, want[1].OutputRef, {Position: 99}}, noon))
		got, err := db.store.DeadLetters(t.Context(), 10)
		must(t, err)
		if len(got) != 2 || got[0].Topic != strange || got[0].Metadata["k"] != strange || !bytes.Equal(got[0].Key, letters[0].Key) ||
			!strings.HasPrefix(got[0].Reason, "b\uFFFD\uFFFD\"\\x") || len(got[0].Reason) > 1100 || len(got[1].Key) != 0 {
			t.Errorf("dead letters: %.300v", got)
		}
		stats, err := db.store.Stats(t.Context())
		must(t, err)
		if stats.Unsent != 0 || stats.Outputs != 3 || stats.DeadLetters[receipts.KindConflict] != 1 || stats.DeadLetters[receipts.KindRefused] != 1 {
			t.Errorf("stats: %+v", stats)
		}
	})
}

// TestPostgresParkedInOrder: positions become visible in their order, however many park at a time.
func TestPostgresParkedInOrder(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		const parkers, each = 6, 10
		var all sync.WaitGroup
		for p := range parkers {
			all.Go(func() {
				for i := range each {
					err := db.store.Park(context.Background(), []receipts.Parked{
						{Scope: "s", OrderKey: "k\x00", UUID: fmt.Sprint(p, i, "first"), At: noon}, {Scope: "s", OrderKey: "k\x00", UUID: fmt.Sprint(p, i, "second"), At: noon},
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		done := make(chan struct{})
		go func() { all.Wait(); close(done) }()
		var seen []receipts.Parked
		after := int64(0)
		for over := false; ; {
			page, err := db.store.Parked(t.Context(), "s", "k\x00", after, 7)
			must(t, err)
			seen = append(seen, page...)
			if len(page) > 0 {
				after = page[len(page)-1].Position
				continue
			}
			if over {
				break
			}
			select {
			case <-done:
				over = true
			case <-time.After(time.Millisecond):
			}
		}
		if len(seen) != 2*parkers*each {
			t.Errorf("read %d of %d: some became visible behind those that were read", len(seen), 2*parkers*each)
		}
		keys, err := db.store.ParkedKeys(t.Context(), "s")
		must(t, err)
		if len(keys) != 1 || keys[0].Messages != len(seen) || keys[0].OrderKey != "k\x00" {
			t.Errorf("keys: %+v", keys)
		}
		var positions []int64
		for _, p := range seen {
			positions = append(positions, p.Position)
		}
		if !slices.IsSorted(positions) {
			t.Error("not in order")
		}
		must(t, db.store.Unpark(t.Context(), append(positions, 1<<40)))
		if keys, err := db.store.ParkedKeys(t.Context(), "s"); err != nil || len(keys) != 0 {
			t.Error(keys, err)
		}
	})
}

// TestPostgresTwoProcessesClaimTheSame: of many that claim overlapping identities in any order, each identity goes to one, and
// none meets a deadlock.
func TestPostgresTwoProcessesClaimTheSame(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		const workers, rounds, identities = 5, 8, 60
		handles := []*pgHandle{db.pgHandle, openPg(t, db.at, db.client, pgOptions{})}
		var mu sync.Mutex
		fresh := map[string]int{}
		var all sync.WaitGroup
		for w := range workers {
			h := handles[w%2]
			all.Go(func() {
				for range rounds {
					keys := make([]string, identities)
					for i, k := range rand.Perm(identities) {
						keys[i] = itoa(k)
					}
					tx, err := h.begin(context.Background(), receipts.TxOptions{Budget: time.Minute})
					if err != nil {
						t.Error(err)
						return
					}
					results, err := tx.Claim(context.Background(), claimList(keys[:30]...))
					if err == nil {
						err = tx.Commit(context.Background())
					}
					if err != nil {
						t.Error(errors.Join(err, tx.Rollback(context.Background())))
						return
					}
					mu.Lock()
					for i, r := range results {
						if r.Status == receipts.ClaimFresh {
							fresh[keys[i]]++
						}
					}
					mu.Unlock()
				}
			})
		}
		all.Wait()
		for key, n := range fresh {
			if n != 1 {
				t.Errorf("%s was fresh %d times", key, n)
			}
		}
		db.wantStats(t, len(fresh), 0, 0)
		if n := db.count(t, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`); n != 0 {
			t.Errorf("%d deadlocks", n)
		}
	})
}
