package memstore

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// transaction is an open transaction as the middleware sees it.
type transaction struct {
	tx        *Tx
	budget    *time.Timer // nil without one
	claimWait time.Duration
	next      int // position of the next output
}

var _ receipts.Tx[*Tx] = (*transaction)(nil)

// Raw gives what a handler writes with.
func (t *transaction) Raw() *Tx { return t.tx }

// Nonce names the transaction.
func (t *transaction) Nonce() receipts.Nonce { return t.tx.nonce }

// write runs a statement of the store. An error names the end of the transaction as the store's contract does.
func (t *transaction) write(ctx context.Context, statement func() error) error {
	return t.meaning(t.tx.write(ctx, statement))
}

// meaning says whose doing it is that the transaction is over.
func (t *transaction) meaning(err error) error {
	switch {
	case errors.Is(err, ErrEnded) && t.hasExpired():
		return fmt.Errorf("%w: %w", receipts.ErrBudgetEnded, err)
	case errors.Is(err, ErrEnded), errors.Is(err, ErrFailed):
		return fmt.Errorf("%w: %w", receipts.ErrTxEnded, err)
	default:
		return err
	}
}

func (t *transaction) hasExpired() bool {
	t.tx.db.mu.Lock()
	defer t.tx.db.mu.Unlock()
	return t.tx.expired
}

