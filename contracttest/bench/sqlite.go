package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"

	_ "modernc.org/sqlite" // registers the driver

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// sqlite is a file for each round. Each contender has one connection, as Penstock has one lane.
func sqlite() place {
	return place{
		loops: 1,
		bump:  `UPDATE counters SET value = value + 1 WHERE name = ?`,
		seen:  `INSERT INTO seen (id, at) VALUES (?, ?) ON CONFLICT DO NOTHING`,
		tables: [2]string{
			`CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT`,
			`CREATE TABLE seen (id TEXT PRIMARY KEY, at INTEGER NOT NULL) STRICT, WITHOUT ROWID`,
		},
		store: func(db *sql.DB) (receipts.Store[*sql.Tx], error) {
			return receipts.NewSQLite(db, receipts.SQLiteOptions{})
		},
		make: func(_ context.Context, w work) (site, error) {
			path := filepath.Join(w.dir, "bench.db")
			return site{open: func(use func(*sql.DB) error) error { return withFile(path, use) }, drop: holdsNothing}, nil
		},
	}
}

// withFile opens a file as durable as SQLite can: a write-ahead log that is flushed at each commit. One connection for
// each lane is the kindest setting for handlers written by hand, too: they wait in the pool's queue, in order, instead of
// in SQLite's busy loop, where some would starve.
func withFile(path string, use func(*sql.DB) error) (err error) {
	params := url.Values{
		"_txlock": {"immediate"},
		"_pragma": {"journal_mode(WAL)", "synchronous(FULL)", "busy_timeout(5000)"},
	}
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?"+params.Encode())
	if err != nil {
		return fmt.Errorf("open the database: %w", err)
	}
	db.SetMaxOpenConns(1)
	defer func() { err = errors.Join(err, db.Close()) }()
	return use(db)
}
