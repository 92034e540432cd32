package receipts_test

import (
	"context"
	"database/sql"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// noon is a time that SQLite keeps exactly.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)

const counters = "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID"

func claim(key string) receipts.Claim {
	return receipts.Claim{
		Scope: "billing", Key: []byte(key), Fingerprint: []byte("print of " + key), State: receipts.StateDone, At: noon,
	}
}

// begin opens a transaction that is rolled back with the test where it is still open.
func begin(t testing.TB, s *receipts.SQLite, budget ...time.Duration) receipts.Tx[*sql.Tx] {
	t.Helper()
	var opts receipts.TxOptions
	for _, b := range budget {
		opts.Budget = b
	}
	tx, err := s.Begin(context.Background(), opts)
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func claimed(t testing.TB, tx receipts.Tx[*sql.Tx], claims ...receipts.Claim) []receipts.ClaimResult {
	t.Helper()
	results, err := tx.Claim(context.Background(), claims)
	must(t, err)
	return results
}

// process runs the flow of one message whose handler increments a counter, and gives the answer to its claim.
func process(t testing.TB, s *receipts.SQLite, key string) (receipts.ClaimResult, receipts.Nonce) {
	t.Helper()
	tx := begin(t, s)
	result := claimed(t, tx, claim(key))[0]
	if result.Status == receipts.ClaimFresh {
		increment(t, tx, key)
	}
	must(t, tx.Commit(context.Background()))
	return result, tx.Nonce()
}

func increment(t testing.TB, tx receipts.Tx[*sql.Tx], name string) {
	t.Helper()
	_, err := tx.Raw().ExecContext(context.Background(), incrementSQL, name)
	must(t, err)
}

const incrementSQL = "INSERT INTO counters VALUES (?, 1) ON CONFLICT DO UPDATE SET value = value + 1"

// count gives the one number of a query.
func count(t testing.TB, db *sql.DB, query string, args ...any) int {
	t.Helper()
	var n int
	must(t, db.QueryRowContext(context.Background(), query, args...).Scan(&n))
	return n
}

func effect(t testing.TB, db *sql.DB, name string) int {
	t.Helper()
	return count(t, db, "SELECT coalesce(sum(value), 0) FROM counters WHERE name = ?", name)
}

// wantStats compares the counts of receipts.
func wantStats(t testing.TB, s *receipts.SQLite, done, diverted, torn int) {
	t.Helper()
	stats, err := s.Stats(context.Background())
	must(t, err)
	if stats.Done != done || stats.Diverted != diverted || stats.Torn != torn {
		t.Errorf("receipts done %d, diverted %d, torn %d; want %d, %d, %d",
			stats.Done, stats.Diverted, stats.Torn, done, diverted, torn)
	}
}

// wantFreeLock fails where the database still has a writer, or the pool a connection inside a transaction.
func wantFreeLock(t testing.TB, db *sql.DB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := db.Conn(ctx)
	must(t, err)
	defer func() { _ = conn.Close() }()
	if _, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		t.Fatalf("the lock is not free, or the connection not clean: %v", err)
	}
	_, err = conn.ExecContext(ctx, "ROLLBACK")
	must(t, err)
}

func itoa(n int) string { return strconv.Itoa(n) }

func writeFile(t testing.TB, path, content string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(content), 0o600))
}
