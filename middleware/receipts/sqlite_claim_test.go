package receipts_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestClaimAnswers(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		mustExec(t, db, counters)
		_, nonce := process(t, s, "held")
		mustExec(t, db, `INSERT INTO penstock_receipts VALUES (CAST('billing' AS BLOB), CAST('torn' AS BLOB), x'01', randomblob(16), 1, 5)`)
		diverted := claim("diverted")
		diverted.State = receipts.StateDiverted
		for name, claims := range map[string][]receipts.Claim{
			"one by one": nil, "together": {claim("torn"), claim("fresh"), claim("held"), diverted},
		} {
			t.Run(name, func(t *testing.T) {
				tx := begin(t, s)
				var results []receipts.ClaimResult
				if claims != nil {
					results = claimed(t, tx, claims...)
				} else {
					for _, c := range []receipts.Claim{claim("torn"), claim("fresh"), claim("held"), diverted} {
						results = append(results, claimed(t, tx, c)...)
					}
				}
				want := []receipts.ClaimStatus{receipts.ClaimTorn, receipts.ClaimFresh, receipts.ClaimHeld, receipts.ClaimFresh}
				for i, r := range results {
					if r.Status != want[i] {
						t.Errorf("claim %d has status %d, want %d", i, r.Status, want[i])
					}
				}
				held := results[2].Receipt
				if string(held.Fingerprint) != "print of held" || held.Nonce != nonce || held.State != receipts.StateDone ||
					!held.At.Equal(noon) {
					t.Errorf("the held receipt is %+v", held)
				}
				if again := claimed(t, tx, claim("fresh"))[0]; again.Status != receipts.ClaimHeld || again.Receipt.Nonce != tx.Nonce() {
					t.Errorf("a second claim in the same transaction: %+v, want held by it", again)
				}
				must(t, tx.Rollback(t.Context()))
			})
		}
		tx := begin(t, s)
		claimed(t, tx, diverted)
		must(t, tx.Commit(t.Context()))
		tx = begin(t, s)
		if r := claimed(t, tx, claim("diverted"))[0]; r.Status != receipts.ClaimHeld || r.Receipt.State != receipts.StateDiverted {
			t.Errorf("claim of a diverted identity: %+v", r)
		}
		wantStats(t, s, 1, 1, 1)
	})
}

func TestClaimLimits(t *testing.T) {
	d := modernc()
	s := migrated(t, d.open(t, d.file(t), "synchronous=OFF"))
	tx := begin(t, s)
	long := claim("a")
	long.Scope = strings.Repeat("s", receipts.MaxScope+1)
	noState := claim("a")
	noState.State = 0
	cases := map[string]struct {
		claims []receipts.Claim
		want   string
	}{
		"scope too long":  {[]receipts.Claim{long}, "the most is 512"},
		"key too long":    {[]receipts.Claim{claim(strings.Repeat("k", receipts.MaxKey+1))}, "the most is 512"},
		"empty key":       {[]receipts.Claim{claim("")}, "empty identity key"},
		"unknown state":   {[]receipts.Claim{noState}, "unknown state"},
		"twice in a call": {[]receipts.Claim{claim("a"), claim("b"), claim("a")}, "claimed twice"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := tx.Claim(t.Context(), c.claims)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Claim: %v, want an error with %q", err, c.want)
			}
		})
	}
	longest := claim(strings.Repeat("k", receipts.MaxKey))
	longest.Scope = strings.Repeat("s", receipts.MaxScope)
	if r := claimed(t, tx, longest)[0]; r.Status != receipts.ClaimFresh {
		t.Errorf("the longest identity: %+v", r)
	}
	if results, err := tx.Claim(t.Context(), nil); err != nil || len(results) != 0 {
		t.Errorf("no claims: %v, %v", results, err)
	}
}

