// Package pgxstore keeps receipts on PostgreSQL natively on pgx, on a *pgxpool.Pool. Handlers get a [*Tx], which is a pgx.Tx
// that they must not end, with queued effects: statements whose answer the handler does not need go to [Tx.Queue], and a batch
// of messages then costs two round trips, however many effects it has: one for BEGIN and the claims, one for effects, marker
// and COMMIT.
//
// The tables are those of receipts.Postgres: both stores may serve one database side by side.
package pgxstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// Options configures the store; the zero value is right.
type Options struct {
	// TablePrefix starts the name of every table and index: letters, digits and underscores, at most 48. "" means
	// "penstock_". Tables are found by the role's search_path.
	TablePrefix string

	// AllowUnsafeSync lets Check accept synchronous_commit = off, under which a committed transaction may be lost when the
	// server goes down, with a warning.
	AllowUnsafeSync bool
}

// tables is the store over database/sql, for all that is not one transaction of messages.
type tables = receipts.Postgres

// Store is the receipts.Store and receipts.Parker on a pool of pgx. It is safe for concurrent use. It holds nothing between
// calls but transactions that are open.
//
// Any of pgx's ways to run statements works, so that a pooler in transaction mode may stand between
// (default_query_exec_mode=exec, or cache_describe, in the connection string).
//
// A statement whose context ends closes the connection of its transaction, as pgx does it by default: the transaction is lost
// then, with all messages that share it.
type Store struct {
	*tables

	pool *pgxpool.Pool
}

var (
	_ receipts.Store[*Tx] = (*Store)(nil)
	_ receipts.Parker     = (*Store)(nil)
)

// New makes a store of a pool, which stays the caller's. It does no I/O: see Check. An error means that an option cannot work.
func New(pool *pgxpool.Pool, opts Options) (*Store, error) {
	if pool == nil {
		return nil, errors.New("pgxstore: New was given a nil *pgxpool.Pool")
	}
	open := func() (*sql.DB, func() error) {
		db := stdlib.OpenDBFromPool(pool)
		return db, db.Close
	}
	t, err := receipts.NewPostgresOver(open, receipts.PostgresOptions{
		TablePrefix: opts.TablePrefix, AllowUnsafeSync: opts.AllowUnsafeSync,
	})
	if err != nil {
		return nil, err
	}
	return &Store{tables: t, pool: pool}, nil
}

// Check verifies that the pool's server is a PostgreSQL that can be written, that a commit is durable, that the pool has room
// for two transactions at least, that the tables are there and that the role may use them. It writes nothing. It returns by ctx,
// after 10 seconds at most where ctx has no deadline.
func (s *Store) Check(ctx context.Context) (receipts.Info, error) {
	return s.CheckPool(ctx, int(s.pool.Config().MaxConns))
}

// Classify tells by SQLSTATE, and by what pgx says of connections, whose failure an error is: see receipts.Postgres.Classify. A
// statement that one message queued has the class of its own error.
func (s *Store) Classify(err error) receipts.Class {
	var own *classedError
	if errors.As(err, &own) {
		return own.class
	}
	return s.tables.Classify(err)
}

// Begin takes a connection out of the pool, waiting until ctx ends, which is an outage for Classify. BEGIN is sent with the
// transaction's first statement: the claims.
func (s *Store) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[*Tx], error) {
	if opts.Budget < 0 || opts.ClaimWait < 0 {
		return nil, fmt.Errorf("pgxstore: begin: negative budget %v or claim wait %v", opts.Budget, opts.ClaimWait)
	}
	t := &transaction{s: s, opts: opts, ctx: context.WithoutCancel(ctx), steps: s.Steps(opts), ended: make(chan struct{})}
	t.handler.t = t
	t.queue.member = nobody
	if err := t.connect(ctx); err != nil {
		return nil, fmt.Errorf("pgxstore: begin: %w", err)
	}
	if opts.Budget > 0 {
		t.deadline = time.Now().Add(opts.Budget)
		t.life.begin(opts.Budget, t.outlive)
	}
	return t, nil
}

// classedError carries a class that the cause alone does not tell.
type classedError struct {
	class receipts.Class
	what  string
	err   error
}

func (e *classedError) Error() string { return e.what + ": " + e.err.Error() }

func (e *classedError) Unwrap() error { return e.err }
