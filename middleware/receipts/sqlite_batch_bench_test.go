package receipts_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// batch is how many messages share a transaction in BenchmarkBatch.
const batch = 256

// BenchmarkBatch compares a transaction for 256 messages with what people write by hand: BEGIN, a prepared insert of a
// receipt and a prepared effect for each message, COMMIT. All contenders work in turns on the same file (WAL, synchronous
// FULL); what is reported are medians, in nanoseconds for each message. own is what the store adds: claim, parts, guard and
// marker. The commit is the disk's, the effect the handler's. torn is the store without its marker.
//
// Keys that rise, as those of ULIDs and UUIDs of version 7 do, fall on a few pages of the table; random ones, as those of
// UUIDs of version 4, on one page each, which is then read, changed and written.
func BenchmarkBatch(b *testing.B) {
	for _, d := range drivers(b) {
		for _, keys := range []string{"rising", "random"} {
			b.Run(d.name+"/"+keys, func(b *testing.B) {
				bench := newBatchBench(b, d)
				contenders := []func(i int){
					func(i int) { bench.byHand(b, someClaims(keys, i)) },
					func(i int) { bench.byStore(b, "store", someClaims(keys, 2*i), true) },
					func(i int) { bench.byStore(b, "torn", someClaims(keys, 2*i+1), false) },
				}
				b.ResetTimer()
				for i := range b.N {
					for turn := range contenders { // none of them always meets the checkpoint
						contenders[(i+turn)%len(contenders)](i)
					}
				}
				b.StopTimer()
				bench.report(b)
			})
		}
	}
}

// someClaims are those of batch number i. Their keys have 36 bytes, like UUIDs.
func someClaims(keys string, i int) []receipts.Claim {
	claims := make([]receipts.Claim, batch)
	for k := range claims {
		sum := sha256.Sum256(fmt.Append(nil, i, "/", k))
		key := hex.EncodeToString(sum[:18])
		if keys == "rising" {
			key = fmt.Sprintf("%012d%s", i*batch+k, key[12:])
		}
		claims[k] = receipts.Claim{
			Scope: "billing/charge/orders", Key: []byte(key), Fingerprint: sum[:], State: receipts.StateDone, At: noon,
		}
	}
	return claims
}

type batchBench struct {
	store        *receipts.SQLite
	db           *sql.DB
	insert, bump *sql.Stmt
	took         map[string][]time.Duration
}

func newBatchBench(b *testing.B, d sqliteDriver) *batchBench {
	b.Helper()
	db := d.open(b, d.file(b))
	n := &batchBench{store: migrated(b, db), db: db, took: map[string][]time.Duration{}}
	_, err := n.store.Check(context.Background())
	must(b, err)
	mustExec(b, db, "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
		"INSERT INTO counters VALUES ('a', 0)",
		"CREATE TABLE seen (scope TEXT, id TEXT, hash BLOB, at INTEGER, PRIMARY KEY (scope, id)) WITHOUT ROWID")
	n.insert, err = db.Prepare("INSERT INTO seen VALUES (?, ?, ?, ?)")
	must(b, err)
	b.Cleanup(func() { must(b, n.insert.Close()) })
	n.bump, err = db.Prepare(bumpSQL)
	must(b, err)
	b.Cleanup(func() { must(b, n.bump.Close()) })
	return n
}

func (n *batchBench) add(what string, d time.Duration) { n.took[what] = append(n.took[what], d) }

func (n *batchBench) byHand(b *testing.B, claims []receipts.Claim) {
	b.Helper()
	ctx := context.Background()
	start := time.Now()
	tx, err := n.db.BeginTx(ctx, nil)
	must(b, err)
	insert, bump := tx.StmtContext(ctx, n.insert), tx.StmtContext(ctx, n.bump)
	for _, c := range claims {
		if _, err = insert.ExecContext(ctx, c.Scope, string(c.Key), c.Fingerprint, c.At.UnixMicro()); err != nil {
			b.Fatal(err)
		}
		if _, err = bump.ExecContext(ctx); err != nil {
			b.Fatal(err)
		}
	}
	middle := time.Now()
	must(b, tx.Commit())
	n.add("hand", time.Since(start))
	n.add("hand-commit", time.Since(middle))
}

func (n *batchBench) byStore(b *testing.B, what string, claims []receipts.Claim, marker bool) {
	b.Helper()
	ctx := context.Background()
	start := time.Now()
	tx, err := n.store.Begin(ctx, receipts.TxOptions{Budget: 10 * time.Second})
	must(b, err)
	begun := time.Now()
	claimed(b, tx, claims...)
	claim := time.Since(begun)
	bump := tx.Raw().StmtContext(ctx, n.bump)
	var parts, effects time.Duration
	for range claims {
		t0 := time.Now()
		partErr := tx.Part(ctx)
		t1 := time.Now()
		_, err := bump.ExecContext(ctx)
		t2 := time.Now()
		keepErr := tx.Keep(ctx)
		parts += t1.Sub(t0) + time.Since(t2)
		effects += t2.Sub(t1)
		if err := cmp.Or(partErr, err, keepErr); err != nil {
			b.Fatal(err)
		}
	}
	end, err := receipts.TimedCommit(tx, marker)
	must(b, err)
	n.add(what, time.Since(start))
	if !marker {
		n.add("torn-commit", end.Commit)
		return
	}
	n.add("begin", begun.Sub(start))
	n.add("claim", claim)
	n.add("parts", parts)
	n.add("effect", effects)
	n.add("guard", end.Guard)
	n.add("marker", end.Marker)
	n.add("commit", end.Commit)
	n.add("own", claim+parts+end.Guard+end.Marker)
}

func (n *batchBench) report(b *testing.B) {
	b.Helper()
	median := map[string]float64{}
	for what, took := range n.took {
		slices.Sort(took)
		median[what] = float64(took[len(took)/2].Nanoseconds()) / batch
		b.ReportMetric(median[what], what+"-ns/msg")
	}
	b.ReportMetric(median["store"]/median["hand"], "store/hand")
	b.ReportMetric(median["store"]/median["torn"], "store/torn")
}
