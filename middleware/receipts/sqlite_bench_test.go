package receipts_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"strconv"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// BenchmarkOneMessage compares one message's transaction (begin, claim, effect, commit) with what people write by hand
// (BEGIN, insert of a receipt row, effect, COMMIT), on a file with WAL and synchronous FULL, in turns on the same disk.
func BenchmarkOneMessage(b *testing.B) {
	for _, d := range drivers(b) {
		b.Run(d.name, func(b *testing.B) {
			db := d.open(b, d.file(b))
			store := migrated(b, db)
			_, err := store.Check(context.Background())
			must(b, err)
			mustExec(b, db, "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
				"INSERT INTO counters VALUES ('a', 0)",
				"CREATE TABLE seen (scope TEXT, id TEXT, hash BLOB, at INTEGER, PRIMARY KEY (scope, id)) WITHOUT ROWID")
			var byHand, byStore time.Duration
			b.ResetTimer()
			for i := range b.N {
				key := []byte("message-" + strconv.Itoa(i))
				sum := sha256.Sum256(key)
				start := time.Now()
				handWritten(b, db, key, sum[:])
				middle := time.Now()
				withStore(b, store, key, sum[:])
				byHand += middle.Sub(start)
				byStore += time.Since(middle)
			}
			b.ReportMetric(float64(byHand.Nanoseconds())/float64(b.N), "ns-by-hand/op")
			b.ReportMetric(float64(byStore.Nanoseconds())/float64(b.N), "ns-store/op")
			b.ReportMetric(float64(byStore)/float64(byHand), "ratio")
		})
	}
}

const bumpSQL = "UPDATE counters SET value = value + 1 WHERE name = 'a'"

func handWritten(b *testing.B, db *sql.DB, key, sum []byte) {
	b.Helper()
	ctx := context.Background()
	tx, err := db.BeginTx(ctx, nil)
	must(b, err)
	_, err = tx.ExecContext(ctx, "INSERT INTO seen VALUES (?, ?, ?, ?)", "billing", string(key), sum, time.Now().UnixMicro())
	must(b, err)
	_, err = tx.ExecContext(ctx, bumpSQL)
	must(b, err)
	must(b, tx.Commit())
}

func withStore(b *testing.B, store *receipts.SQLite, key, sum []byte) {
	b.Helper()
	ctx := context.Background()
	tx, err := store.Begin(ctx, receipts.TxOptions{Budget: 10 * time.Second})
	must(b, err)
	_, err = tx.Claim(ctx, []receipts.Claim{{
		Scope: "billing", Key: key, Fingerprint: sum, State: receipts.StateDone, At: time.Now(),
	}})
	must(b, err)
	_, err = tx.Raw().ExecContext(ctx, bumpSQL)
	must(b, err)
	must(b, tx.Commit(ctx))
}
