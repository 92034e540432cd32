package pgxstore_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

// servers are the database servers of these tests.
var servers *backends.Set

func TestMain(m *testing.M) {
	var err error
	if servers, err = backends.Open(backends.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(servers.Around(m))
}

var noon = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// database is a database of the test's own with the tables and an effect table.
type database struct {
	*pgxpool.Pool
	at    backends.Database
	store *pgxstore.Store
}

func newDatabase(t testing.TB, parameters ...string) *database {
	t.Helper()
	db := open(t, servers.Postgres(t), parameters...)
	must(t, db.store.Migrate(t.Context()))
	_, err := db.Exec(t.Context(), `CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL CHECK (value < 1000))`)
	must(t, err)
	return db
}

// open opens another pool.
func open(t testing.TB, at backends.Database, parameters ...string) *database {
	t.Helper()
	url := at.URL()
	for _, p := range parameters {
		separator := "?"
		if strings.Contains(url, "?") {
			separator = "&"
		}
		url += separator + p
	}
	config, err := pgxpool.ParseConfig(url)
	must(t, err)
	if !strings.Contains(url, "pool_max_conns") {
		config.MaxConns = 12
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	store, err := pgxstore.New(pool, pgxstore.Options{})
	must(t, err)
	return &database{Pool: pool, at: at, store: store}
}

func claim(key string) receipts.Claim {
	return receipts.Claim{
		Scope: "billing", Key: []byte(key), Fingerprint: []byte("print of " + key), State: receipts.StateDone, At: noon,
	}
}

// begin opens a transaction that is rolled back with the test where it is still open.
func (db *database) begin(t testing.TB, opts ...receipts.TxOptions) receipts.Tx[*pgxstore.Tx] {
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

// claimed begins a transaction with fresh claims.
func (db *database) claimed(t testing.TB, keys ...string) receipts.Tx[*pgxstore.Tx] {
	t.Helper()
	tx := db.begin(t)
	claims := make([]receipts.Claim, len(keys))
	for i, key := range keys {
		claims[i] = claim(key)
	}
	results, err := tx.Claim(t.Context(), claims)
	must(t, err)
	for i, r := range results {
		if r.Status != receipts.ClaimFresh {
			t.Fatalf("claim of %q: %+v", keys[i], r)
		}
	}
	return tx
}

const add = `INSERT INTO counters VALUES ($1, 1) ON CONFLICT (name) DO UPDATE SET value = counters.value + 1`

func (db *database) effect(t testing.TB, name string) (n int) {
	t.Helper()
	must(t, db.QueryRow(t.Context(), `SELECT coalesce(sum(value), 0) FROM counters WHERE name = $1`, name).Scan(&n))
	return n
}

func (db *database) wantEffect(t testing.TB, name string, want int) {
	t.Helper()
	if n := db.effect(t, name); n != want {
		t.Errorf("effect %q: %d, want %d", name, n, want)
	}
}

func (db *database) wantStats(t testing.TB, done, diverted, torn int) {
	t.Helper()
	stats, err := db.store.Stats(t.Context())
	must(t, err)
	if stats.Done != done || stats.Diverted != diverted || stats.Torn != torn {
		t.Errorf("receipts done %d, diverted %d, torn %d; want %d, %d, %d",
			stats.Done, stats.Diverted, stats.Torn, done, diverted, torn)
	}
}

// wantClean fails where a session of this database is inside a transaction, or a connection of the pool is taken.
func (db *database) wantClean(t testing.TB) {
	t.Helper()
	eventually(t, "every session is outside a transaction", func() bool {
		var n int
		must(t, db.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL
	AND pid <> pg_backend_pid()`).Scan(&n))
		return n == 0
	})
	eventually(t, "every connection is back in the pool", func() bool { return db.Stat().AcquiredConns() == 0 })
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// terminate ends a server's process and waits for that.
func (db *database) terminate(t testing.TB, pid uint32) {
	t.Helper()
	_, err := db.Exec(t.Context(), `SELECT pg_terminate_backend($1)`, int(pid))
	must(t, err)
	eventually(t, "the process has ended", func() bool {
		var n int
		must(t, db.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, int(pid)).Scan(&n))
		return n == 0
	})
}

func pidOf(tx receipts.Tx[*pgxstore.Tx]) uint32 { return tx.Raw().Conn().PgConn().PID() }

var _ pgx.Tx = (*pgxstore.Tx)(nil)
