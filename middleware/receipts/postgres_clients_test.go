package receipts_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
)

// pgClients are the ways to speak to PostgreSQL: two drivers of database/sql, and pgx itself.
func pgClients() []string { return []string{"pgx", "lib/pq", "pgxstore"} }

// pgStore is a store on PostgreSQL whatever its type of transaction is.
type pgStore interface {
	Check(ctx context.Context) (receipts.Info, error)
	Migrate(ctx context.Context) error
	Resolve(ctx context.Context, nonce receipts.Nonce) (bool, error)
	Unsent(ctx context.Context, q receipts.UnsentQuery) ([]receipts.Output, error)
	MarkSent(ctx context.Context, refs []receipts.OutputRef, at time.Time) error
	DeadLetters(ctx context.Context, limit int) ([]receipts.DeadLetter, error)
	Stats(ctx context.Context) (receipts.Stats, error)
	Classify(err error) receipts.Class
	receipts.Parker
}

// pgTx is a transaction of such a store, with what a handler does in it.
type pgTx interface {
	Nonce() receipts.Nonce
	Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error)
	Unclaim(ctx context.Context, claims []receipts.Claim) error
	AddOutputs(ctx context.Context, outputs []receipts.Output) ([]receipts.Output, error)
	Divert(ctx context.Context, letters []receipts.DeadLetter) error
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error

	exec(ctx context.Context, query string, args ...any) error
	number(ctx context.Context, query string, args ...any) (int, error)
}

type sqlPgTx struct{ receipts.Tx[*sql.Tx] }

func (t sqlPgTx) exec(ctx context.Context, query string, args ...any) error {
	_, err := t.Raw().ExecContext(ctx, query, args...)
	return err
}

func (t sqlPgTx) number(ctx context.Context, query string, args ...any) (n int, err error) {
	err = t.Raw().QueryRowContext(ctx, query, args...).Scan(&n)
	return n, err
}

type nativePgTx struct{ receipts.Tx[*pgxstore.Tx] }

func (t nativePgTx) exec(ctx context.Context, query string, args ...any) error {
	_, err := t.Raw().Exec(ctx, query, args...)
	return err
}

func (t nativePgTx) number(ctx context.Context, query string, args ...any) (n int, err error) {
	err = t.Raw().QueryRow(ctx, query, args...).Scan(&n)
	return n, err
}

// pgHandle is one process's handle of a store.
type pgHandle struct {
	client string
	store  pgStore
	begin  func(ctx context.Context, opts receipts.TxOptions) (pgTx, error)
	close  func()
}

// pgPool is the most connections of a handle.
const pgPool = 12

// pgOptions are what tests change about a handle.
type pgOptions struct {
	// url is what the address of the database becomes.
	url  func(url string) string
	pool int
	// unsafe is AllowUnsafeSync.
	unsafe bool
}

func (o pgOptions) address(at backends.Database) string {
	if o.url != nil {
		return o.url(at.URL())
	}
	return at.URL()
}

// parameter adds one to a URL.
func parameter(name, value string) func(string) string {
	return func(url string) string {
		separator := "?"
		if strings.Contains(url, "?") {
			separator = "&"
		}
		return url + separator + name + "=" + value
	}
}

// openPg opens a handle, which is closed with the test if not before.
func openPg(t testing.TB, at backends.Database, client string, opts pgOptions) *pgHandle {
	t.Helper()
	if opts.pool == 0 {
		opts.pool = pgPool
	}
	h := &pgHandle{client: client}
	if client == "pgxstore" {
		h.openNative(t, at, opts)
	} else {
		h.openSQL(t, at, opts)
	}
	t.Cleanup(h.close)
	return h
}

func (h *pgHandle) openNative(t testing.TB, at backends.Database, opts pgOptions) {
	t.Helper()
	config, err := pgxpool.ParseConfig(opts.address(at))
	must(t, err)
	config.MaxConns = int32(opts.pool) //nolint:gosec // small
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	must(t, err)
	s, err := pgxstore.New(pool, pgxstore.Options{AllowUnsafeSync: opts.unsafe})
	must(t, err)
	h.store, h.close = s, pool.Close
	h.begin = func(ctx context.Context, opts receipts.TxOptions) (pgTx, error) {
		tx, err := s.Begin(ctx, opts)
		return nativePgTx{tx}, err
	}
}

func (h *pgHandle) openSQL(t testing.TB, at backends.Database, opts pgOptions) {
	t.Helper()
	driver := map[string]string{"pgx": "pgx", "lib/pq": "postgres"}[h.client]
	db, err := sql.Open(driver, opts.address(at))
	must(t, err)
	db.SetMaxOpenConns(opts.pool)
	db.SetMaxIdleConns(opts.pool)
	s, err := receipts.NewPostgres(db, receipts.PostgresOptions{AllowUnsafeSync: opts.unsafe})
	must(t, err)
	h.store, h.close = s, func() { must(t, db.Close()) }
	h.begin = func(ctx context.Context, opts receipts.TxOptions) (pgTx, error) {
		tx, err := s.Begin(ctx, opts)
		return sqlPgTx{tx}, err
	}
}

