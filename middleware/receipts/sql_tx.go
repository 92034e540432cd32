package receipts

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// sqlTx is one open transaction on a server, on a connection of its own.
type sqlTx struct {
	txLife

	s    *sqlServer
	ctx  context.Context //nolint:containedctx // the detached context of Begin: values only
	conn *sql.Conn
	tx   *sql.Tx
	flow sqlFlow
	// stop ends the context of BEGIN, which is that of COMMIT, too.
	stop func()
	// unfit: the database did not work on this connection. The next one may reach it where it works again: a session that began
	// on a read-only server, say, stays read-only.
	unfit atomic.Bool

	// raw: a handler got the transaction. inPart: Part was called, and neither Keep nor Undo. broken: why nothing can be
	// committed any more.
	raw, inPart bool
	// next: the savepoint of the next part is set already, and nothing was written since.
	next   bool
	broken error
	// positions counts the outputs stored so far, undone ones included.
	positions int
}

// Raw gives the transaction to a handler.
func (t *sqlTx) Raw() *sql.Tx {
	t.next = t.next && t.inPart
	if !t.raw && t.broken == nil {
		if err := t.flow.lend(); err != nil {
			_ = t.spoil(t.meaning(err))
		}
	}
	t.raw = true
	return t.tx
}

// Claim inserts receipts. A scope is at most MaxScope bytes, a key 1 to MaxKey. One that waits for another transaction until
// ctx's deadline keeps its connection; where ctx is cancelled, it is closed.
func (t *sqlTx) Claim(ctx context.Context, claims []Claim) ([]ClaimResult, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	if err := t.outsideParts(ctx); err != nil {
		return nil, fmt.Errorf("receipts: claim: %w", err)
	}
	t.next = false
	results, err := t.claim(ctx, claims)
	if err != nil {
		return nil, fmt.Errorf("receipts: claim of %d identities, first %q in scope %q: %w",
			len(claims), claims[0].Key, claims[0].Scope, t.spoil(t.meaning(err)))
	}
	return results, nil
}

func (t *sqlTx) claim(ctx context.Context, claims []Claim) ([]ClaimResult, error) {
	answer := make(chan []ClaimResult, 1) // nobody else looks at what comes too late
	err := t.s.attend(ctx, lateGrace, func() error {
		results, err := t.flow.claim(ctx, claims)
		answer <- results
		return err
	})
	if err != nil {
		return nil, err
	}
	return <-answer, nil
}

// lateGrace is how much later than its deadline a claim is cut off, where the server did not end it.
const lateGrace = 2 * time.Second

// Unclaim deletes fresh receipts.
func (t *sqlTx) Unclaim(ctx context.Context, claims []Claim) error {
	if len(claims) == 0 {
		return nil
	}
	err := t.outsideParts(ctx)
	t.next = false
	if err == nil {
		if err = t.s.attend(ctx, 0, func() error { return t.flow.unclaim(ctx, claims) }); err != nil {
			err = t.spoil(t.meaning(err))
		}
	}
	if err != nil {
		return fmt.Errorf("receipts: giving up %d claims, first %q in scope %q: %w", len(claims), claims[0].Key, claims[0].Scope, err)
	}
	return nil
}