// hostileKeys are keys that some database or driver has been seen to confuse.
func hostileKeys(rng *rand.Rand, random int) [][]byte {
	var keys [][]byte
	for _, s := range []string{
		"a", "A", "a ", "a  ", " a", "a\x00", "a\x00b", "\x00", "\x00\x00", "a\t", "a\n", "\xff", "\xff\xfe", "\xc3", "\xc3\xa9",
		"é", "e\u0301", "ß", "ss", "SS", "😀", "😀😀", "'", "''", "\"", "%", "%%", "_", "\\", "\\0", "a'--", "?", "?1", ":a", "@a", "$a",
		"NULL", "null", "0", "00", "1", "1.0", "1e0", "01", "x'61'", "true", "[1]", "{}", "\ufeff", "\u200b", "\u0130", "i", "I", "ı",
	} {
		keys = append(keys, []byte(s))
	}
	for b := range 256 {
		keys = append(keys, []byte{byte(b)}, []byte{'a', byte(b), 'a'}, bytes.Repeat([]byte{byte(b)}, receipts.MaxKey))
	}
	for n := 1; n <= receipts.MaxKey; n++ {
		keys = append(keys, bytes.Repeat([]byte{' '}, n), bytes.Repeat([]byte{0}, n))
	}
	for range random {
		key := make([]byte, 1+rng.IntN(24))
		for i := range key {
			key[i] = byte(rng.Uint32())
			if rng.IntN(3) == 0 {
				key[i] = "aA \x00"[rng.IntN(4)]
			}
		}
		keys = append(keys, key)
	}
	return distinct(keys)
}

func distinct(keys [][]byte) [][]byte {
	seen := map[string]bool{}
	var out [][]byte
	for _, k := range keys {
		if !seen[string(k)] {
			seen[string(k)] = true
			out = append(out, k)
		}
	}
	return out
}

// Every identity is itself and no other: claimed once as fresh, and found again with its own fingerprint.
func TestIdentityTorture(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d, %d random keys", seed, randomKeys)
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		keys := hostileKeys(rand.New(rand.NewPCG(seed, 0)), randomKeys)
		claims := make([]receipts.Claim, len(keys))
		for i, k := range keys {
			claims[i] = receipts.Claim{Scope: "s", Key: k, Fingerprint: []byte(itoa(i)), State: receipts.StateDone, At: noon}
		}
		tx := begin(t, s)
		for i, r := range claimed(t, tx, claims...) {
			if r.Status != receipts.ClaimFresh {
				t.Fatalf("key %q is taken for another: %+v", keys[i], r)
			}
		}
		must(t, tx.Commit(t.Context()))
		wantStats(t, s, len(keys), 0, 0)
		tx = begin(t, s)
		for i, r := range claimed(t, tx, claims...) {
			if r.Status != receipts.ClaimHeld || string(r.Receipt.Fingerprint) != itoa(i) {
				t.Fatalf("key %q gives the receipt of another: %+v", keys[i], r)
			}
		}
		for i := 0; i < len(keys); i += 7 { // and by the statements for a single claim
			r := claimed(t, tx, claims[i])[0]
			if r.Status != receipts.ClaimHeld || string(r.Receipt.Fingerprint) != itoa(i) {
				t.Fatalf("key %q gives the receipt of another: %+v", keys[i], r)
			}
		}
		must(t, tx.Commit(t.Context()))
	})
}

// The same bytes cut differently into scope and key are different identities, and scopes are bytes too.
func TestScopesSeparate(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		s := migrated(t, d.open(t, d.file(t), "synchronous=OFF"))
		scopes := []string{"", "a", "A", "a ", "a\x00", "\xff", "ab", "é", "e\u0301", strings.Repeat("x", 512)}
		tx := begin(t, s)
		for _, one := range []bool{true, false} {
			var claims []receipts.Claim
			for _, scope := range scopes {
				for _, key := range []string{"a", "b", "ab", "\x00b"} {
					c := claim(fmt.Sprint(one) + key)
					c.Scope = scope
					claims = append(claims, c)
				}
			}
			var results []receipts.ClaimResult
			if one {
				for _, c := range claims {
					results = append(results, claimed(t, tx, c)...)
				}
			} else {
				results = claimed(t, tx, claims...)
			}
			for i, r := range results {
				if r.Status != receipts.ClaimFresh {
					t.Errorf("scope %q, key %q is taken for another", claims[i].Scope, claims[i].Key)
				}
			}
		}
		must(t, tx.Commit(t.Context()))
		wantStats(t, s, 2*4*len(scopes), 0, 0)
	})
}

