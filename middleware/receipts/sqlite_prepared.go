package receipts

import (
	"context"
	"database/sql"
	"fmt"
)

// sqlitePrepared are the statements of every transaction, prepared once per connection: preparing is half of the cost of
// such a statement with modernc, a fifth with mattn. They live as long as the handle.
type sqlitePrepared map[string]*sql.Stmt

// prepare makes the statements where there are none yet. It is part of Check: it needs a connection and the tables. A store
// that was never checked sends text.
func (s *SQLite) prepare(ctx context.Context) error {
	if s.prepared.Load() != nil {
		return nil
	}
	prepared := sqlitePrepared{}
	for _, query := range []string{s.q.savepoint, s.q.release, s.q.part, s.q.keep, s.q.claimOne, s.q.heldOne, s.q.markerOne, s.q.addOutput} {
		stmt, err := s.db.PrepareContext(ctx, query)
		if err != nil {
			prepared.close()
			return fmt.Errorf("preparing statements: %w", err)
		}
		prepared[query] = stmt
	}
	if !s.prepared.CompareAndSwap(nil, &prepared) {
		prepared.close() // another Check was faster
	}
	return nil
}

func (p sqlitePrepared) close() {
	for _, stmt := range p {
		_ = stmt.Close()
	}
}

// exec runs a statement, prepared where it can be.
func (t *sqliteTx) exec(query string, args ...any) (sql.Result, error) {
	if prepared := t.s.prepared.Load(); prepared != nil {
		if stmt := (*prepared)[query]; stmt != nil {
			return t.tx.StmtContext(t.ctx, stmt).ExecContext(t.ctx, args...)
		}
	}
	return t.tx.ExecContext(t.ctx, query, args...)
}

// queryRow is exec for one row.
func (t *sqliteTx) queryRow(query string, args ...any) *sql.Row {
	if prepared := t.s.prepared.Load(); prepared != nil {
		if stmt := (*prepared)[query]; stmt != nil {
			return t.tx.StmtContext(t.ctx, stmt).QueryRowContext(t.ctx, args...)
		}
	}
	return t.tx.QueryRowContext(t.ctx, query, args...)
}
