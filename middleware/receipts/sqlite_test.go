package receipts_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"

	_ "github.com/mattn/go-sqlite3"
	_ "modernc.org/sqlite"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestSmoke(t *testing.T) {
	for _, d := range []struct{ name, dsn string }{
		{"sqlite", "file:%s?_txlock=immediate&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=busy_timeout(5000)"},
		{"sqlite3", "file:%s?_txlock=immediate&_journal_mode=WAL&_synchronous=FULL&_busy_timeout=5000"},
	} {
		t.Run(d.name, func(t *testing.T) {
			ctx := context.Background()
			db, err := sql.Open(d.name, fmt.Sprintf(d.dsn, filepath.Join(t.TempDir(), "a.db")))
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			s, _ := receipts.NewSQLite(db, receipts.SQLiteOptions{})
			_, err = s.Check(ctx)
			t.Log(err)
			if err := s.Migrate(ctx); err != nil {
				t.Fatal(err)
			}
			info, err := s.Check(ctx)
			t.Log(info, err)
			for range 2 {
				tx, err := s.Begin(ctx, receipts.TxOptions{})
				if err != nil {
					t.Fatal(err)
				}
				res, err := tx.Claim(ctx, []receipts.Claim{{Scope: "a", Key: []byte("k"), State: 1}, {Scope: "a", Key: []byte("b"), State: 1}})
				if err != nil {
					t.Fatal(err)
				}
				t.Log(res)
				tx.Tx()
				o, err := tx.AddOutputs(ctx, []receipts.Output{{Topic: "x"}})
				t.Log(o, err)
				if err := tx.Commit(ctx); err != nil {
					t.Fatal(err)
				}
				t.Log(s.Resolve(ctx, tx.Nonce()))
			}
			t.Log(s.Stats(ctx))
			t.Log(s.Unsent(ctx, receipts.UnsentQuery{Limit: 5}))
			db2, _ := sql.Open(d.name, fmt.Sprintf("file:%s", filepath.Join(t.TempDir(), "b.db")))
			defer db2.Close()
			s2, _ := receipts.NewSQLite(db2, receipts.SQLiteOptions{})
			_, err = s2.Check(ctx)
			t.Log(err)
			db2.SetMaxOpenConns(1)
			_, err = s2.Check(ctx)
			t.Log(err)
		})
	}
}
