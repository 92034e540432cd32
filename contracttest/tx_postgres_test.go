package contracttest_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestStorePostgresPgx(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, postgresPgx(servers.Postgres(t).URL()))
}

func TestStorePostgresLibPq(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, postgresLibPq(servers.Postgres(t).URL()))
}

// TestStorePostgresSavepoints is about what differs with them.
func TestStorePostgresSavepoints(t *testing.T) {
	t.Parallel()
	failing(t, contracttest.ExamineStore(t, postgresSavepoints(servers.Postgres(t).URL()),
		"S13", "S14", "S15", "S16", "S17", "S19", "S20", "S21", "S26", "S27"), "")
}

func TestTxMemoryPostgresPgx(t *testing.T) {
	t.Parallel()
	contracttest.RunTx(t, unbubbled(), postgresPgx(tell(t, pgxName, servers.Postgres(t).URL())))
}

func TestTxMemoryPostgresLibPq(t *testing.T) {
	t.Parallel()
	contracttest.RunTx(t, unbubbled(), postgresLibPq(tell(t, libPqName, servers.Postgres(t).URL())))
}

// Names of harnesses that child processes are asked for.
const (
	pgxName   = "postgres, pgx"
	libPqName = "postgres, lib/pq"
)

// The three ways to keep receipts on PostgreSQL through database/sql.
func postgresPgx(url string) contracttest.StoreHarness[*sql.Tx] {
	return postgresHarness(pgxName, "pgx", url, receipts.PostgresOptions{})
}

func postgresLibPq(url string) contracttest.StoreHarness[*sql.Tx] {
	return postgresHarness(libPqName, "postgres", url, receipts.PostgresOptions{})
}

func postgresSavepoints(url string) contracttest.StoreHarness[*sql.Tx] {
	return postgresHarness("postgres, savepoints", "pgx", url, receipts.PostgresOptions{Savepoints: true})
}

func postgresHarness(name, driver, url string, opts receipts.PostgresOptions) contracttest.StoreHarness[*sql.Tx] {
	return postgresOn(name, &postgresSQL{postgresServer: postgresServer{url: url}, driver: driver, opts: opts})
}

// postgresOn is all that the clauses need of a store over database/sql, by a driver that is registered there.
func postgresOn(name string, p *postgresSQL) contracttest.StoreHarness[*sql.Tx] {
	h := contracttest.StoreHarness[*sql.Tx]{
		Name: name, Open: p.open, Empty: p.openEmpty, OpenFaulty: p.openFaulty, Newer: p.newer, Limited: p.openLimited,
		Apply: func(ctx context.Context, tx *sql.Tx, counter string, by int64) error {
			_, err := tx.ExecContext(ctx, postgresApply, counter, by)
			return err
		},
		Read: func(ctx context.Context, tx *sql.Tx, counter string) (n int64, err error) {
			err = tx.QueryRowContext(ctx, postgresRead, counter).Scan(&n)
			return n, err
		},
		End:     endSQL,
		Violate: execute(postgresViolation),
		Errors: map[string]func(ctx context.Context, tx *sql.Tx) error{
			"cut off": func(ctx context.Context, tx *sql.Tx) error {
				return cutOff(ctx, func(ctx context.Context, statement string) error { return execute(statement)(ctx, tx) })
			},
		},
		Kill: func(ctx context.Context, tx *sql.Tx) error {
			var pid int
			if err := tx.QueryRowContext(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
				return err
			}
			return p.kill(ctx, pid)
		},
	}
	for name, statement := range postgresErrors() {
		h.Errors[name] = execute(statement)
	}
	return h
}

type postgresSQL struct {
	postgresServer
	driver string
	opts   receipts.PostgresOptions
}

func (p *postgresSQL) open(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
	at, err := p.tables(ctx, dir)
	if err != nil {
		return contracttest.Database[*sql.Tx]{}, err
	}
	_, d, err := p.handle(at)
	return d, err
}

func (p *postgresSQL) openEmpty(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
	at, err := p.empty(ctx, dir)
	if err != nil {
		return contracttest.Database[*sql.Tx]{}, err
	}
	_, d, err := p.handle(at)
	return d, err
}

func (p *postgresSQL) openLimited(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
	at, role, err := p.limited(ctx, dir)
	if err != nil {
		return contracttest.Database[*sql.Tx]{}, err
	}
	db, d, err := p.handle(at)
	d.Close = func() error { return errors.Join(db.Close(), p.dropRole(role)) }
	return d, err
}

func (p *postgresSQL) handle(at string) (*sql.DB, contracttest.Database[*sql.Tx], error) {
	db, err := sql.Open(p.driver, at)
	if err != nil {
		return nil, contracttest.Database[*sql.Tx]{}, err
	}
	db.SetMaxOpenConns(postgresConns)
	db.SetMaxIdleConns(postgresConns)
	store, err := receipts.NewPostgres(db, p.opts)
	return db, contracttest.Database[*sql.Tx]{
		Store: store, Close: db.Close,
		Effects: func(ctx context.Context) (map[string]int64, error) { return readCounters(ctx, db) },
	}, err
}

func (p *postgresSQL) openFaulty(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], contracttest.DatabaseFaults, error) {
	none, noFaults := contracttest.Database[*sql.Tx]{}, contracttest.DatabaseFaults{}
	at, err := p.tables(ctx, dir)
	if err != nil {
		return none, noFaults, err
	}
	proxy, err := p.proxied(ctx, at)
	if err != nil {
		return none, noFaults, err
	}
	db, d, err := p.handle(proxy.at)
	if err != nil {
		return none, noFaults, errors.Join(err, proxy.Close())
	}
	faults := proxy.faults()
	faults.Outages["pool exhausted"] = exhausted(db, postgresConns)
	if p.driver == "pgx" { // lib/pq asks for READ WRITE in each BEGIN, so that only a real standby refuses it
		faults.Outages["read-only"] = p.readOnly(func() {
			db.SetMaxIdleConns(-1)
			db.SetMaxIdleConns(postgresConns)
		})
	}
	return closingProxy(proxy, d), faults, nil
}
