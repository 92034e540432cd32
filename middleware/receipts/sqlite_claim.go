package receipts

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// identity is a claim's identity as a map key.
type identity struct{ scope, key string }

// freshClaim is a receipt that this transaction inserted, as far as Commit has to know it.
type freshClaim struct {
	scope string
	key   []byte
	at    int64
	call  int // of Claim
}

// Claim inserts up to 256 claims of one scope and state in one statement, the cheapest there is, and looks at the receipts
// only where not all of them are new. A scope is at most MaxScope bytes, a key 1 to MaxKey.
func (t *sqliteTx) Claim(ctx context.Context, claims []Claim) ([]ClaimResult, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	order, err := claimOrder(claims)
	if err != nil {
		return nil, fmt.Errorf("receipts: claim: %w", err)
	}
	if err := t.outsideParts(ctx); err != nil {
		return nil, fmt.Errorf("receipts: claim: %w", err)
	}
	if err := t.ready(ctx); err != nil {
		return nil, fmt.Errorf("receipts: claim: %w", err)
	}
	c := claiming{t: t, claims: claims, results: make([]ClaimResult, len(claims))}
	if err := c.all(order); err != nil {
		return nil, fmt.Errorf("receipts: claim of %d identities, first %q in scope %q: %w",
			len(claims), claims[0].Key, claims[0].Scope, t.meaning(err))
	}
	t.remember(claims, order, c.results)
	return c.results, nil
}

// claimOrder checks the claims and gives the order to insert them in: by scope and key.
func claimOrder(claims []Claim) ([]int, error) {
	order := make([]int, len(claims))
	for i := range claims {
		if err := checkClaim(&claims[i]); err != nil {
			return nil, err
		}
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(strings.Compare(claims[a].Scope, claims[b].Scope), bytes.Compare(claims[a].Key, claims[b].Key))
	})
	for i := 1; i < len(order); i++ {
		if a, b := &claims[order[i-1]], &claims[order[i]]; a.Scope == b.Scope && bytes.Equal(a.Key, b.Key) {
			return nil, fmt.Errorf("identity key %q in scope %q is claimed twice in one call", b.Key, b.Scope)
		}
	}
	return order, nil
}

func checkClaim(c *Claim) error {
	switch {
	case len(c.Scope) > MaxScope:
		return fmt.Errorf("scope of %d bytes: the most is %d", len(c.Scope), MaxScope)
	case len(c.Key) == 0:
		return fmt.Errorf("empty identity key in scope %q", c.Scope)
	case len(c.Key) > MaxKey:
		return fmt.Errorf("identity key of %d bytes in scope %q: the most is %d", len(c.Key), c.Scope, MaxKey)
	case c.State != StateDone && c.State != StateDiverted:
		return fmt.Errorf("identity key %q in scope %q: unknown state %d", c.Key, c.Scope, c.State)
	}
	return nil
}

// remember keeps the fresh claims for Commit, with keys of its own.
func (t *sqliteTx) remember(claims []Claim, order []int, results []ClaimResult) {
	rows, size := 0, 0
	for _, i := range order {
		if results[i].Status == ClaimFresh {
			rows, size = rows+1, size+len(claims[i].Key)
		}
	}
	t.fresh = slices.Grow(t.fresh, rows)
	t.calls++
	keys := make([]byte, 0, size)
	for _, i := range order {
		if results[i].Status == ClaimFresh {
			c := &claims[i]
			from := len(keys)
			keys = append(keys, c.Key...)
			t.fresh = append(t.fresh, freshClaim{scope: c.Scope, key: keys[from:len(keys):len(keys)], at: c.At.UnixMicro(), call: t.calls})
		}
	}
}

// claiming is one call of Claim.
type claiming struct {
	t       *sqliteTx
	claims  []Claim
	results []ClaimResult
	args    []any
	// earlier are the identities that earlier calls of this transaction claimed, where somebody asked.
	earlier map[identity]bool
}

// all claims in key order, those of one scope and state that follow each other at a time.
func (c *claiming) all(order []int) error {
	for len(order) > 0 {
		first, n := &c.claims[order[0]], 1
		for n < len(order) && c.claims[order[n]].Scope == first.Scope && c.claims[order[n]].State == first.State {
			n++
		}
		run := order[:n]
		c.args = slices.Grow(c.args[:0], 3+3*min(n, flowMost))
		err := sized(n, func(size flow, from, to int) error { return c.insert(size, run[from:to]) })
		if err != nil {
			return err
		}
		order = order[n:]
	}
	return nil
}

