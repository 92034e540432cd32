package receipts

import (
	"bytes"
	"context"
	"fmt"
	"slices"
)

// Part begins a message's part with a savepoint inside that of Begin.
func (t *sqliteTx) Part(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("receipts: beginning a message's part: %w", err)
	}
	if _, err := t.exec(t.s.q.part); err != nil {
		return fmt.Errorf("receipts: beginning a message's part: %w", t.meaning(err))
	}
	return nil
}

// Keep releases the savepoint of Part, which is not there any more if somebody ended the transaction since.
func (t *sqliteTx) Keep(context.Context) error {
	if _, err := t.exec(t.s.q.keep); err != nil {
		return fmt.Errorf("receipts: keeping a message's part: %w", t.sealError(err))
	}
	return nil
}

// Undo rolls back to the savepoint of Part and releases it.
func (t *sqliteTx) Undo(context.Context) error {
	_, err := t.exec(t.s.q.undo)
	if err == nil {
		_, err = t.exec(t.s.q.keep)
	}
	if err != nil {
		return fmt.Errorf("receipts: undoing a message's part: %w", t.sealError(err))
	}
	return nil
}

// Unclaim deletes fresh receipts.
func (t *sqliteTx) Unclaim(ctx context.Context, claims []Claim) error {
	if len(claims) == 0 {
		return nil
	}
	if err := t.ready(ctx); err != nil {
		return fmt.Errorf("receipts: giving up %d claims: %w", len(claims), err)
	}
	for _, chunk := range chunks(claims) {
		args := make([]any, 0, 2*len(chunk)+1)
		args = append(args, t.nonce[:])
		for _, c := range chunk {
			args = append(args, []byte(c.Scope), c.Key)
		}
		if _, err := t.exec(fmt.Sprintf(t.s.q.unclaimMany, tuples(len(chunk), 2)), args...); err != nil {
			return fmt.Errorf("receipts: giving up %d claims: %w", len(claims), t.meaning(err))
		}
	}
	t.fresh = slices.DeleteFunc(t.fresh, func(f Claim) bool {
		return slices.ContainsFunc(claims, func(c Claim) bool { return c.Scope == f.Scope && bytes.Equal(c.Key, f.Key) })
	})
	return nil
}
