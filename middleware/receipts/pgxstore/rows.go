package pgxstore

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// query runs a query of a handler, after what is queued.
func (t *transaction) query(ctx context.Context, query func() (pgx.Rows, error)) (pgx.Rows, error) {
	t.use.Lock()
	defer t.use.Unlock()
	if err := t.ready(ctx); err != nil {
		return failedRows{err: err}, err
	}
	inner, err := query()
	if err != nil {
		t.ran(err)
	}
	return &rows{Rows: inner, t: t}, err
}

// rows are a handler's rows. They are read while nobody ends the transaction.
type rows struct {
	pgx.Rows

	t *transaction
}

// Next reads the next row.
func (r *rows) Next() bool {
	r.t.use.Lock()
	defer r.t.use.Unlock()
	if r.Rows.Next() {
		return true
	}
	r.t.ran(r.Err())
	return false
}

// Close ends the rows; a later call does nothing.
func (r *rows) Close() {
	r.t.use.Lock()
	defer r.t.use.Unlock()
	r.Rows.Close()
	r.t.ran(r.Err())
}

// Scan reads the values of the row.
func (r *rows) Scan(dest ...any) error {
	r.t.use.Lock()
	defer r.t.use.Unlock()
	return r.Rows.Scan(dest...)
}

// Values gives the values of the row.
func (r *rows) Values() ([]any, error) {
	r.t.use.Lock()
	defer r.t.use.Unlock()
	return r.Rows.Values()
}

// row is the first row of a query.
type row struct {
	rows pgx.Rows
	err  error
}

// Scan reads the row, and ends the query. Without a row it returns pgx.ErrNoRows.
func (r row) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// failedRows are the rows of a query that was not sent.
type failedRows struct{ err error }

func (failedRows) Close() {}

func (r failedRows) Err() error { return r.err }

func (failedRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

func (failedRows) FieldDescriptions() []pgconn.FieldDescription { return nil }

func (failedRows) Next() bool { return false }

func (r failedRows) Scan(...any) error { return r.err }

func (r failedRows) Values() ([]any, error) { return nil, r.err }

func (failedRows) RawValues() [][]byte { return nil }

func (failedRows) Conn() *pgx.Conn { return nil }

func (failedRows) TypeMap() *pgtype.Map { return nil }

// sendBatch sends a handler's own batch, after what is queued.
func (t *transaction) sendBatch(ctx context.Context, tx pgx.Tx, b *pgx.Batch) pgx.BatchResults {
	t.use.Lock()
	defer t.use.Unlock()
	if err := t.ready(ctx); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	return &results{BatchResults: tx.SendBatch(ctx, b), t: t}
}

// results are those of a handler's own batch.
type results struct {
	pgx.BatchResults

	t *transaction
}

// Exec reads the answer to the next statement.
func (r *results) Exec() (pgconn.CommandTag, error) {
	r.t.use.Lock()
	defer r.t.use.Unlock()
	tag, err := r.BatchResults.Exec()
	r.t.ran(err)
	return tag, err
}

// Query reads the rows of the next statement.
func (r *results) Query() (pgx.Rows, error) {
	r.t.use.Lock()
	defer r.t.use.Unlock()
	inner, err := r.BatchResults.Query()
	r.t.ran(err)
	return &rows{Rows: inner, t: r.t}, err
}

// QueryRow reads the row of the next statement.
func (r *results) QueryRow() pgx.Row {
	inner, err := r.Query()
	return row{rows: inner, err: err}
}

// Close ends the batch.
func (r *results) Close() error {
	r.t.use.Lock()
	defer r.t.use.Unlock()
	err := r.BatchResults.Close()
	r.t.ran(err)
	return err
}
