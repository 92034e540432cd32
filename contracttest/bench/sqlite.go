package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	_ "modernc.org/sqlite" // registers the driver

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// scheme says how a contender keeps its receipts.
type scheme struct {
	// prepare makes the tables, count is a query for the number of receipts.
	prepare func(ctx context.Context, db *sql.DB) error
	count   string
}

// handWritten is what people write: one row for a message, without fingerprint or marker.
func handWritten() scheme {
	return scheme{
		prepare: func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, `CREATE TABLE seen (id TEXT PRIMARY KEY, at INTEGER NOT NULL) STRICT, WITHOUT ROWID`)
			return err
		},
		count: `SELECT count(*) FROM seen`,
	}
}

// penstock has the tables of its migrations.
func penstock() scheme {
	return scheme{
		prepare: func(ctx context.Context, db *sql.DB) error {
			store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
			if err != nil {
				return err
			}
			return store.Migrate(ctx)
		},
		count: `SELECT count(*) FROM penstock_receipts r JOIN penstock_markers m ON m.nonce = r.nonce WHERE r.state = 1`,
	}
}

// body is what a contender does on its database.
type body func(ctx context.Context, w work, db *sql.DB) (took time.Duration, values []value, err error)

// onSQLite gives a contender a database of its own, and reads the result back through another handle.
func onSQLite(s scheme, do body) func(ctx context.Context, w work) (outcome, error) {
	return func(ctx context.Context, w work) (o outcome, err error) {
		path := filepath.Join(w.dir, "bench.db")
		err = withDatabase(path, func(db *sql.DB) error {
			if err := createCounters(ctx, db); err != nil {
				return fmt.Errorf("make the counters: %w", err)
			}
			if err := s.prepare(ctx, db); err != nil {
				return fmt.Errorf("make the receipts' tables: %w", err)
			}
			o.took, o.values, err = do(ctx, w, db)
			return err
		})
		if err != nil {
			return o, err
		}
		return o, withDatabase(path, func(db *sql.DB) error {
			if err := db.QueryRowContext(ctx, s.count).Scan(&o.receipts); err != nil {
				return fmt.Errorf("count the receipts: %w", err)
			}
			o.effects, err = readCounters(ctx, db)
			return err
		})
	}
}

// sqliteLanes is how many transactions each contender runs at a time: as many as Penstock has lanes.
const sqliteLanes = 1

// withDatabase opens a file as durable as SQLite can: a write-ahead log that is flushed at each commit. One connection for
// each lane is the kindest setting for handlers written by hand, too: they wait in the pool's queue, in order, instead of
// in SQLite's busy loop, where some would starve.
func withDatabase(path string, use func(*sql.DB) error) (err error) {
	params := url.Values{
		"_txlock": {"immediate"},
		"_pragma": {"journal_mode(WAL)", "synchronous(FULL)", "busy_timeout(5000)"},
	}
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?"+params.Encode())
	if err != nil {
		return fmt.Errorf("open the database: %w", err)
	}
	db.SetMaxOpenConns(sqliteLanes)
	defer func() { err = errors.Join(err, db.Close()) }()
	return use(db)
}

func createCounters(ctx context.Context, db *sql.DB) error {
	names := make([]string, counterCount)
	for i := range names {
		names[i] = "('" + counterName(i) + "', 0)"
	}
	_, err := db.ExecContext(ctx, `CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
		INSERT INTO counters (name, value) VALUES `+strings.Join(names, ", "))
	return err
}

// readCounters leaves out those that nothing was added to.
func readCounters(ctx context.Context, db *sql.DB) (effects map[string]int64, err error) {
	rows, err := db.QueryContext(ctx, `SELECT name, value FROM counters WHERE value <> 0`)
	if err != nil {
		return nil, fmt.Errorf("read the counters: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	effects = map[string]int64{}
	for rows.Next() {
		var name string
		var n int64
		if err := rows.Scan(&name, &n); err != nil {
			return nil, fmt.Errorf("read the counters: %w", err)
		}
		effects[name] = n
	}
	return effects, rows.Err()
}
