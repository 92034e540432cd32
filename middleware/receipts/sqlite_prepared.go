package receipts

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
)

// sqlitePrepared are the statements of the flow, prepared once per connection: preparing is half of the cost of a small
// statement with modernc, a fifth with mattn, and most of the cost of one for many rows. They live as long as the handle.
type sqlitePrepared [flowLen]*sql.Stmt

// prepare makes the statements where there are none yet. It is part of Check: it needs a connection and the tables. A store
// that was never checked sends text.
func (s *SQLite) prepare(ctx context.Context) error {
	if s.prepared.Load() != nil {
		return nil
	}
	prepared := &sqlitePrepared{}
	for i, query := range s.q.flow {
		stmt, err := s.db.PrepareContext(ctx, query)
		if err != nil {
			prepared.close()
			return fmt.Errorf("preparing statements: %w", err)
		}
		prepared[i] = stmt
	}
	if !s.prepared.CompareAndSwap(nil, prepared) {
		prepared.close() // another Check was faster
	}
	return nil
}

func (p *sqlitePrepared) close() {
	for _, stmt := range p {
		if stmt != nil {
			_ = stmt.Close()
		}
	}
}

// stmt gives a prepared statement of this transaction, bound to it once; nil where the text has to be sent.
func (t *sqliteTx) stmt(f flow) *sql.Stmt {
	if t.bound[f] == nil {
		if prepared := t.s.prepared.Load(); prepared != nil {
			t.bound[f] = t.tx.StmtContext(t.ctx, prepared[f])
		}
	}
	return t.bound[f]
}

// exec runs a statement of the flow.
func (t *sqliteTx) exec(f flow, args ...any) (sql.Result, error) {
	if stmt := t.stmt(f); stmt != nil {
		result, err := stmt.ExecContext(t.ctx, args...)
		return result, t.trueError(err)
	}
	return t.tx.ExecContext(t.ctx, t.s.q.flow[f], args...)
}

// query is exec for rows.
func (t *sqliteTx) query(f flow, args ...any) (*sql.Rows, error) {
	if stmt := t.stmt(f); stmt != nil {
		rows, err := stmt.QueryContext(t.ctx, args...)
		return rows, t.trueError(err)
	}
	return t.tx.QueryContext(t.ctx, t.s.q.flow[f], args...)
}

// number is exec for a single number.
func (t *sqliteTx) number(f flow, args ...any) (n int, err error) {
	if stmt := t.stmt(f); stmt != nil {
		err = t.trueError(stmt.QueryRowContext(t.ctx, args...).Scan(&n))
		return n, err
	}
	err = t.tx.QueryRowContext(t.ctx, t.s.q.flow[f], args...).Scan(&n)
	return n, err
}

// trueError makes one error of the two that database/sql has for what comes after the end of a transaction: a statement
// that is bound to it has one without a name.
func (t *sqliteTx) trueError(err error) error {
	if err == nil || errors.Is(err, driver.ErrBadConn) {
		return err
	}
	if _, ok := t.s.primaryCode(err); ok {
		return err
	}
	stmt, probeErr := t.tx.PrepareContext(t.ctx, "SELECT 1")
	if errors.Is(probeErr, sql.ErrTxDone) {
		return probeErr
	}
	if probeErr == nil {
		_ = stmt.Close()
	}
	return err
}
