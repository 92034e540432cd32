package receipts

import (
	"context"
	"fmt"
	"slices"
)

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
	c := claiming{t: t, claims: claims, results: make([]ClaimResult, len(claims)), earlier: earlier{fresh: t.fresh}}
	if err := c.all(order); err != nil {
		return nil, fmt.Errorf("receipts: claim of %d identities, first %q in scope %q: %w",
			len(claims), claims[0].Key, claims[0].Scope, t.meaning(err))
	}
	t.fresh.remember(claims, order, c.results)
	return c.results, nil
}

// claiming is one call of Claim.
type claiming struct {
	t       *sqliteTx
	claims  []Claim
	results []ClaimResult
	args    []any
	earlier earlier
}

// all claims in key order, those of one scope and state that follow each other at a time.
func (c *claiming) all(order []int) error {
	for len(order) > 0 {
		n := claimRun(c.claims, order)
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

// look reads the receipts of claims that are not all fresh.
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
		c.results[i] = heldResult(c.t.nonce, &c.earlier, &c.claims[i], receipt, whole)
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

// chunks cuts rows into what one statement takes.
func chunks[T any](rows []T) [][]T {
	return slices.Collect(slices.Chunk(rows, sqliteChunk))
}
