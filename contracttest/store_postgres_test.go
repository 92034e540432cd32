package contracttest_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"

	_ "github.com/lib/pq"
)

func TestStorePostgresPgx(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, postgresHarness("postgres, pgx", "pgx", servers.Postgres(t).URL(), receipts.PostgresOptions{}))
}

func TestStorePostgresLibPq(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, postgresHarness("postgres, lib/pq", "postgres", servers.Postgres(t).URL(), receipts.PostgresOptions{}))
}

func TestStorePostgresSavepoints(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, postgresHarness("postgres, savepoints", "pgx", servers.Postgres(t).URL(), receipts.PostgresOptions{Savepoints: true}))
}

func TestStorePostgresNative(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, pgxHarness("postgres, pgxstore", servers.Postgres(t).URL()))
}

// postgresPool is the most connections of one handle.
const postgresPool = 9

// inSchema makes a schema for each folder, in which the tables are then made and found.
func inSchema(ctx context.Context, at, dir string) (string, error) {
	u, err := url.Parse(at)
	if err != nil {
		return "", errors.New("the database's URL cannot be used")
	}
	sum := sha256.Sum256([]byte(dir))
	schema := "s" + hex.EncodeToString(sum[:8])
	conn, err := pgx.Connect(ctx, at)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	// Two at a time fail on the catalogue's unique index in spite of IF NOT EXISTS.
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock(1); CREATE SCHEMA IF NOT EXISTS `+schema); err != nil {
		return "", err
	}
	q := u.Query()
	q.Set("search_path", schema)
	u.RawQuery = q.Encode()
	return u.String(), nil
}

const postgresCounters = `CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, n BIGINT NOT NULL)`

const (
	postgresApply = `INSERT INTO counters AS c (name, n) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET n = c.n + excluded.n`
	// postgresRead makes the row where there is none, so that it can be locked.
	postgresRead = `INSERT INTO counters AS c (name, n) VALUES ($1, 0) ON CONFLICT (name) DO UPDATE SET n = c.n RETURNING n`
)

// postgresErrors leave the transaction failed: it takes nothing but a rollback.
func postgresErrors() map[string]string {
	return map[string]string{
		"constraint": "INSERT INTO counters (name, n) VALUES ('violated', NULL)",
		"division":   "SELECT 1/0",
		"no table":   "SELECT * FROM nowhere",
		"timeout":    "SET LOCAL statement_timeout = 1; SELECT pg_sleep(1)",
	}
}

// postgresHarness is a store over database/sql.
func postgresHarness(name, driver, at string, opts receipts.PostgresOptions) contracttest.StoreHarness[*sql.Tx] {
	empty := func(ctx context.Context, dir string) (*sql.DB, *receipts.Postgres, error) {
		dsn, err := inSchema(ctx, at, dir)
		if err != nil {
			return nil, nil, err
		}
		db, err := sql.Open(driver, dsn)
		if err != nil {
			return nil, nil, err
		}
		db.SetMaxOpenConns(postgresPool)
		db.SetMaxIdleConns(postgresPool)
		store, err := receipts.NewPostgres(db, opts)
		return db, store, err
	}
	h := contracttest.StoreHarness[*sql.Tx]{
		Name: name,
		Open: func(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
			db, store, err := empty(ctx, dir)
			if err != nil {
				return contracttest.Database[*sql.Tx]{}, err
			}
			if err := errors.Join(store.Migrate(ctx), postgresTable(ctx, db)); err != nil {
				return contracttest.Database[*sql.Tx]{}, errors.Join(err, db.Close())
			}
			return contracttest.Database[*sql.Tx]{
				Store: store, Close: db.Close,
				Effects: func(ctx context.Context) (map[string]int64, error) { return readCounters(ctx, db) },
			}, nil
		},
		Empty: func(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
			db, store, err := empty(ctx, dir)
			if err != nil {
				return contracttest.Database[*sql.Tx]{}, err
			}
			return contracttest.Database[*sql.Tx]{Store: store, Close: db.Close}, nil
		},
		Apply: func(ctx context.Context, tx *sql.Tx, counter string, by int64) error {
			_, err := tx.ExecContext(ctx, postgresApply, counter, by)
			return err
		},
		Read: func(ctx context.Context, tx *sql.Tx, counter string) (n int64, err error) {
			err = tx.QueryRowContext(ctx, postgresRead, counter).Scan(&n)
			return n, err
		},
		End:     endSQL,
		Violate: execute(postgresErrors()["constraint"]),
		Errors:  map[string]func(ctx context.Context, tx *sql.Tx) error{},
		Kill: func(ctx context.Context, tx *sql.Tx) error {
			var pid int
			if err := tx.QueryRowContext(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
				return err
			}
			return endBackend(ctx, at, pid)
		},
	}
	for name, statement := range postgresErrors() {
		h.Errors[name] = execute(statement)
	}
	return h
}

// postgresTable makes the counters, one handle at a time.
func postgresTable(ctx context.Context, db *sql.DB) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock(2)`); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, postgresCounters); err != nil {
		return err
	}
	return tx.Commit()
}