// pgDB is a database on PostgreSQL with the tables and an effect table, a handle of the store, and one to look at it.
type pgDB struct {
	*pgHandle
	at   backends.Database
	look *sql.DB
}

const pgCounters = `CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)`

// onEachPgClient runs a test in a database of its own with each client.
func onEachPgClient(t *testing.T, f func(t *testing.T, db *pgDB)) {
	t.Helper()
	for _, client := range pgClients() {
		t.Run(client, func(t *testing.T) {
			t.Parallel()
			f(t, newPgDB(t, servers.Postgres(t), client, pgOptions{}))
		})
	}
}

func newPgDB(t testing.TB, at backends.Database, client string, opts pgOptions) *pgDB {
	t.Helper()
	look, err := sql.Open("pgx", at.URL())
	must(t, err)
	t.Cleanup(func() { must(t, look.Close()) })
	db := &pgDB{pgHandle: openPg(t, at, client, opts), at: at, look: look}
	must(t, db.store.Migrate(t.Context()))
	mustExec(t, look, pgCounters)
	return db
}

// tx begins a transaction that is rolled back with the test where it is still open.
func (h *pgHandle) tx(t testing.TB, opts ...receipts.TxOptions) pgTx {
	t.Helper()
	opt := receipts.TxOptions{Budget: time.Minute}
	for _, o := range opts {
		opt = o
	}
	tx, err := h.begin(t.Context(), opt)
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = tx.Rollback(ctx)
	})
	return tx
}

// claimed begins a transaction with fresh claims.
func (h *pgHandle) claimed(t testing.TB, keys ...string) pgTx {
	t.Helper()
	tx := h.tx(t)
	for i, r := range claimsOf(t, tx, keys...) {
		if r.Status != receipts.ClaimFresh {
			t.Fatalf("claim of %q: %+v", keys[i], r)
		}
	}
	return tx
}

func claimsOf(t testing.TB, tx pgTx, keys ...string) []receipts.ClaimResult {
	t.Helper()
	results, err := tx.Claim(t.Context(), claimList(keys...))
	must(t, err)
	return results
}

func claimList(keys ...string) []receipts.Claim {
	claims := make([]receipts.Claim, len(keys))
	for i, key := range keys {
		claims[i] = claim(key)
	}
	return claims
}

const pgAdd = `INSERT INTO counters VALUES ($1, 1) ON CONFLICT (name) DO UPDATE SET value = counters.value + 1`

// add is a handler's effect.
func add(t testing.TB, tx pgTx, name string) {
	t.Helper()
	must(t, tx.exec(t.Context(), pgAdd, name))
}

func (db *pgDB) count(t testing.TB, query string, args ...any) int {
	t.Helper()
	return count(t, db.look, query, args...)
}

func (db *pgDB) wantEffect(t testing.TB, name string, want int) {
	t.Helper()
	if n := db.count(t, `SELECT coalesce(sum(value), 0) FROM counters WHERE name = $1`, name); n != want {
		t.Errorf("effect %q: %d, want %d", name, n, want)
	}
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

// wantIdle fails where a session of this database stays inside a transaction.
func (db *pgDB) wantIdle(t testing.TB) {
	t.Helper()
	eventually(t, "every session is outside a transaction", func() bool {
		return db.count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL
	AND pid <> pg_backend_pid()`) == 0
	})
}

// wantUsable processes messages on several connections of the pool at a time.
func (db *pgDB) wantUsable(t testing.TB, key string) {
	t.Helper()
	var open []pgTx
	for i := range 4 {
		tx := db.claimed(t, key+itoa(i))
		add(t, tx, key+itoa(i))
		open = append(open, tx)
	}
	for i, tx := range open {
		must(t, tx.Commit(t.Context()))
		db.wantEffect(t, key+itoa(i), 1)
	}
	db.wantIdle(t)
}

func (db *pgDB) wantClass(t testing.TB, err error, want receipts.Class) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if got := db.store.Classify(err); got != want {
		t.Errorf("Classify says %d, want %d: %v", got, want, err)
	}
}

// backend gives the server's process of a transaction.
func backend(t testing.TB, tx pgTx) int {
	t.Helper()
	pid, err := tx.number(t.Context(), `SELECT pg_backend_pid()`)
	must(t, err)
	return pid
}

// terminate ends a server's process and waits for that.
func (db *pgDB) terminate(t testing.TB, pid int) {
	t.Helper()
	db.count(t, `SELECT count(pg_terminate_backend($1))`, pid)
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

func wantIs(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}