// AddOutputs stores outputs. Their payloads are not retained.
func (t *sqlTx) AddOutputs(ctx context.Context, outputs []Output) ([]Output, error) {
	if len(outputs) == 0 {
		return nil, nil
	}
	stored := slices.Clone(outputs)
	for i := range stored {
		stored[i].Nonce, stored[i].Position, stored[i].Sent = t.nonce, t.positions+i, false
	}
	err := t.usable(ctx)
	if err == nil {
		if err = t.s.attend(ctx, 0, func() error { return t.flow.addOutputs(ctx, stored) }); err != nil {
			err = t.meaning(err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("receipts: storing %d outputs, first %s to topic %q: %w", len(outputs), outputs[0].UUID, outputs[0].Topic, err)
	}
	t.positions += len(stored)
	return stored, nil
}

// Divert stores dead letters. A reason is cut at 1,024 bytes.
func (t *sqlTx) Divert(ctx context.Context, letters []DeadLetter) error {
	if len(letters) == 0 {
		return nil
	}
	err := t.usable(ctx)
	if err == nil {
		if err = t.s.attend(ctx, 0, func() error { return t.flow.divert(ctx, letters) }); err != nil {
			err = t.meaning(err)
		}
	}
	if err != nil {
		return fmt.Errorf("receipts: storing %d dead letters, first %q in scope %q: %w", len(letters), letters[0].Key, letters[0].Scope, err)
	}
	return nil
}

// Part begins a message's part with a savepoint.
func (t *sqlTx) Part(ctx context.Context) error {
	err := t.outsideParts(ctx)
	if err == nil && !t.next {
		err = t.savepoint("SAVEPOINT " + t.s.part)
	}
	if err != nil {
		return fmt.Errorf("receipts: beginning a message's part: %w", err)
	}
	t.inPart, t.next = true, false
	return nil
}

// Keep releases the savepoint of Part, which is not there any more if somebody ended the transaction since.
func (t *sqlTx) Keep(context.Context) error {
	if err := t.endPart(t.flow.keep()); err != nil {
		return fmt.Errorf("receipts: keeping a message's part: %w", err)
	}
	return nil
}

// Undo rolls back to the savepoint of Part.
func (t *sqlTx) Undo(context.Context) error {
	if err := t.endPart(t.flow.undo()); err != nil {
		return fmt.Errorf("receipts: undoing a message's part: %w", err)
	}
	return nil
}

func (t *sqlTx) endPart(statements []string, next bool) error {
	switch {
	case t.broken != nil:
		return t.brokenError()
	case !t.inPart:
		return errNotInPart
	}
	for _, s := range statements {
		if err := t.savepoint(s); err != nil {
			return err
		}
	}
	t.inPart, t.next = false, next
	return nil
}

func (t *sqlTx) savepoint(statement string) error {
	if _, err := t.tx.ExecContext(t.ctx, statement); err != nil {
		return t.spoil(t.meaning(err))
	}
	return nil
}

// usable refuses what makes no sense any more.
func (t *sqlTx) usable(ctx context.Context) error {
	if !t.inPart {
		t.next = false
	}
	if t.broken != nil {
		return t.brokenError()
	}
	return ctx.Err()
}

// outsideParts refuses what is not done while a part is open, or after an error that leaves only Rollback.
func (t *sqlTx) outsideParts(ctx context.Context) error {
	switch {
	case t.broken != nil:
		return t.brokenError()
	case t.inPart:
		return errInPart
	default:
		return ctx.Err()
	}
}

// spoil remembers an error after which only Rollback is left.
func (t *sqlTx) spoil(err error) error {
	t.broken = err
	if t.s.classify(err) == ClassOutage {
		t.unfit.Store(true)
	}
	return err
}

func (t *sqlTx) brokenError() error {
	return fmt.Errorf("only Rollback is left after an earlier error: %w", t.broken)
}

// meaning says what a failed statement of the store means.
func (t *sqlTx) meaning(err error) error {
	switch {
	case t.isExpired():
		return budgetError(t.budget)
	case errors.Is(err, sql.ErrTxDone):
		return ErrTxEnded
	case !errors.Is(err, ErrTxEnded) && t.s.dialect.hasEnded(err):
		return fmt.Errorf("%w: %w", ErrTxEnded, err)
	default:
		return ofStore(err)
	}
}

// Commit seals the transaction with its marker and commits. Once ctx ends after COMMIT was sent, the outcome is unknown.
func (t *sqlTx) Commit(ctx context.Context) error {
	expired, ok := t.take()
	if !ok {
		return t.alreadyEnded(ctx, expired)
	}
	err := t.outsideParts(ctx)
	if err == nil {
		if err = t.s.attend(ctx, 0, func() error { return t.flow.seal(ctx) }); err != nil {
			err = t.meaning(err)
		}
	}
	if err != nil {
		_ = t.s.attend(ctx, 0, t.undo)
		return fmt.Errorf("receipts: transaction %s: %w", t.nonce, err)
	}
	return t.commit(ctx)
}

// commit sends COMMIT and waits for the answer until ctx ends.
func (t *sqlTx) commit(ctx context.Context) error {
	var err error
	if ctx.Done() == nil {
		err = t.tx.Commit()
	} else {
		answer := make(chan error, 1)
		go func() { answer <- t.tx.Commit() }()
		select {
		case err = <-answer:
		case <-ctx.Done():
			t.stop()
			t.s.lost.add(t.nonce, t.flow.session())
			go func() { t.giveBack(errors.Join(driver.ErrBadConn, <-answer)) }()
			return t.unknown(ctx.Err())
		}
	}
	switch {
	case err == nil:
		t.giveBack(nil)
		return nil
	case errors.Is(err, sql.ErrTxDone): // nothing was sent
		t.giveBack(err)
		return fmt.Errorf("receipts: COMMIT of transaction %s: %w", t.nonce, ErrTxEnded)
	case !badConn(err) && t.s.dialect.notCommitted(err):
		t.giveBack(err)
		return fmt.Errorf("receipts: COMMIT of transaction %s: %w", t.nonce, err)
	default:
		t.s.lost.add(t.nonce, t.flow.session())
		t.giveBack(driver.ErrBadConn)
		return t.unknown(err)
	}
}

func (t *sqlTx) unknown(cause error) error {
	return fmt.Errorf("receipts: COMMIT of transaction %s: %w: %w", t.nonce, ErrCommitUnknown, cause)
}

// Rollback undoes the transaction and gives its connection back. Where that takes longer than ctx, because a handler's
// statement still runs or the server does not answer, it returns by ctx with the context's error, and the session is ended. An
// error that is an outage for Classify says that the connection was lost, which no earlier call has said.
func (t *sqlTx) Rollback(ctx context.Context) error {
	result := make(chan error, 1)
	if _, ok := t.take(); ok {
		if ctx.Done() == nil {
			return t.undone(t.undo())
		}
		go func() { result <- t.undo() }()
	} else {
		result = nil
	}
	select {
	case err := <-result:
		return t.undone(err)
	case <-t.ended:
		return nil
	case <-ctx.Done():
		go t.kill()
		return fmt.Errorf("receipts: rollback of transaction %s waits for a statement: %w", t.nonce, ctx.Err())
	}
}

func (t *sqlTx) undone(err error) error {
	if err == nil || t.broken != nil || errors.Is(err, sql.ErrTxDone) || t.s.dialect.hasEnded(err) {
		return nil //nolint:nilerr // nothing was open any more, or the caller knows
	}
	return fmt.Errorf("receipts: rollback of transaction %s: %w", t.nonce,
		&classedError{class: ClassOutage, what: "the connection is lost", err: err})
}

// undo rolls back and gives the connection back.
func (t *sqlTx) undo() error {
	err := t.tx.Rollback()
	t.giveBack(err)
	return err
}

// abandon undoes a transaction that was never handed out.
func (t *sqlTx) abandon() {
	if t.conn == nil {
		close(t.ended)
		return
	}
	err := driver.ErrBadConn // BEGIN failed, or its answer was not awaited
	if t.tx != nil {
		err = t.tx.Rollback()
	}
	t.giveBack(err)
}

// outlive is the end of the budget. It ends the transaction and its locks although the handler still runs; where one of the
// handler's statements does, the session is ended with it.
func (t *sqlTx) outlive() {
	if !t.expire() {
		return
	}
	stuck := time.AfterFunc(stuckAfter, t.kill)
	defer stuck.Stop()
	_ = t.undo()
}

// kill ends the session from outside.
func (t *sqlTx) kill() {
	select {
	case <-t.ended:
		return
	default:
	}
	ctx, cancel := context.WithTimeout(t.ctx, endTimeout)
	defer cancel()
	if session := t.flow.session(); session.id != 0 {
		_ = t.s.dialect.kill(ctx, session)
	}
	t.stop() // where the server does not answer, a client that listens gives up
}

// giveBack returns the connection in a clean state, or closes it for good. ended is the result of the statement that ended
// the transaction.
func (t *sqlTx) giveBack(ended error) {
	if badConn(ended) || t.unfit.Load() || !t.clean(ended) {
		discard(t.conn)
		if f, ok := t.flow.(interface{ discarded() }); ok {
			f.discarded()
		}
	}
	_ = t.conn.Close()
	if t.stop != nil {
		t.stop()
	}
	close(t.ended)
}

// clean makes sure that no transaction is open on the connection, and that it is as it was.
func (t *sqlTx) clean(ended error) bool {
	ctx, cancel := context.WithTimeout(t.ctx, endTimeout)
	defer cancel()
	if ended != nil {
		if _, err := t.conn.ExecContext(ctx, "ROLLBACK"); err != nil {
			return false
		}
	}
	return t.flow.clean(ctx) == nil
}