// endBackend ends a session from outside and waits until it is gone.
func endBackend(ctx context.Context, at string, pid int) error {
	conn, err := pgx.Connect(ctx, at)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, `SELECT pg_terminate_backend($1)`, pid); err != nil {
		return err
	}
	for there := true; there; {
		if err := conn.QueryRow(ctx, `SELECT count(*) > 0 FROM pg_stat_activity WHERE pid = $1`, pid).Scan(&there); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// pgxHarness is the store on pgx itself. Its effects are queued.
func pgxHarness(name, at string) contracttest.StoreHarness[*pgxstore.Tx] {
	empty := func(ctx context.Context, dir string) (*pgxpool.Pool, *pgxstore.Store, error) {
		dsn, err := inSchema(ctx, at, dir)
		if err != nil {
			return nil, nil, err
		}
		config, err := pgxpool.ParseConfig(dsn)
		if err != nil {
			return nil, nil, err
		}
		config.MaxConns = postgresPool
		pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), config)
		if err != nil {
			return nil, nil, err
		}
		store, err := pgxstore.New(pool, pgxstore.Options{})
		return pool, store, err
	}
	closes := func(pool *pgxpool.Pool) func() error { return func() error { pool.Close(); return nil } }
	h := contracttest.StoreHarness[*pgxstore.Tx]{
		Name: name,
		Open: func(ctx context.Context, dir string) (contracttest.Database[*pgxstore.Tx], error) {
			pool, store, err := empty(ctx, dir)
			if err != nil {
				return contracttest.Database[*pgxstore.Tx]{}, err
			}
			db := stdlib.OpenDBFromPool(pool)
			err = errors.Join(store.Migrate(ctx), postgresTable(ctx, db), db.Close())
			if err != nil {
				pool.Close()
				return contracttest.Database[*pgxstore.Tx]{}, err
			}
			return contracttest.Database[*pgxstore.Tx]{
				Store: store, Close: closes(pool),
				Effects: func(ctx context.Context) (effects map[string]int64, err error) {
					db := stdlib.OpenDBFromPool(pool)
					defer func() { err = errors.Join(err, db.Close()) }()
					return readCounters(ctx, db)
				},
			}, nil
		},
		Empty: func(ctx context.Context, dir string) (contracttest.Database[*pgxstore.Tx], error) {
			pool, store, err := empty(ctx, dir)
			if err != nil {
				return contracttest.Database[*pgxstore.Tx]{}, err
			}
			return contracttest.Database[*pgxstore.Tx]{Store: store, Close: closes(pool)}, nil
		},
		Apply: func(_ context.Context, tx *pgxstore.Tx, counter string, by int64) error {
			tx.Queue(postgresApply, counter, by)
			return tx.Err()
		},
		Read: func(ctx context.Context, tx *pgxstore.Tx, counter string) (n int64, err error) {
			err = tx.QueryRow(ctx, postgresRead, counter).Scan(&n)
			return n, err
		},
		End: func(ctx context.Context, tx *pgxstore.Tx, how contracttest.Ending) error {
			statement := "COMMIT"
			switch how {
			case contracttest.EndCommit:
				if err := tx.Commit(ctx); !errors.Is(err, pgxstore.ErrOwned) {
					return err
				}
			case contracttest.EndRollback:
				if err := tx.Rollback(ctx); !errors.Is(err, pgxstore.ErrOwned) {
					return err
				}
				statement = "ROLLBACK" // whoever means it finds a way
			}
			_, err := tx.Exec(ctx, statement)
			return err
		},
		Violate: pgxExecute(postgresErrors()["constraint"]),
		Errors:  map[string]func(ctx context.Context, tx *pgxstore.Tx) error{},
		Kill: func(ctx context.Context, tx *pgxstore.Tx) error {
			return endBackend(ctx, at, int(tx.Conn().PgConn().PID()))
		},
	}
	for name, statement := range postgresErrors() {
		h.Errors[name] = pgxExecute(statement)
	}
	return h
}

func pgxExecute(statement string) func(ctx context.Context, tx *pgxstore.Tx) error {
	return func(ctx context.Context, tx *pgxstore.Tx) error {
		_, err := tx.Exec(ctx, statement)
		return err
	}
}
