package contracttest_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

func TestStorePostgresNative(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, postgresNative(servers.Postgres(t).URL()))
}

func TestTxMemoryPostgresNative(t *testing.T) {
	t.Parallel()
	contracttest.RunTx(t, unbubbled(), postgresNative(tell(t, nativeName, servers.Postgres(t).URL())))
}

const nativeName = "postgres, pgxstore"

func postgresNative(url string) contracttest.StoreHarness[*pgxstore.Tx] {
	return nativeOn(nativeName, &postgresPool{postgresServer{url: url}})
}

// nativeOn is all that the clauses need of the store on pgx itself. Its effects are queued.
func nativeOn(name string, p *postgresPool) contracttest.StoreHarness[*pgxstore.Tx] {
	h := contracttest.StoreHarness[*pgxstore.Tx]{
		Name: name, Open: p.open, Empty: p.openEmpty, OpenFaulty: p.openFaulty, Newer: p.newer, Limited: p.openLimited,
		Apply: func(_ context.Context, tx *pgxstore.Tx, counter string, by int64) error {
			tx.Queue(postgresApply, counter, by)
			return tx.Err()
		},
		Read: func(ctx context.Context, tx *pgxstore.Tx, counter string) (n int64, err error) {
			err = tx.QueryRow(ctx, postgresRead, counter).Scan(&n)
			return n, err
		},
		End:     pgxEnd,
		Violate: pgxExecute(postgresViolation),
		Errors: map[string]func(ctx context.Context, tx *pgxstore.Tx) error{
			"cut off": func(ctx context.Context, tx *pgxstore.Tx) error {
				return cutOff(ctx, func(ctx context.Context, statement string) error { return pgxExecute(statement)(ctx, tx) })
			},
		},
		Kill: func(ctx context.Context, tx *pgxstore.Tx) error { return p.kill(ctx, int(tx.Conn().PgConn().PID())) },
	}
	for name, statement := range postgresErrors() {
		h.Errors[name] = pgxExecute(statement)
	}
	return h
}

// pgxEnd finds a way where the transaction refuses.
func pgxEnd(ctx context.Context, tx *pgxstore.Tx, how contracttest.Ending) error {
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
		statement = "ROLLBACK"
	case contracttest.EndText:
	}
	return pgxExecute(statement)(ctx, tx)
}

func pgxExecute(statement string) func(ctx context.Context, tx *pgxstore.Tx) error {
	return func(ctx context.Context, tx *pgxstore.Tx) error {
		_, err := tx.Exec(ctx, statement)
		return err
	}
}

// postgresPool makes handles that are pools of pgx.
type postgresPool struct{ postgresServer }

func (p *postgresPool) open(ctx context.Context, dir string) (contracttest.Database[*pgxstore.Tx], error) {
	at, err := p.tables(ctx, dir)
	if err != nil {
		return contracttest.Database[*pgxstore.Tx]{}, err
	}
	_, d, err := p.handle(ctx, at)
	return d, err
}

func (p *postgresPool) openEmpty(ctx context.Context, dir string) (contracttest.Database[*pgxstore.Tx], error) {
	at, err := p.empty(ctx, dir)
	if err != nil {
		return contracttest.Database[*pgxstore.Tx]{}, err
	}
	_, d, err := p.handle(ctx, at)
	return d, err
}

func (p *postgresPool) openLimited(ctx context.Context, dir string) (contracttest.Database[*pgxstore.Tx], error) {
	at, role, err := p.limited(ctx, dir)
	if err != nil {
		return contracttest.Database[*pgxstore.Tx]{}, err
	}
	pool, d, err := p.handle(ctx, at)
	d.Close = func() error { pool.Close(); return p.dropRole(role) }
	return d, err
}

func (p *postgresPool) handle(ctx context.Context, at string) (*pgxpool.Pool, contracttest.Database[*pgxstore.Tx], error) {
	none := contracttest.Database[*pgxstore.Tx]{}
	config, err := pgxpool.ParseConfig(at)
	if err != nil {
		return nil, none, err
	}
	config.MaxConns = postgresConns
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), config)
	if err != nil {
		return nil, none, err
	}
	store, err := pgxstore.New(pool, pgxstore.Options{})
	if err != nil {
		pool.Close()
		return nil, none, err
	}
	return pool, contracttest.Database[*pgxstore.Tx]{
		Store: store,
		Close: func() error { pool.Close(); return nil },
		Effects: func(ctx context.Context) (effects map[string]int64, err error) {
			db := stdlib.OpenDBFromPool(pool)
			defer func() { err = errors.Join(err, db.Close()) }()
			return readCounters(ctx, db)
		},
	}, nil
}

func (p *postgresPool) openFaulty(ctx context.Context, dir string) (contracttest.Database[*pgxstore.Tx], contracttest.DatabaseFaults, error) {
	none, noFaults := contracttest.Database[*pgxstore.Tx]{}, contracttest.DatabaseFaults{}
	at, err := p.tables(ctx, dir)
	if err != nil {
		return none, noFaults, err
	}
	proxy, err := p.proxied(ctx, at)
	if err != nil {
		return none, noFaults, err
	}
	pool, d, err := p.handle(ctx, proxy.at)
	if err != nil {
		return none, noFaults, errors.Join(err, proxy.Close())
	}
	faults := proxy.faults()
	faults.Outages["read-only"] = p.readOnly(pool.Reset)
	faults.Outages["pool exhausted"] = func(ctx context.Context) (func(), func() int, error) {
		var conns []*pgxpool.Conn
		end := sync.OnceFunc(func() {
			for _, conn := range conns {
				conn.Release()
			}
		})
		for range postgresConns {
			conn, err := pool.Acquire(ctx)
			if err != nil {
				end()
				return nil, nil, err
			}
			conns = append(conns, conn)
		}
		return end, func() int { return len(conns) }, nil
	}
	return closingProxy(proxy, d), faults, nil
}