// insert inserts the receipts of claims of one scope and state. Where as many rows come into being as were asked for, all
// of them are fresh.
func (c *claiming) insert(size flow, rows []int) error {
	first := &c.claims[rows[0]]
	c.args = append(c.args[:0], c.t.nonce[:], []byte(first.Scope), int64(first.State))
	for _, i := range rows {
		claim := &c.claims[i]
		c.args = append(c.args, claim.Key, blob(claim.Fingerprint), claim.At.UnixMicro())
	}
	inserted, err := c.t.exec(flowClaim+size, c.args...)
	if err != nil {
		return err
	}
	n, err := inserted.RowsAffected()
	if err != nil {
		return err
	}
	if int(n) != len(rows) {
		return c.look(size, rows)
	}
	for _, i := range rows {
		c.results[i].Status = ClaimFresh
	}
	return nil
}

// look reads the receipts of claims that are not all fresh. A receipt with this transaction's nonce was inserted just now,
// unless an earlier call did it.
func (c *claiming) look(size flow, rows []int) error {
	c.args = c.args[:0]
	for _, i := range rows {
		c.args = append(c.args, c.claims[i].Key)
	}
	c.args = append(c.args, []byte(c.claims[rows[0]].Scope))
	found, err := c.t.query(flowHeld+size, c.args...)
	err = eachRow(found, err, func(scan scanFunc) error {
		row, receipt, whole, err := scanHeld(scan)
		if err != nil {
			return err
		}
		i := rows[row]
		switch own := receipt.Nonce == c.t.nonce; {
		case own && !c.isEarlier(&c.claims[i]):
			c.results[i] = ClaimResult{Status: ClaimFresh}
		case own || whole: // the marker of this very transaction comes at the end
			c.results[i] = ClaimResult{Status: ClaimHeld, Receipt: receipt}
		default:
			c.results[i] = ClaimResult{Status: ClaimTorn, Receipt: receipt}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, i := range rows {
		if c.results[i].Status == 0 {
			return fmt.Errorf("identity key %q is neither inserted nor there", c.claims[i].Key)
		}
	}
	return nil
}

func (c *claiming) isEarlier(claim *Claim) bool {
	if c.earlier == nil {
		c.earlier = make(map[identity]bool, len(c.t.fresh))
		for _, f := range c.t.fresh {
			c.earlier[identity{f.scope, string(f.key)}] = true
		}
	}
	return c.earlier[identity{claim.Scope, string(claim.Key)}]
}

// scanHeld reads a receipt, and which of the claims asked for it.
func scanHeld(scan scanFunc) (row int, r Receipt, whole bool, err error) {
	var nonce []byte
	var at int64
	if err := scan(&row, &r.Fingerprint, &nonce, &r.State, &at, &whole); err != nil {
		return 0, Receipt{}, false, err
	}
	if copy(r.Nonce[:], nonce) != len(r.Nonce) {
		return 0, Receipt{}, false, errors.New("a stored nonce is too short")
	}
	r.Fingerprint, r.At = blob(r.Fingerprint), time.UnixMicro(at).UTC()
	return row, r, whole, nil
}

// blob keeps an empty value a value: drivers store a nil slice as NULL, and modernc reads an empty BLOB as nil.
func blob(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// chunks cuts rows into what one statement takes.
func chunks[T any](rows []T) [][]T {
	return slices.Collect(slices.Chunk(rows, sqliteChunk))
}

type scanFunc func(dest ...any) error

// queryAll calls row for every row of a query and reports the first error, also one that ended the rows.
func queryAll(ctx context.Context, conn *sql.Conn, query string, args []any, row func(scan scanFunc) error) error {
	rows, err := conn.QueryContext(ctx, query, args...)
	return eachRow(rows, err, row)
}

// eachRow calls row for every row of what a query gave.
func eachRow(rows *sql.Rows, err error, row func(scan scanFunc) error) error {
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		if err := row(rows.Scan); err != nil {
			return err
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	return rows.Close()
}