// A transaction of replays only changes nothing in the file: no marker, no version that other connections would notice.
func TestReplaysWriteNothing(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		db := d.open(t, path)
		s := migrated(t, db)
		mustExec(t, db, counters)
		process(t, s, "a")
		process(t, s, "b")
		watcher := d.open(t, path)
		watcher.SetMaxOpenConns(1)
		before := count(t, watcher, "PRAGMA data_version")
		for range 3 {
			if r, _ := process(t, s, "a"); r.Status != receipts.ClaimHeld {
				t.Fatalf("the replay's claim is %d", r.Status)
			}
			tx := begin(t, s)
			claimed(t, tx, claim("a"), claim("b"))
			must(t, tx.Commit(t.Context()))
		}
		if after := count(t, watcher, "PRAGMA data_version"); after != before {
			t.Errorf("data_version went from %d to %d: replays wrote", before, after)
		}
		process(t, s, "c")
		if after := count(t, watcher, "PRAGMA data_version"); after == before {
			t.Error("data_version does not show a write: this test cannot fail")
		}
		if markers := count(t, db, "SELECT count(*) FROM penstock_markers"); markers != 3 {
			t.Errorf("%d markers for 3 transactions with fresh claims", markers)
		}
	})
}

// No statement of the flow of messages reads a whole table.
func TestPlansUseKeys(t *testing.T) {
	wholeTable := regexp.MustCompile(`^SCAN (penstock_\w+|o|r|m)\b`)
	placeholder := regexp.MustCompile(`\?\d*`)
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		for name, query := range s.FlowQueries() {
			var plan strings.Builder
			rows, err := db.Query("EXPLAIN QUERY PLAN " + placeholder.ReplaceAllString(query, "7"))
			must(t, err)
			for rows.Next() {
				var id, parent, unused int
				var detail string
				must(t, rows.Scan(&id, &parent, &unused, &detail))
				plan.WriteString(detail + "\n")
			}
			must(t, rows.Err())
			must(t, rows.Close())
			for line := range strings.Lines(plan.String()) {
				scan := wholeTable.MatchString(line) && !strings.Contains(line, "USING INDEX")
				if scan || strings.Contains(line, "TEMP B-TREE FOR ORDER BY") && name == "unsent" {
					t.Errorf("%s reads a whole table:\n%s", name, plan.String())
				}
			}
		}
	})
}

// A statement that inserts many rows and may stop half-way makes SQLite copy every page it changes into a journal of its own
// first, on disk from the sixteenth page on. Nothing in the claim may abort half-way, in SQLite's sense: neither a
// constraint's usual resolution (2 in these operations), nor a function in a check.
func TestClaimsNeedNoStatementJournal(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		query := migrated(t, db).FlowQueries()["claim many"]
		rows, err := db.Query("EXPLAIN " + regexp.MustCompile(`\?\d*`).ReplaceAllString(query, "7"))
		must(t, err)
		halts := 0
		for rows.Next() {
			var address, p1, p2, p3, p5 int
			var op string
			var p4, comment any
			must(t, rows.Scan(&address, &op, &p1, &p2, &p3, &p4, &p5, &comment))
			switch op {
			case "Function", "PureFunc":
				t.Errorf("operation %d calls function %v", address, p4)
			case "Halt", "HaltIfNull":
				halts++
				if p1 != 0 && p2 == 2 {
					t.Errorf("operation %d, %s %d %v, aborts the statement", address, op, p1, p4)
				}
			}
		}
		must(t, rows.Err())
		must(t, rows.Close())
		if halts < 2 {
			t.Errorf("%d operations can stop the statement: this test looks at the wrong thing", halts)
		}
	})
}
