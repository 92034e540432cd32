package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/go-sql-driver/mysql" // registers the driver
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib" // registers the driver

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

// pool is how many connections each process has.
const pool = 8

// tableSQL makes the one table, which has no unique key: what takes effect twice shows.
const tableSQL = `CREATE TABLE effects (id VARCHAR(20) NOT NULL)`

// store is one way to keep receipts.
type store struct {
	kind   backends.Kind
	client string // the driver of database/sql with which the parent looks
	// consume calls with a handler that writes an effect, and the middleware around it.
	consume func(ctx context.Context, dsn string, cfg idempotency.Config, with func(middleware, message.NoPublishHandlerFunc) error) error
	migrate func(ctx context.Context, db *sql.DB) error
}

// middleware is what the consumer needs of idempotency.Middleware, whatever its transaction is.
type middleware interface{ Report() idempotency.Report }

func stores() map[string]store {
	postgres := func(db *sql.DB) (receipts.Store[*sql.Tx], error) {
		return receipts.NewPostgres(db, receipts.PostgresOptions{})
	}
	mysql := func(db *sql.DB) (receipts.Store[*sql.Tx], error) {
		return receipts.NewMySQL(db, receipts.MySQLOptions{})
	}
	return map[string]store{
		"postgres": {
			kind: backends.Postgres, client: "pgx", migrate: migrate(postgres),
			consume: overSQL("pgx", postgres, `INSERT INTO effects (id) VALUES ($1)`),
		},
		"pgxstore": {kind: backends.Postgres, client: "pgx", migrate: migrate(postgres), consume: overPgx},
		"mysql": {
			kind: backends.MySQL, client: "mysql", migrate: migrate(mysql),
			consume: overSQL("mysql", mysql, `INSERT INTO effects (id) VALUES (?)`),
		},
	}
}

func migrate(open func(*sql.DB) (receipts.Store[*sql.Tx], error)) func(context.Context, *sql.DB) error {
	return func(ctx context.Context, db *sql.DB) error {
		s, err := open(db)
		if err != nil {
			return err
		}
		return s.Migrate(ctx)
	}
}

// overSQL consumes over database/sql.
func overSQL(client string, open func(*sql.DB) (receipts.Store[*sql.Tx], error), insert string) func(
	context.Context, string, idempotency.Config, func(middleware, message.NoPublishHandlerFunc) error) error {
	return func(_ context.Context, dsn string, cfg idempotency.Config, with func(middleware, message.NoPublishHandlerFunc) error) (err error) {
		db, err := sql.Open(client, dsn)
		if err != nil {
			return fmt.Errorf("open the database: %w", err)
		}
		defer func() { err = errors.Join(err, db.Close()) }()
		db.SetMaxOpenConns(pool)
		db.SetMaxIdleConns(pool)
		s, err := open(db)
		if err != nil {
			return err
		}
		m, err := idempotency.New(s, cfg)
		if err != nil {
			return err
		}
		return with(m, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			_, err := tx.ExecContext(ctx, insert, msg.UUID)
			return err
		}))
	}
}

// overPgx consumes on pgx itself, with queued effects.
func overPgx(ctx context.Context, dsn string, cfg idempotency.Config, with func(middleware, message.NoPublishHandlerFunc) error) error {
	conf, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return fmt.Errorf("read the address: %w", err)
	}
	conf.MaxConns = pool
	connections, err := pgxpool.NewWithConfig(ctx, conf)
	if err != nil {
		return fmt.Errorf("open the database: %w", err)
	}
	defer connections.Close()
	s, err := pgxstore.New(connections, pgxstore.Options{})
	if err != nil {
		return err
	}
	m, err := idempotency.New(s, cfg)
	if err != nil {
		return err
	}
	return with(m, m.Handle(func(_ context.Context, tx *pgxstore.Tx, msg *message.Message) error {
		tx.Queue(`INSERT INTO effects (id) VALUES ($1)`, msg.UUID)
		return nil
	}))
}
