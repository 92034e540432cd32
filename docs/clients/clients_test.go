package clients

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"testing"

	entsql "entgo.io/ent/dialect/sql"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jmoiron/sqlx"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/sqlitedialect"
	"gorm.io/driver/sqlite"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	_ "modernc.org/sqlite"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/contracttest/handlertest"
	"github.com/penstock-mq/penstock/docs/clients/ent"
	"github.com/penstock-mq/penstock/docs/clients/sqlc"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

var servers *backends.Set

func TestMain(m *testing.M) {
	var err error
	if servers, err = backends.Open(backends.Options{}); err != nil {
		panic(err)
	}
	os.Exit(servers.Around(m).Run())
}

// newDatabase is a SQLite file with the table, which has no unique key: a charge that is written twice shows.
func newDatabase(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "app.db")+
		"?_txlock=immediate&_pragma=busy_timeout(300)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, db.Close()) })
	schema, err := os.ReadFile("sqlc/schema.sql")
	require.NoError(t, err)
	_, err = db.ExecContext(t.Context(), string(schema))
	require.NoError(t, err)
	return db
}

// charges reads the rows.
func charges(ctx context.Context, db *sql.DB) ([]charge, error) {
	rows, err := db.QueryContext(ctx, `SELECT id, account, cents FROM charges`)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var all []charge
	for rows.Next() {
		var c charge
		if err := rows.Scan(&c.ID, &c.Account, &c.Cents); err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, rows.Err()
}

func newMessage() *message.Message {
	return message.NewMessage("m-1", []byte(`{"account": "a", "cents": 250}`))
}

// clients makes each handler, with what it needs of a handle.
func clients() map[string]func(t *testing.T, db *sql.DB) handler {
	return map[string]func(t *testing.T, db *sql.DB) handler{
		"database/sql": func(*testing.T, *sql.DB) handler { return withDatabaseSQL },
		"sqlx":         func(_ *testing.T, db *sql.DB) handler { return withSqlx(sqlx.NewDb(db, "sqlite")) },
		"sqlc":         func(_ *testing.T, db *sql.DB) handler { return withSqlc(sqlc.New(db)) },
		"bun":          func(_ *testing.T, db *sql.DB) handler { return withBun(bun.NewDB(db, sqlitedialect.New())) },
		"gorm":         func(t *testing.T, db *sql.DB) handler { return withGORM(openGORM(t, db)) },
		"ent":          func(*testing.T, *sql.DB) handler { return withEnt },
	}
}

func openGORM(t *testing.T, db *sql.DB) *gorm.DB {
	t.Helper()
	base, err := gorm.Open(sqlite.New(sqlite.Config{Conn: db}), &gorm.Config{PrepareStmt: true, Logger: logger.Discard})
	require.NoError(t, err)
	return base
}

// Every client writes through the given transaction, and leaves its end to the middleware.
func TestClients(t *testing.T) {
	for name, with := range clients() {
		t.Run(name, func(t *testing.T) {
			handlertest.Run(t, func(t *testing.T) handlertest.Case[*sql.Tx] { return newCase(t, with) })
		})
	}
}

func newCase(t *testing.T, with func(t *testing.T, db *sql.DB) handler) handlertest.Case[*sql.Tx] {
	t.Helper()
	db := newDatabase(t)
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	require.NoError(t, err)
	return handlertest.Case[*sql.Tx]{
		Store: store, Handler: with(t, db), Message: newMessage,
		State: func(ctx context.Context) (any, error) { return charges(ctx, db) },
	}
}

// inside runs a handler in a transaction, and gives what it wrote, before the transaction is rolled back.
func inside(t *testing.T, db *sql.DB, h handler) ([]charge, error) {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback() }()
	failed := h(t.Context(), tx, newMessage())
	rows, err := tx.QueryContext(t.Context(), `SELECT id, account, cents FROM charges`)
	require.NoError(t, err, "the transaction is open")
	defer func() { _ = rows.Close() }()
	var all []charge
	for rows.Next() {
		var c charge
		require.NoError(t, rows.Scan(&c.ID, &c.Account, &c.Cents))
		all = append(all, c)
	}
	require.NoError(t, rows.Err())
	return all, failed
}

