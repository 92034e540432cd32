package pgxstore_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

const benchBatch = 256

// BenchmarkBatch compares a transaction of 256 messages, a receipt and an effect each, with a loop by hand that sends one
// pgx.Batch. The contenders alternate. store/hand below 1 means that the store takes less time.
func BenchmarkBatch(b *testing.B) {
	db := newDatabase(b)
	ctx := context.Background()
	_, err := db.Exec(ctx, `CREATE TABLE by_hand (scope BYTEA, id BYTEA, print BYTEA NOT NULL, at BIGINT NOT NULL, PRIMARY KEY (scope, id))`)
	must(b, err)
	_, err = db.Exec(ctx, `INSERT INTO counters SELECT 'counter ' || to_char(i, 'FM0000'), 0 FROM generate_series(0, 999) i`)
	must(b, err)
	_, err = db.Exec(ctx, `ALTER TABLE counters DROP CONSTRAINT counters_value_check`)
	must(b, err)
	keys := func() [][]byte {
		keys := make([][]byte, benchBatch)
		for i := range keys {
			keys[i] = []byte(rand.Text())
		}
		return keys
	}
	var hand, store, alone time.Duration
	run := func(f func(keys [][]byte)) time.Duration {
		k := keys()
		start := time.Now()
		f(k)
		return time.Since(start)
	}
	for range b.N {
		hand += run(func(k [][]byte) { byHand(b, db, k) })
		store += run(func(k [][]byte) { throughStore(b, db, k, (*pgxstore.Tx).Queue) })
		alone += run(func(k [][]byte) {
			throughStore(b, db, k, func(tx *pgxstore.Tx, sql string, args ...any) {
				_, err := tx.Exec(ctx, sql, args...)
				must(b, err)
			})
		})
	}
	per := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / float64(b.N) / benchBatch }
	b.ReportMetric(per(hand), "hand-ns/msg")
	b.ReportMetric(per(store), "queued-ns/msg")
	b.ReportMetric(per(alone), "exec-ns/msg")
	b.ReportMetric(per(hand)/per(store), "queued-speed/hand")
	b.ReportMetric(per(alone)/per(store), "queued-speed/exec")
	db.wantStats(b, 2*b.N*benchBatch, 0, 0)
}

const benchEffect = `UPDATE counters SET value = value + 1 WHERE name = $1`

func counter(i int) string { return fmt.Sprintf("counter %04d", i%1000) }

func byHand(b *testing.B, db *database, keys [][]byte) {
	ctx := context.Background()
	batch := &pgx.Batch{}
	batch.Queue("begin")
	now := time.Now().UnixMicro()
	for i, key := range keys {
		sum := sha256.Sum256(key)
		batch.Queue(`INSERT INTO by_hand (scope, id, print, at) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING`, []byte("billing"), key, sum[:], now)
		batch.Queue(benchEffect, counter(i))
	}
	batch.Queue("commit")
	must(b, db.SendBatch(ctx, batch).Close())
}

func throughStore(b *testing.B, db *database, keys [][]byte, effect func(tx *pgxstore.Tx, sql string, args ...any)) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tx, err := db.store.Begin(ctx, receipts.TxOptions{Budget: time.Minute, ClaimWait: 100 * time.Millisecond})
	must(b, err)
	claims := make([]receipts.Claim, len(keys))
	now := time.Now()
	for i, key := range keys {
		sum := sha256.Sum256(key)
		claims[i] = receipts.Claim{Scope: "billing", Key: key, Fingerprint: sum[:], State: receipts.StateDone, At: now}
	}
	_, err = tx.Claim(ctx, claims)
	must(b, err)
	for i := range keys {
		tx.(receipts.Attributing).Member(i)
		effect(tx.Raw(), benchEffect, counter(i))
	}
	must(b, tx.Commit(ctx))
}