// Claim inserts receipts, each a unique insert, in key order.
func (t *transaction) Claim(ctx context.Context, wanted []receipts.Claim) ([]receipts.ClaimResult, error) {
	if err := checkClaims(wanted); err != nil {
		return nil, err
	}
	order := make([]int, len(wanted))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int {
		a, b := wanted[i], wanted[j]
		return cmp.Or(strings.Compare(a.Scope, b.Scope), bytes.Compare(a.Key, b.Key))
	})
	results := make([]receipts.ClaimResult, len(wanted))
	err := t.write(ctx, func() error {
		if t.tx.part != nil {
			return errors.New("memstore: Claim inside a part")
		}
		p := &patience{ctx: ctx, limit: t.claimWait}
		for _, i := range order {
			var err error
			if results[i], err = t.claim(wanted[i], p); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return results, nil
}

func checkClaims(wanted []receipts.Claim) error {
	seen := make(map[id]struct{}, len(wanted))
	for _, c := range wanted {
		key := id{c.Scope, string(c.Key)}
		_, twice := seen[key]
		switch {
		case twice:
			return fmt.Errorf("memstore: identity key %q in scope %q is claimed twice in one call", c.Key, c.Scope)
		case len(c.Scope) > receipts.MaxScope, len(c.Key) == 0, len(c.Key) > receipts.MaxKey:
			return fmt.Errorf("memstore: claim: a scope of %d bytes, a key of %d", len(c.Scope), len(c.Key))
		case c.State != receipts.StateDone && c.State != receipts.StateDiverted:
			return fmt.Errorf("memstore: claim: unknown state %d", c.State)
		}
		seen[key] = struct{}{}
	}
	return nil
}

// claim inserts one receipt. It is called under the mutex, which it leaves while it waits.
func (t *transaction) claim(c receipts.Claim, p *patience) (receipts.ClaimResult, error) {
	tx, db, key := t.tx, t.tx.db, id{c.Scope, string(c.Key)}
	if r, ours := tx.all.receipts[key]; ours {
		return receipts.ClaimResult{Status: receipts.ClaimHeld, Receipt: r}, nil
	}
	if r, there := db.receipts[key]; there {
		return db.heldOrTorn(r), nil
	}
	locked := len(tx.held)
	if err := db.acquire(tx, row{table: claims, a: c.Scope, b: key.key}, p); err != nil {
		return receipts.ClaimResult{}, err
	}
	if r, there := db.receipts[key]; there { // the one we waited for has committed
		tx.releaseFrom(locked)
		return db.heldOrTorn(r), nil
	}
	if tx.all.receipts == nil {
		tx.all.receipts = map[id]receipts.Receipt{}
	}
	tx.all.receipts[key] = receipts.Receipt{
		Fingerprint: bytes.Clone(c.Fingerprint), Nonce: tx.nonce, State: c.State, At: c.At,
	}
	return receipts.ClaimResult{Status: receipts.ClaimFresh}, nil
}

func (d *Database) heldOrTorn(r receipts.Receipt) receipts.ClaimResult {
	status := receipts.ClaimTorn
	if d.whole(r.Nonce) {
		status = receipts.ClaimHeld
	}
	return receipts.ClaimResult{Status: status, Receipt: r}
}

// Unclaim deletes fresh receipts. Their rows stay locked until the transaction ends, as those of a server's database do.
func (t *transaction) Unclaim(ctx context.Context, given []receipts.Claim) error {
	return t.write(ctx, func() error {
		if t.tx.part != nil {
			return errors.New("memstore: Unclaim inside a part")
		}
		for _, c := range given {
			delete(t.tx.all.receipts, id{c.Scope, string(c.Key)})
		}
		return nil
	})
}

// Part begins a part.
func (t *transaction) Part(ctx context.Context) error {
	if t.tx.db.opts.WithoutParts {
		return ErrNoParts
	}
	return t.write(ctx, func() error {
		if t.tx.part != nil {
			return errors.New("memstore: Part inside a part")
		}
		t.tx.part, t.tx.before = &changes{}, len(t.tx.held)
		return nil
	})
}

// Keep ends the part and keeps its changes.
func (t *transaction) Keep(ctx context.Context) error {
	return t.endPart(ctx, t.tx.keepPart)
}

// Undo ends the part without its changes and releases the rows that it locked. After it a part that failed is forgotten.
func (t *transaction) Undo(ctx context.Context) error {
	t.tx.forgive()
	return t.endPart(ctx, func() {
		t.tx.part = nil
		t.tx.releaseFrom(t.tx.before)
	})
}

func (t *transaction) endPart(ctx context.Context, end func()) error {
	if t.tx.db.opts.WithoutParts {
		return ErrNoParts
	}
	return t.write(ctx, func() error {
		if t.tx.part == nil {
			return errors.New("memstore: there is no part to end")
		}
		end()
		return nil
	})
}

// AddOutputs stores outputs.
func (t *transaction) AddOutputs(ctx context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	stored := slices.Clone(outputs)
	err := t.write(ctx, func() error {
		for i := range stored {
			stored[i].OutputRef = receipts.OutputRef{Nonce: t.tx.nonce, Position: t.next}
			t.next++
		}
		c := t.tx.current()
		c.outputs = append(c.outputs, stored...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return stored, nil
}

// Divert stores dead letters that are not there yet. It waits, as long as ctx, where another open transaction stores the
// same one.
func (t *transaction) Divert(ctx context.Context, given []receipts.DeadLetter) error {
	return t.write(ctx, func() error {
		tx, p := t.tx, &patience{ctx: ctx}
		for _, l := range given {
			key := letterIDOf(l)
			if _, there := tx.db.lettered[key]; there {
				continue
			}
			if err := tx.db.acquire(tx, row{letters, key.scope, key.key, key.fingerprint}, p); err != nil {
				return err
			}
			same := func(o receipts.DeadLetter) bool { return letterIDOf(o) == key }
			if _, there := tx.db.lettered[key]; there || slices.ContainsFunc(tx.all.letters, same) ||
				slices.ContainsFunc(tx.current().letters, same) {
				continue
			}
			c := tx.current()
			c.letters = append(c.letters, l)
		}
		return nil
	})
}

// Commit writes the marker and commits.
func (t *transaction) Commit(ctx context.Context) error {
	t.stop()
	tx := t.tx
	if err := cmp.Or(tx.s.there(context.WithoutCancel(ctx)), tx.s.room()); err != nil {
		return errors.Join(err, t.Rollback(ctx))
	}
	tx.db.mu.Lock()
	defer tx.db.mu.Unlock()
	switch {
	case tx.expired:
		return receipts.ErrBudgetEnded
	case tx.killed:
		return ErrAway
	case tx.isOver():
		return fmt.Errorf("%w: %w", receipts.ErrTxEnded, ErrEnded)
	case tx.failed:
		tx.end()
		return fmt.Errorf("%w: %w", receipts.ErrTxEnded, ErrFailed)
	case tx.part != nil:
		tx.end()
		return errors.New("memstore: Commit inside a part")
	}
	lost := tx.s.nextLost()
	if lost != nil && !lost.forwarded {
		tx.end()
		return receipts.ErrCommitUnknown
	}
	if len(tx.all.receipts) > 0 {
		tx.db.markers[tx.nonce] = struct{}{}
	}
	tx.commit()
	if lost != nil {
		return receipts.ErrCommitUnknown
	}
	return nil
}

// Rollback undoes the transaction, unless it is over.
func (t *transaction) Rollback(context.Context) error {
	t.stop()
	_ = t.tx.Rollback() // ErrEnded, which is fine
	return nil
}

func (t *transaction) stop() {
	if t.budget != nil {
		t.budget.Stop()
	}
}