func TestClientsWriteWhatTheyAreTold(t *testing.T) {
	for name, with := range clients() {
		t.Run(name, func(t *testing.T) {
			db := newDatabase(t)
			h := with(t, db)
			written, err := inside(t, db, h)
			require.NoError(t, err)
			assert.Equal(t, []charge{{ID: "m-1", Account: "a", Cents: 250}}, written)
			after, err := charges(t.Context(), db)
			require.NoError(t, err)
			assert.Empty(t, after, "it was rolled back")
			require.Error(t, h(t.Context(), nil, message.NewMessage("m-2", []byte("?"))))
		})
	}
}

// GORM's own transactions inside ours are savepoints: what fails in one is undone alone.
func TestGORMNests(t *testing.T) {
	nested := func(t *testing.T, db *sql.DB) handler {
		base := openGORM(t, db)
		return func(ctx context.Context, tx *sql.Tx, _ *message.Message) error {
			within := inTx(ctx, base, tx)
			if err := within.Transaction(func(inner *gorm.DB) error {
				return inner.Create(&gormCharge{ID: "kept", Account: "a", Cents: 1}).Error
			}); err != nil {
				return err
			}
			refused := errors.New("undo this")
			if err := within.Transaction(func(inner *gorm.DB) error {
				return errors.Join(inner.Create(&gormCharge{ID: "undone", Account: "a", Cents: 1}).Error, refused)
			}); !errors.Is(err, refused) {
				return err
			}
			return nil
		}
	}
	db := newDatabase(t)
	written, err := inside(t, db, nested(t, db))
	require.NoError(t, err)
	assert.Equal(t, []charge{{ID: "kept", Account: "a", Cents: 1}}, written)
	handlertest.Run(t, func(t *testing.T) handlertest.Case[*sql.Tx] { return newCase(t, nested) })
}

// A base that other goroutines use is not changed by a handler.
func TestGORMLeavesItsBaseAlone(t *testing.T) {
	db := newDatabase(t)
	base := openGORM(t, db)
	before := base.Statement.ConnPool
	_, err := inside(t, db, withGORM(base))
	require.NoError(t, err)
	assert.Same(t, before, base.Statement.ConnPool)
}

// What ent does in a transaction of its own, or wants one for, happens in ours. Its Commit and Rollback do nothing.
func TestEntJoins(t *testing.T) {
	db := newDatabase(t)
	written, err := inside(t, db, func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		if err := withEnt(ctx, tx, msg); err != nil {
			return err
		}
		client := ent.NewClient(ent.Driver(entTx{connOf(tx)}))
		if err := client.Charge.UpdateOneID("m-1").AddCents(50).Exec(ctx); err != nil {
			return err
		}
		own, err := client.Tx(ctx)
		if err != nil {
			return err
		}
		if err := own.Charge.Create().SetID("m-2").SetAccount("b").SetCents(1).Exec(ctx); err != nil {
			return err
		}
		return own.Rollback()
	})
	require.NoError(t, err)
	assert.Equal(t, []charge{{ID: "m-1", Account: "a", Cents: 300}, {ID: "m-2", Account: "b", Cents: 1}}, written)
}

// On pgx itself, with a statement that is answered and one that is queued.
func TestPgx(t *testing.T) {
	handlertest.Run(t, func(t *testing.T) handlertest.Case[*pgxstore.Tx] {
		pool, err := pgxpool.New(t.Context(), servers.Postgres(t).URL())
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		_, err = pool.Exec(t.Context(), `CREATE TABLE charges (id text NOT NULL, account text NOT NULL, cents bigint NOT NULL);
			CREATE TABLE blocked (account text NOT NULL)`)
		require.NoError(t, err)
		store, err := pgxstore.New(pool, pgxstore.Options{})
		require.NoError(t, err)
		return handlertest.Case[*pgxstore.Tx]{
			Store: store, Handler: withPgx, Message: newMessage,
			State: func(ctx context.Context) (any, error) {
				rows, err := pool.Query(ctx, `SELECT id, account, cents FROM charges`)
				if err != nil {
					return nil, err
				}
				return pgx.CollectRows(rows, pgx.RowToStructByName[charge])
			},
		}
	})
}

func connOf(tx *sql.Tx) entsql.Conn { return entsql.Conn{ExecQuerier: tx} }
