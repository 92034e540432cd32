package receipts

import (
	"context"
	"errors"
	"fmt"
)

// The errors of a caller that does not keep to the order of calls. Nothing was done.
var (
	errInPart    = errors.New("a message's part is open: Keep or Undo it first")
	errNotInPart = errors.New("no message's part is open: begin it with Part")
)

// Part begins a message's part with a savepoint. Its name is drawn for each store, so that a handler's own savepoints,
// whatever they are called, are others.
func (t *sqliteTx) Part(ctx context.Context) error {
	if err := t.part(ctx); err != nil {
		return fmt.Errorf("receipts: beginning a message's part: %w", err)
	}
	return nil
}

func (t *sqliteTx) part(ctx context.Context) error {
	if err := t.outsideParts(ctx); err != nil {
		return err
	}
	if err := t.releaseGuard(); err != nil { // what a part changes would be kept for it until the end
		return t.spoil(err)
	}
	if _, err := t.exec(flowPart); err != nil {
		return t.spoil(t.sealError(err))
	}
	t.inPart, t.lent = true, t.raw
	return nil
}

// Keep releases the savepoint of Part, which is not there any more if somebody ended the transaction since.
func (t *sqliteTx) Keep(context.Context) error {
	if err := t.endPart(flowKeep); err != nil {
		return fmt.Errorf("receipts: keeping a message's part: %w", err)
	}
	return nil
}

// Undo rolls back to the savepoint of Part and releases it. It writes nothing, so that it does no harm where the
// transaction has ended before, by an error that the handler met say.
func (t *sqliteTx) Undo(context.Context) error {
	if err := t.endPart(flowUndo, flowKeep); err != nil {
		return fmt.Errorf("receipts: undoing a message's part: %w", err)
	}
	return nil
}

func (t *sqliteTx) endPart(statements ...flow) error {
	switch {
	case t.broken != nil:
		return t.brokenError()
	case !t.inPart:
		return errNotInPart
	}
	for _, f := range statements {
		if _, err := t.exec(f); err != nil {
			return t.spoil(t.sealError(err))
		}
	}
	t.inPart, t.lent = false, false // the savepoint was there, so the transaction is open
	return nil
}

// outsideParts refuses what is not done while a part is open, or after one could not be ended.
func (t *sqliteTx) outsideParts(ctx context.Context) error {
	switch {
	case t.broken != nil:
		return t.brokenError()
	case t.inPart:
		return errInPart
	case t.hook.refused():
		return t.sealError(ErrTxEnded)
	default:
		return ctx.Err()
	}
}

// spoil remembers that a savepoint of the store could not be set or ended: what was written since may be there or not, so
// that nothing of this transaction may be committed any more.
func (t *sqliteTx) spoil(err error) error {
	t.broken = err
	return err
}

func (t *sqliteTx) brokenError() error {
	return fmt.Errorf("only Rollback is left after an earlier error: %w", t.broken)
}

// Unclaim deletes fresh receipts.
func (t *sqliteTx) Unclaim(ctx context.Context, claims []Claim) error {
	if len(claims) == 0 {
		return nil
	}
	if err := t.unclaim(ctx, claims); err != nil {
		return fmt.Errorf("receipts: giving up %d claims, first %q in scope %q: %w", len(claims), claims[0].Key, claims[0].Scope, t.meaning(err))
	}
	return nil
}

func (t *sqliteTx) unclaim(ctx context.Context, claims []Claim) error {
	if err := t.outsideParts(ctx); err != nil {
		return err
	}
	if err := t.ready(ctx); err != nil {
		return err
	}
	args := make([]any, 0, min(len(claims), flowMost)+2)
	for rest := claims; len(rest) > 0; {
		n := scopeRun(rest)
		run := rest[:n]
		err := sized(n, func(size flow, from, to int) error {
			args = append(args[:0], []byte(run[0].Scope), t.nonce[:])
			for i := from; i < to; i++ {
				args = append(args, run[i].Key)
			}
			_, err := t.exec(flowUnclaim+size, args...)
			return err
		})
		if err != nil {
			return err
		}
		rest = rest[n:]
	}
	t.fresh.forget(claims)
	return nil
}
