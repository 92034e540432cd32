package receipts

import (
	"bytes"
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

// Claim inserts up to 1,000 claims in one statement, more in one statement per 1,000. A scope is at most MaxScope bytes, a
// key 1 to MaxKey.
func (t *sqliteTx) Claim(ctx context.Context, claims []Claim) ([]ClaimResult, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	if err := checkClaims(claims); err != nil {
		return nil, fmt.Errorf("receipts: claim: %w", err)
	}
	if err := t.ready(ctx); err != nil {
		return nil, fmt.Errorf("receipts: claim: %w", err)
	}
	var results []ClaimResult
	var err error
	if len(claims) == 1 {
		results, err = t.claimOne(claims[0])
	} else {
		results, err = t.claimMany(claims)
	}
	if err != nil {
		return nil, fmt.Errorf("receipts: claim of %d identities, first %q in scope %q: %w",
			len(claims), claims[0].Key, claims[0].Scope, t.meaning(err))
	}
	for i, r := range results {
		if r.Status == ClaimFresh {
			c := claims[i]
			c.Key = bytes.Clone(c.Key)
			t.fresh = append(t.fresh, c)
		}
	}
	return results, nil
}

func checkClaims(claims []Claim) error {
	seen := make(map[identity]struct{}, len(claims))
	for _, c := range claims {
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
		id := identity{c.Scope, string(c.Key)}
		if _, twice := seen[id]; twice {
			return fmt.Errorf("identity key %q in scope %q is claimed twice in one call", c.Key, c.Scope)
		}
		seen[id] = struct{}{}
	}
	return nil
}

func (t *sqliteTx) claimOne(c Claim) ([]ClaimResult, error) {
	inserted, err := t.exec(t.s.q.claimOne, claimArgs(nil, t.nonce, c)...)
	if err != nil {
		return nil, err
	}
	n, err := inserted.RowsAffected()
	if err != nil {
		return nil, err
	}
	if n == 1 {
		return []ClaimResult{{Status: ClaimFresh}}, nil
	}
	_, result, err := t.scanHeld(t.queryRow(t.s.q.heldOne, []byte(c.Scope), c.Key).Scan)
	if err != nil {
		return nil, err
	}
	return []ClaimResult{result}, nil
}

func (t *sqliteTx) claimMany(claims []Claim) ([]ClaimResult, error) {
	index := make(map[identity]int, len(claims))
	for i, c := range claims {
		index[identity{c.Scope, string(c.Key)}] = i
	}
	sorted := slices.Clone(claims)
	slices.SortFunc(sorted, func(a, b Claim) int {
		if c := strings.Compare(a.Scope, b.Scope); c != 0 {
			return c
		}
		return bytes.Compare(a.Key, b.Key)
	})
	results := make([]ClaimResult, len(claims))
	for _, chunk := range chunks(sorted) {
		if err := t.insertClaims(chunk, index, results); err != nil {
			return nil, err
		}
	}
	held := slices.DeleteFunc(sorted, func(c Claim) bool {
		return results[index[identity{c.Scope, string(c.Key)}]].Status == ClaimFresh
	})
	for _, chunk := range chunks(held) {
		if err := t.selectHeld(chunk, index, results); err != nil {
			return nil, err
		}
	}
	for i, r := range results {
		if r.Status == 0 {
			return nil, fmt.Errorf("identity key %q is neither inserted nor there", claims[i].Key)
		}
	}
	return results, nil
}

func (t *sqliteTx) insertClaims(claims []Claim, index map[identity]int, results []ClaimResult) error {
	args := make([]any, 0, 6*len(claims))
	for _, c := range claims {
		args = claimArgs(args, t.nonce, c)
	}
	query := fmt.Sprintf(t.s.q.claimMany, tuples(len(claims), 6))
	return queryAll(t.ctx, t.tx, query, args, func(scan scanFunc) error {
		var scope, key []byte
		if err := scan(&scope, &key); err != nil {
			return err
		}
		results[index[identity{string(scope), string(key)}]].Status = ClaimFresh
		return nil
	})
}

func (t *sqliteTx) selectHeld(claims []Claim, index map[identity]int, results []ClaimResult) error {
	args := make([]any, 0, 2*len(claims))
	for _, c := range claims {
		args = append(args, []byte(c.Scope), c.Key)
	}
	query := fmt.Sprintf(t.s.q.heldMany, tuples(len(claims), 2))
	return queryAll(t.ctx, t.tx, query, args, func(scan scanFunc) error {
		id, result, err := t.scanHeld(scan)
		if err == nil {
			results[index[id]] = result
		}
		return err
	})
}

// scanHeld reads a receipt that was there. One of this very transaction counts as held: its marker comes at the end.
func (t *sqliteTx) scanHeld(scan scanFunc) (identity, ClaimResult, error) {
	var scope, key, nonce []byte
	var at int64
	var whole bool
	r := ClaimResult{Status: ClaimTorn}
	err := scan(&scope, &key, &r.Receipt.Fingerprint, &nonce, &r.Receipt.State, &at, &whole)
	if err != nil {
		return identity{}, ClaimResult{}, err
	}
	r.Receipt.Fingerprint = blob(r.Receipt.Fingerprint)
	r.Receipt.At = time.UnixMicro(at).UTC()
	if copy(r.Receipt.Nonce[:], nonce) != len(r.Receipt.Nonce) {
		return identity{}, ClaimResult{}, errors.New("a stored nonce is too short")
	}
	if whole || r.Receipt.Nonce == t.nonce {
		r.Status = ClaimHeld
	}
	return identity{string(scope), string(key)}, r, nil
}

func claimArgs(args []any, nonce Nonce, c Claim) []any {
	return append(args, nonce[:], []byte(c.Scope), c.Key, blob(c.Fingerprint), int64(c.State), c.At.UnixMicro())
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

// queryer is the part of *sql.Tx and *sql.Conn that queryAll needs.
type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// queryAll calls row for every row of a query and reports the first error, also one that ended the rows.
func queryAll(ctx context.Context, q queryer, query string, args []any, row func(scan scanFunc) error) error {
	rows, err := q.QueryContext(ctx, query, args...)
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
