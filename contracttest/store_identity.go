package contracttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// receiptIdentityClauses are about what counts as the same identity in the database.
func receiptIdentityClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S11", Name: "identities are bytes in the database",
				Text: "scopes and keys are compared byte by byte: case, blanks, NUL, accents, invalid UTF-8, quotes, wildcards, 1 byte " +
					"to the limit, and random ones",
			},
			check: bytewise[T],
		},
		{
			Clause: Clause{
				ID: "S12", Name: "what is no identity is refused",
				Text: "an empty key, a key or scope over the limit, an unknown state, and one identity twice in a call are errors, " +
					"and claim nothing",
			},
			check: noIdentity[T],
		},
	}
}

// torture are identities that are easily taken for one another.
func torture() []string {
	longest := strings.Repeat("k", receipts.MaxKey)
	return append(distinct(),
		"😀", "😁", "😀\x00", `\`, `\\`, `\'`, `"`, "`", "''", "_", "%%", "a_", "a%", "--", ";", "$1", "?", ":a", "{}", "\r", "\n", "\r\n", "\x7f",
		"\x80", "\xc0\x80", "\xed\xa0\x80", "\u200b", "a\u200b", "A\u030a", "Å", "\u212b", "I", "ı", "İ", "i", "æ", "ae", "Ω", "\u2126", "null", "NULL",
		"0", "00", "0x00", "1", "1.0", "１", strings.Repeat("\x00", receipts.MaxKey), strings.Repeat("\x00", receipts.MaxKey-1),
		strings.Repeat(" ", receipts.MaxKey), strings.Repeat("é", receipts.MaxKey/2), longest[:receipts.MaxKey-1]+"\xff",
	)
}

func bytewise[T any](ctx context.Context, e *storeEnv[T]) error {
	ids := torture()
	for i, id := range ids {
		// One after the other, so that each meets all those before it in the tables.
		if _, err := e.commits(ctx, e.a, []string{id}, nil); err != nil {
			return fmt.Errorf("key number %d, %q: %w", i, cut(id), err)
		}
	}
	if err := e.ownPrints(ctx, ids); err != nil {
		return err
	}
	if err := e.scopes(ctx, ids); err != nil {
		return err
	}
	random := randomKeys(2000)
	for chunk := range slices.Chunk(random, 500) {
		if _, err := e.commits(ctx, e.a, chunk, nil); err != nil {
			return fmt.Errorf("random keys: %w", err)
		}
	}
	return e.ownPrints(ctx, random)
}

// cut keeps a name short in a message.
func cut(s string) string { return s[:min(len(s), 40)] }

// ownPrints wants every key to be held with its own fingerprint.
func (e *storeEnv[T]) ownPrints(ctx context.Context, ids []string) error {
	results, err := e.ask(ctx, ids...)
	if err != nil {
		return err
	}
	if err := answers(ids, results, receipts.ClaimHeld); err != nil {
		return err
	}
	for i, r := range results {
		if !bytes.Equal(r.Receipt.Fingerprint, printOf(ids[i])) {
			return fmt.Errorf("the receipt of key %q is that of %q", cut(ids[i]), cut(string(r.Receipt.Fingerprint)))
		}
	}
	return nil
}

// scopes claims one key in as many scopes, all in one call.
func (e *storeEnv[T]) scopes(ctx context.Context, scopes []string) error {
	claims := make([]receipts.Claim, len(scopes))
	for i, scope := range scopes {
		claims[i] = e.claim("the same for all")
		claims[i].Scope, claims[i].Fingerprint = scope, printOf(scope)
	}
	for _, want := range []receipts.ClaimStatus{receipts.ClaimFresh, receipts.ClaimHeld} {
		tx, err := e.begin(ctx, e.b, receipts.TxOptions{})
		if err != nil {
			return err
		}
		results, err := tx.Claim(ctx, claims)
		if err != nil {
			return fmt.Errorf("Claim in %d scopes: %w", len(scopes), err)
		}
		if err := answers(scopes, results, want); err != nil {
			return fmt.Errorf("scopes: %w", err)
		}
		for i, r := range results {
			if want == receipts.ClaimHeld && !bytes.Equal(r.Receipt.Fingerprint, printOf(scopes[i])) {
				return fmt.Errorf("the receipt in scope %q is that of %q", cut(scopes[i]), cut(string(r.Receipt.Fingerprint)))
			}
		}
		if err := tx.Commit(ctx); err != nil {
			return fmt.Errorf("Commit: %w", err)
		}
	}
	return nil
}

// randomKeys gives n keys of which no two are the same, the same ones every time: short ones of bytes that some systems do
// not tell apart, and some of any bytes and length.
func randomKeys(n int) []string {
	r := rand.New(rand.NewPCG(3, 4)) //nolint:gosec // the same every time
	const alike = "aAáÁàbB  \t\x00\x00%_\\'ßs\xff\xfe"
	seen := map[string]bool{}
	keys := make([]string, 0, n)
	for len(keys) < n {
		key := make([]byte, 1+r.IntN(6))
		if len(keys)%4 == 0 {
			key = make([]byte, 1+r.IntN(receipts.MaxKey))
		}
		for i := range key {
			key[i] = alike[r.IntN(len(alike))]
			if len(keys)%8 == 0 {
				key[i] = byte(r.IntN(256)) //nolint:gosec // below 256
			}
		}
		if name := "r" + string(key); len(name) <= receipts.MaxKey && !seen[name] {
			seen[name] = true
			keys = append(keys, name)
		}
	}
	return keys
}

func noIdentity[T any](ctx context.Context, e *storeEnv[T]) error {
	good := e.claim("good")
	bad := map[string]func(*receipts.Claim){
		"an empty key":             func(c *receipts.Claim) { c.Key = nil },
		"a key over the limit":     func(c *receipts.Claim) { c.Key = bytes.Repeat([]byte("k"), receipts.MaxKey+1) },
		"a scope over the limit":   func(c *receipts.Claim) { c.Scope = strings.Repeat("s", receipts.MaxScope+1) },
		"no state":                 func(c *receipts.Claim) { c.State = 0 },
		"the same identity, twice": func(c *receipts.Claim) { c.Key, c.Fingerprint = []byte("good"), []byte("other") },
	}
	for what, change := range bad {
		tx, err := e.begin(ctx, e.a, receipts.TxOptions{})
		if err != nil {
			return err
		}
		c := e.claim("bad")
		change(&c)
		_, err = tx.Claim(ctx, []receipts.Claim{good, c})
		switch {
		case err == nil:
			return fmt.Errorf("%s is taken", what)
		case e.a.Classify(err) != receipts.ClassOther:
			return fmt.Errorf("%s: Classify takes it for the database's own trouble: %w", what, err)
		}
		if err := tx.Rollback(ctx); err != nil {
			return fmt.Errorf("Rollback: %w", err)
		}
	}
	return errors.Join(e.wants(ctx, receipts.ClaimFresh, "good", "bad"), e.untouched(ctx))
}
