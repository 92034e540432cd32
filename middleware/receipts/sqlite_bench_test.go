package receipts_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// BenchmarkOneMessage compares one message's transaction (begin, claim, effect, commit) with what people write by hand
// (BEGIN, insert of a receipt row, effect, COMMIT), on a file with WAL and synchronous FULL, in turns on the same disk; and
// with the store without its commit hook. Medians.
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
			bare, err := receipts.NewSQLite(db, receipts.SQLiteOptions{LeaveCommitHook: true})
			must(b, err)
			_, err = bare.Check(context.Background())
			must(b, err)
			took := map[string][]time.Duration{}
			contenders := []struct {
				name string
				run  func(key, sum []byte)
			}{
				{"hand", func(key, sum []byte) { handWritten(b, db, key, sum) }},
				{"store", func(key, sum []byte) { withStore(b, store, key, sum) }},
				{"bare", func(key, sum []byte) { withStore(b, bare, key, sum) }},
			}
			b.ResetTimer()
			for i := range b.N {
				for turn := range contenders { // none of them always meets the checkpoint
					c := contenders[(i+turn)%len(contenders)]
					key := []byte(c.name + strconv.Itoa(i))
					sum := sha256.Sum256(key)
					start := time.Now()
					c.run(key, sum[:])
					took[c.name] = append(took[c.name], time.Since(start))
				}
			}
			median := map[string]float64{}
			for name, t := range took {
				slices.Sort(t)
				median[name] = float64(t[len(t)/2].Nanoseconds())
				b.ReportMetric(median[name], name+"-ns")
			}
			b.ReportMetric(median["store"]/median["hand"], "store/hand")
			b.ReportMetric(median["store"]/median["bare"], "store/bare")
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
