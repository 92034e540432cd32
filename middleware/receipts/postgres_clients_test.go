package receipts_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/receipts"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
)

// pgDB is a database on PostgreSQL as a client sees it, with the tables and an effect table.
type pgDB struct {
	*sql.DB
	at     backends.Database
	client string
	store  *receipts.Postgres
}

const pgCounters = `CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)`

// onEachPgClient runs a test in a database of its own with each client.
func onEachPgClient(t *testing.T, f func(t *testing.T, db *pgDB)) {
	t.Helper()
	for _, client := range []string{"pgx", "postgres"} {
		t.Run(client, func(t *testing.T) {
			t.Parallel()
			f(t, newPgDB(t, client))
		})
	}
}

func newPgDB(t testing.TB, client string) *pgDB {
	t.Helper()
	return migratedPg(t, servers.Postgres(t), client)
}

func migratedPg(t testing.TB, at backends.Database, client string) *pgDB {
	t.Helper()
	db := openPg(t, at, client)
	must(t, db.store.Migrate(t.Context()))
	_, err := db.ExecContext(t.Context(), pgCounters)
	must(t, err)
	return db
}

// openPg opens another handle.
func openPg(t testing.TB, at backends.Database, client string) *pgDB {
	t.Helper()
	db, err := sql.Open(client, at.URL())
	must(t, err)
	db.SetMaxOpenConns(12)
	t.Cleanup(func() { must(t, db.Close()) })
	s, err := receipts.NewPostgres(db, receipts.PostgresOptions{})
	must(t, err)
	return &pgDB{DB: db, at: at, client: client, store: s}
}

// again is another process, as far as the database can tell.
func (db *pgDB) again(t testing.TB) *pgDB {
	t.Helper()
	return openPg(t, db.at, db.client)
}

// begin opens a transaction that is rolled back with the test where it is still open.
func (db *pgDB) begin(t testing.TB, opts ...receipts.TxOptions) receipts.Tx[*sql.Tx] {
	t.Helper()
	opt := receipts.TxOptions{Budget: time.Minute}
	for _, o := range opts {
		opt = o
	}
	tx, err := db.store.Begin(t.Context(), opt)
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// add is a handler's effect.
func (db *pgDB) add(t testing.TB, tx *sql.Tx, name string) {
	t.Helper()
	_, err := tx.ExecContext(t.Context(), `INSERT INTO counters VALUES ($1, 1) ON CONFLICT (name) DO UPDATE SET value = counters.value + 1`, name)
	must(t, err)
}

func (db *pgDB) effect(t testing.TB, name string) int {
	t.Helper()
	return db.count(t, `SELECT coalesce(sum(value), 0) FROM counters WHERE name = $1`, name)
}

func (db *pgDB) count(t testing.TB, query string, args ...any) int {
	t.Helper()
	return count(t, db.DB, query, args...)
}

func (db *pgDB) wantStats(t testing.TB, done, diverted, torn int) {
	t.Helper()
	stats, err := db.store.Stats(t.Context())
	must(t, err)
	if stats.Done != done || stats.Diverted != diverted || stats.Torn != torn {
		t.Errorf("receipts done %d, diverted %d, torn %d; want %d, %d, %d",
			stats.Done, stats.Diverted, stats.Torn, done, diverted, torn)
	}
}

// wantIdle fails where a session of this database is inside a transaction.
func (db *pgDB) wantIdle(t testing.TB) {
	t.Helper()
	eventually(t, "every session is outside a transaction", func() bool {
		return db.count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL
	AND pid <> pg_backend_pid()`) == 0
	})
}

// backend gives the server's process of a transaction.
func backend(t testing.TB, tx *sql.Tx) int {
	t.Helper()
	var pid int
	must(t, tx.QueryRowContext(t.Context(), `SELECT pg_backend_pid()`).Scan(&pid))
	return pid
}

// terminate ends a server's process and waits for that.
func (db *pgDB) terminate(t testing.TB, pid int) {
	t.Helper()
	_, err := db.ExecContext(t.Context(), `SELECT pg_terminate_backend($1)`, pid)
	must(t, err)
	eventually(t, "the process has ended", func() bool {
		return db.count(t, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid) == 0
	})
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}
