package clients

import (
	"context"
	"database/sql"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jmoiron/sqlx"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/sqlitedialect"
	"gorm.io/gorm"

	"github.com/penstock-mq/penstock/docs/clients/ent"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

// These tests show what the page warns of. One that fails after a client's update is good news: change the page.

// What goes through the client's own handle is another transaction: on SQLite it waits for ours.
func TestAnotherHandleIsLockedOut(t *testing.T) {
	db := newDatabase(t)
	ownBun, ownGORM := bun.NewDB(db, sqlitedialect.New()), openGORM(t, db)
	for name, write := range map[string]func(context.Context) error{
		"bun without Conn": func(ctx context.Context) error {
			_, err := ownBun.NewInsert().Model(&bunCharge{ID: "m-1"}).Exec(ctx)
			return err
		},
		"gorm without inTx": func(ctx context.Context) error { return ownGORM.WithContext(ctx).Create(&gormCharge{ID: "m-1"}).Error },
	} {
		t.Run(name, func(t *testing.T) {
			_, err := inside(t, db, func(ctx context.Context, _ *sql.Tx, _ *message.Message) error { return write(ctx) })
			require.ErrorContains(t, err, "locked")
		})
	}
}

func TestWhatPanics(t *testing.T) {
	db := newDatabase(t)
	for name, use := range map[string]func(ctx context.Context, tx *sql.Tx) error{
		"sqlx.Tx without Mapper": func(ctx context.Context, tx *sql.Tx) error {
			return (&sqlx.Tx{Tx: tx}).GetContext(ctx, new(charge), `SELECT 'i' AS id, 'a' AS account, 1 AS cents`)
		},
		"bun.Tx by hand": func(ctx context.Context, tx *sql.Tx) error {
			_, err := bun.Tx{Tx: tx}.NewInsert().Model(&bunCharge{ID: "m-1"}).Exec(ctx)
			return err
		},
		"entsql.NewDriver": func(ctx context.Context, tx *sql.Tx) error {
			driver := entsql.NewDriver(dialect.SQLite, entsql.Conn{ExecQuerier: tx})
			return ent.NewClient(ent.Driver(driver)).Charge.UpdateOneID("m-1").AddCents(1).Exec(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := inside(t, db, func(ctx context.Context, tx *sql.Tx, _ *message.Message) error {
				assert.Panics(t, func() { _ = use(ctx, tx) })
				return nil
			})
			require.NoError(t, err)
		})
	}
}

func TestSqlxDoesNotKnowTheDriver(t *testing.T) {
	db := newDatabase(t)
	_, err := inside(t, db, func(_ context.Context, tx *sql.Tx, _ *message.Message) error {
		x := &sqlx.Tx{Tx: tx, Mapper: sqlx.NewDb(db, "pgx").Mapper}
		assert.Equal(t, "SELECT ?", x.Rebind("SELECT ?"))
		return nil
	})
	require.NoError(t, err)
	assert.Equal(t, "SELECT $1", sqlx.NewDb(db, "pgx").Rebind("SELECT ?"), "the handle does")
}

func TestAGORMSessionWithoutContextIsItsBase(t *testing.T) {
	base := openGORM(t, newDatabase(t))
	assert.Same(t, base.Statement, base.Session(&gorm.Session{NewDB: true}).Statement)
	assert.NotSame(t, base.Statement, inTx(t.Context(), base, nil).Statement)
}

// The store refuses a client's Commit as it refuses any: the message fails, and nothing of it stays.
func TestACommitByGORMIsRefused(t *testing.T) {
	db := newDatabase(t)
	base := openGORM(t, db)
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	require.NoError(t, err)
	require.NoError(t, store.Migrate(t.Context()))
	tx, err := store.Begin(t.Context(), receipts.TxOptions{})
	require.NoError(t, err)
	within := inTx(t.Context(), base, tx.Raw())
	require.NoError(t, within.Create(&gormCharge{ID: "m-1"}).Error)
	require.Error(t, within.Commit().Error)
	require.ErrorIs(t, tx.Commit(t.Context()), receipts.ErrTxEnded)
	require.NoError(t, tx.Rollback(t.Context()))
	after, err := charges(t.Context(), db)
	require.NoError(t, err)
	assert.Empty(t, after)
}

// hooked writes a second row from a hook.
type hooked struct {
	ID      string `gorm:"primaryKey"`
	Account string
	Cents   int64
}

func (hooked) TableName() string { return "charges" }

func (h *hooked) AfterCreate(db *gorm.DB) error {
	return db.Create(&gormCharge{ID: h.ID + "-hook", Account: h.Account}).Error
}

func TestAGORMHookIsInTheTransaction(t *testing.T) {
	db := newDatabase(t)
	base := openGORM(t, db)
	written, err := inside(t, db, func(ctx context.Context, tx *sql.Tx, _ *message.Message) error {
		return inTx(ctx, base, tx).Create(&hooked{ID: "m-1", Account: "a"}).Error
	})
	require.NoError(t, err)
	assert.Len(t, written, 2)
	after, err := charges(t.Context(), db)
	require.NoError(t, err)
	assert.Empty(t, after)
}

// sqlcPgx is what sqlc's code for pgx wants, batches and COPY included.
type sqlcPgx interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
	Query(context.Context, string, ...any) (pgx.Rows, error)
	QueryRow(context.Context, string, ...any) pgx.Row
	SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
	CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error)
}

var _ sqlcPgx = (*pgxstore.Tx)(nil)
