package receipts

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
)

// Begin starts a transaction as the handle's DSN says, which Check has seen to be as a writer. It returns by ctx even
// where the driver's wait for the lock (busy_timeout) is deaf; the connection then goes back when that wait has ended.
// Waiting for a connection until the deadline is an outage for Classify, waiting for the lock is contention.
func (s *SQLite) Begin(ctx context.Context, opts TxOptions) (Tx[*sql.Tx], error) {
	if opts.Budget < 0 {
		return nil, fmt.Errorf("receipts: begin: negative budget %v", opts.Budget)
	}
	var t *sqliteTx
	err := s.again(func() (err error) {
		t, err = s.begin(ctx, opts)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("receipts: begin: %w", err)
	}
	return t, nil
}

func (s *SQLite) begin(ctx context.Context, opts TxOptions) (*sqliteTx, error) {
	conn, err := s.conn(ctx)
	if err != nil {
		return nil, err
	}
	t := &sqliteTx{
		s: s, ctx: context.WithoutCancel(ctx), conn: conn,
		txLife: txLife{nonce: NewNonce(), budget: opts.Budget, budgets: s.budgets, ended: make(chan struct{})},
	}
	stop, err := await(ctx, func(ctx context.Context) error {
		var err error
		t.tx, err = conn.BeginTx(ctx, nil)
		return err
	}, t.abandon)
	if err != nil {
		return nil, lockWaitError(err) // t belongs to the goroutine that abandons it
	}
	t.stop = stop
	t.hook = s.arm(conn)
	t.start(t.outlive)
	return t, nil
}

// sqliteTx is one open transaction on a connection of its own. Statements run in a context that is never cancelled,
// because SQLite ends the transaction of a write that is interrupted.
type sqliteTx struct {
	txLife

	s    *SQLite
	ctx  context.Context //nolint:containedctx // the detached context of Begin: values only
	conn *sql.Conn
	tx   *sql.Tx
	stop func()
	hook *commitHook

	// raw: a handler got the transaction. lent: it may have used it since the store last knew it to be open.
	raw, lent bool
	// guarded: the guard is set.
	guarded bool
	// inPart: Part was called, and neither Keep nor Undo. broken: why nothing can be committed any more.
	inPart bool
	broken error

	// fresh are the claims that count for the marker, positions the outputs stored so far, undone ones included.
	fresh     freshClaims
	positions int
	bound     [flowLen]*sql.Stmt
}

// Raw sets a savepoint, the guard, before the transaction is handed out to be used outside a part: whoever ends the
// transaction takes it along. Not earlier, because SQLite copies every page that is changed inside a savepoint, those of a
// batch of claims into a file.
func (t *sqliteTx) Raw() *sql.Tx {
	t.raw, t.lent = true, true
	if !t.inPart && !t.guarded && t.broken == nil {
		if _, err := t.exec(flowGuard); err != nil {
			_ = t.spoil(t.sealError(err))
		} else {
			t.guarded = true
		}
	}
	return t.tx
}

// abandon undoes a transaction that was never handed out.
func (t *sqliteTx) abandon() {
	err := sql.ErrTxDone
	if t.tx != nil {
		err = t.tx.Rollback()
	}
	t.giveBack(err)
}

// outlive is the end of the budget. It ends the transaction and its lock although the handler still runs.
func (t *sqliteTx) outlive() {
	if t.expire() {
		t.giveBack(t.tx.Rollback())
	}
}

// giveBack returns the connection, with ended the result of the statement that ended the transaction.
func (t *sqliteTx) giveBack(ended error) {
	t.hook.disarm(t.conn)
	if ended == nil {
		_ = t.conn.Close()
	} else {
		t.s.release(t.ctx, t.conn, ended)
	}
	if t.stop != nil {
		t.stop()
	}
	close(t.ended)
}

// Commit seals the transaction with its marker and commits. Once the budget has not ended before it, ctx is not looked
// at: a COMMIT must not be torn by its caller's deadline. In rollback-journal mode it may wait for readers as long as
// busy_timeout says.
func (t *sqliteTx) Commit(ctx context.Context) error {
	expired, ok := t.take()
	if !ok {
		return t.alreadyEnded(ctx, expired)
	}
	if err := t.seal(); err != nil {
		t.giveBack(t.rollbackAs(err))
		return fmt.Errorf("receipts: transaction %s: %w", t.nonce, err)
	}
	err := t.commit()
	if err == nil {
		t.giveBack(nil)
		return nil
	}
	if t.s.notCommitted(err) {
		// The drivers have rolled back, or not: release makes sure of it.
		t.giveBack(err)
		return fmt.Errorf("receipts: COMMIT of transaction %s: %w", t.nonce, err)
	}
	t.giveBack(driver.ErrBadConn)
	return fmt.Errorf("receipts: COMMIT of transaction %s: %w: %w", t.nonce, ErrCommitUnknown, err)
}

// commit sends COMMIT, the only one that the hook lets pass. Where SQLite did not ask, somebody else has set another one.
func (t *sqliteTx) commit() error {
	t.hook.let()
	err := t.tx.Commit()
	if err == nil && len(t.fresh) > 0 && t.hook.missed() {
		t.s.hooks.forget(t.hook)
	}
	return err
}

// rollbackAs rolls back after cause. An error of the connection itself decides about it: a ROLLBACK on a dead one may
// answer anything.
func (t *sqliteTx) rollbackAs(cause error) error {
	err := t.tx.Rollback()
	if errors.Is(cause, driver.ErrBadConn) {
		return driver.ErrBadConn
	}
	return err
}

// notCommitted tells whether an error of COMMIT proves that nothing was committed.
func (s *SQLite) notCommitted(err error) bool {
	if errors.Is(err, driver.ErrBadConn) {
		return false
	}
	if errors.Is(err, sql.ErrTxDone) { // nothing was sent
		return true
	}
	code, ok := s.primaryCode(err)
	if !ok {
		return false
	}
	switch code {
	case sqliteBusy, sqliteLocked, sqliteFull, sqliteReadOnly, sqliteConstraint:
		return true
	default:
		return false
	}
}

// seal makes the transaction ready for COMMIT.
func (t *sqliteTx) seal() error {
	if err := t.outsideParts(t.ctx); err != nil {
		return err
	}
	if err := t.releaseGuard(); err != nil {
		return err
	}
	return t.mark()
}

// releaseGuard proves that the transaction that was handed out is still the one that Begin started: its guard is not there
// any more where somebody committed or rolled back in between, in whatever way. What happened inside parts was proven by
// Keep and Undo.
func (t *sqliteTx) releaseGuard() error {
	if !t.guarded {
		return nil
	}
	if _, err := t.exec(flowSeal); err != nil {
		return t.sealError(err)
	}
	t.guarded = false
	return nil
}

// mark writes the marker of a transaction with fresh claims.
func (t *sqliteTx) mark() error {
	n := len(t.fresh)
	if n == 0 {
		return nil
	}
	written, err := t.writeMarker()
	if err != nil {
		return fmt.Errorf("writing the marker: %w", t.meaning(err))
	}
	if !written {
		return fmt.Errorf("%w: not all of its %d fresh receipts are there", ErrTxEnded, n)
	}
	return nil
}

// sealError says what it means that a savepoint of the store could not be set, released or rolled back to.
func (t *sqliteTx) sealError(err error) error {
	code, ok := t.s.primaryCode(err)
	switch {
	case t.isExpired():
		return budgetError(t.budget)
	case t.hook.refused(), errors.Is(err, sql.ErrTxDone):
		return ErrTxEnded
	case ok && code == sqliteError:
		return fmt.Errorf("%w: %w", ErrTxEnded, err)
	case ok && code == sqliteBusy:
		// Not contention: it would be the same every time. The code stays out of the chain for that reason.
		return fmt.Errorf("a writing statement of the handler is still open: close its rows before returning (%v)", err) //nolint:errorlint // see above
	default:
		return err
	}
}

// writeMarker inserts the marker on the condition that the fresh receipts are there with this nonce. It looks at the last one
// of each call of Claim: whatever ends the transaction, or goes back to a savepoint of before, takes all of that call along.
// To look at each one took an eighth of a transaction of 256.
func (t *sqliteTx) writeMarker() (written bool, err error) {
	last := len(t.fresh) - 1
	for i, f := range t.fresh[:last] {
		if f.call == t.fresh[i+1].call {
			continue
		}
		if there, err := t.number(flowCount, f.key, []byte(f.scope), t.nonce[:]); err != nil || there == 0 {
			return false, err
		}
	}
	witness := &t.fresh[last]
	result, err := t.exec(flowMarker, t.nonce[:], witness.at, []byte(witness.scope), witness.key, len(t.fresh))
	if err != nil {
		return false, err
	}
	n, err := result.RowsAffected()
	return n == 1, err
}

// Rollback undoes the transaction and gives its connection back. Where a statement of the handler still runs it returns by
// ctx, with the context's error, and the rest happens when that statement has ended.
func (t *sqliteTx) Rollback(ctx context.Context) error {
	if _, ok := t.take(); ok {
		if ctx.Done() == nil {
			t.giveBack(t.tx.Rollback())
			return nil
		}
		go func() { t.giveBack(t.tx.Rollback()) }()
	}
	select {
	case <-t.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("receipts: rollback of transaction %s waits for a statement: %w", t.nonce, ctx.Err())
	}
}

// ready makes sure that the transaction is still open before the store writes into it, once a handler had it: outside
// one the write would be committed at once, unless the hook refuses that. SQLite refuses BEGIN inside a transaction and
// nothing else happens.
func (t *sqliteTx) ready(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if t.hook.refused() {
		return ErrTxEnded
	}
	if !t.lent || t.hook != nil {
		return nil
	}
	_, err := t.tx.ExecContext(t.ctx, "BEGIN")
	if err == nil {
		_, _ = t.tx.ExecContext(t.ctx, "ROLLBACK")
		return ErrTxEnded
	}
	if code, ok := t.s.primaryCode(err); ok && code == sqliteError {
		return nil
	}
	return t.meaning(err)
}

// meaning says what database/sql's "transaction done" means here.
func (t *sqliteTx) meaning(err error) error {
	switch {
	case t.isExpired():
		return budgetError(t.budget)
	case t.hook.refused(), errors.Is(err, sql.ErrTxDone):
		return ErrTxEnded
	default:
		return err
	}
}
