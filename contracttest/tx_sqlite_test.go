package contracttest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"net/url"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	_ "modernc.org/sqlite"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/lossydb"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// sqliteDSN spells the settings that the store asks for.
type sqliteDSN func(path string) string

func moderncDSN(path string) string {
	q := url.Values{"_txlock": {"immediate"}, "_pragma": {"busy_timeout(5000)", "journal_mode(WAL)", "synchronous(FULL)"}}
	return "file:" + path + "?" + q.Encode()
}

// mattnDSN waits for a lock for a short time only: mattn waits in C, where a bubble's clock stands still.
func mattnDSN(path string) string {
	q := url.Values{
		"_txlock": {"immediate"}, "_busy_timeout": {"500"}, "_journal_mode": {"WAL"}, "_synchronous": {"FULL"},
	}
	return "file:" + path + "?" + q.Encode()
}

// sqlitePool is the most connections of one handle.
const sqlitePool = 3

// unguarded is a store that leaves SQLite's commit hook to the application: a handler can commit, and that is found out
// afterwards.
func unguarded() contracttest.StoreHarness[*sql.Tx] {
	h := sqliteHarnessWith("modernc, unguarded", "sqlite", moderncDSN, receipts.SQLiteOptions{LeaveCommitHook: true})
	h.Waive = map[string]string{
		"T16": "what a handler writes after an error that ended the transaction is committed on its own",
		"S17": "what a handler writes after an error that ended the transaction is committed on its own",
	}
	return h
}

// sqliteHarness is all that the transaction clauses need of a store on SQLite.
func sqliteHarness(name, driver string, dsn sqliteDSN) contracttest.StoreHarness[*sql.Tx] {
	return sqliteHarnessWith(name, driver, dsn, receipts.SQLiteOptions{})
}

func sqliteHarnessWith(name, driver string, dsn sqliteDSN, opts receipts.SQLiteOptions) contracttest.StoreHarness[*sql.Tx] {
	path := func(dir string) string { return dsn(filepath.Join(dir, "app.db")) }
	return contracttest.StoreHarness[*sql.Tx]{
		Name: name,
		Open: func(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
			db, err := sql.Open(driver, path(dir))
			if err != nil {
				return contracttest.Database[*sql.Tx]{}, err
			}
			return sqliteDatabase(ctx, db, opts)
		},
		Empty: func(_ context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
			db, err := sql.Open(driver, path(dir))
			if err != nil {
				return contracttest.Database[*sql.Tx]{}, err
			}
			store, err := receipts.NewSQLite(db, opts)
			return contracttest.Database[*sql.Tx]{Store: store, Close: db.Close}, err
		},
		Apply: func(ctx context.Context, tx *sql.Tx, counter string, by int64) error {
			// The padding makes each new counter need a page of its own, so that a full disk is met at once.
			_, err := tx.ExecContext(ctx, `INSERT INTO counters (name, n, padding) VALUES (?, ?, zeroblob(5000))
				ON CONFLICT (name) DO UPDATE SET n = n + excluded.n`, counter, by)
			return err
		},
		Read: func(ctx context.Context, tx *sql.Tx, counter string) (n int64, err error) {
			err = tx.QueryRowContext(ctx, `SELECT n FROM counters WHERE name = ?`, counter).Scan(&n)
			if errors.Is(err, sql.ErrNoRows) {
				err = nil
			}
			return n, err
		},
		Newer: func(ctx context.Context, dir string) error {
			db, err := sql.Open(driver, path(dir))
			if err != nil {
				return err
			}
			_, err = db.ExecContext(ctx, nextVersion)
			return errors.Join(err, db.Close())
		},
		Limited: func(_ context.Context, dir string) (contracttest.Database[*sql.Tx], error) { // SQLite has no roles
			db, err := sql.Open(driver, path(dir))
			if err != nil {
				return contracttest.Database[*sql.Tx]{}, err
			}
			return sqliteHandle(db, opts)
		},
		End:     endSQL,
		Violate: execute("INSERT INTO counters (name, n) VALUES ('violated', NULL)"),
		Errors: map[string]func(ctx context.Context, tx *sql.Tx) error{
			"constraint that rolls back": execute("INSERT OR ROLLBACK INTO counters (name, n) VALUES ('violated', NULL)"),
			"interrupted write":          interrupted,
			"disk full":                  diskFull,
		},
		OpenFaulty: func(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], contracttest.DatabaseFaults, error) {
			c, err := lossydb.Wrap(driver, path(dir))
			if err != nil {
				return contracttest.Database[*sql.Tx]{}, contracttest.DatabaseFaults{}, err
			}
			full, err := fullError(ctx, driver)
			if err != nil {
				return contracttest.Database[*sql.Tx]{}, contracttest.DatabaseFaults{}, err
			}
			handle := c.DB()
			db, err := sqliteDatabase(ctx, handle, opts)
			return db, sqliteFaults(c, handle, full), err
		},
	}
}

// nextVersion changes the tables as a later version may, in whatever dialect.
const nextVersion = `ALTER TABLE penstock_receipts ADD COLUMN later INTEGER;
	INSERT INTO penstock_schema (version, compatible_from, applied_at) SELECT max(version) + 1, max(compatible_from), 0 FROM penstock_schema`

// sqliteDatabase makes the tables and the store.
func sqliteDatabase(ctx context.Context, db *sql.DB, opts receipts.SQLiteOptions) (contracttest.Database[*sql.Tx], error) {
	d, err := sqliteHandle(db, opts)
	if err == nil {
		err = d.Store.Migrate(ctx)
	}
	if err == nil {
		_, err = db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, n INTEGER NOT NULL, padding BLOB)`)
	}
	if err != nil {
		return contracttest.Database[*sql.Tx]{}, errors.Join(err, db.Close())
	}
	return d, nil
}

// sqliteHandle makes the store alone.
func sqliteHandle(db *sql.DB, opts receipts.SQLiteOptions) (contracttest.Database[*sql.Tx], error) {
	db.SetMaxOpenConns(sqlitePool)
	db.SetMaxIdleConns(sqlitePool)
	store, err := receipts.NewSQLite(db, opts)
	return contracttest.Database[*sql.Tx]{
		Store: store, Close: db.Close,
		Effects: func(ctx context.Context) (map[string]int64, error) { return readCounters(ctx, db) },
	}, err
}

func readCounters(ctx context.Context, db *sql.DB) (map[string]int64, error) {
	rows, err := db.QueryContext(ctx, `SELECT name, n FROM counters`)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	effects := map[string]int64{}
	for rows.Next() {
		var name string
		var n int64
		if err := rows.Scan(&name, &n); err != nil {
			return nil, err
		}
		effects[name] = n
	}
	return effects, rows.Err()
}

func endSQL(ctx context.Context, tx *sql.Tx, how contracttest.Ending) error {
	switch how {
	case contracttest.EndCommit:
		return tx.Commit()
	case contracttest.EndRollback:
		return tx.Rollback()
	default:
		_, err := tx.ExecContext(ctx, "COMMIT")
		return err
	}
}

func execute(statement string) func(ctx context.Context, tx *sql.Tx) error {
	return func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, statement)
		return err
	}
}

// interrupted has a write cut off in the middle by a context of its own. The time is real also in a bubble, where none
// passes while a statement runs.
func interrupted(ctx context.Context, tx *sql.Tx) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer cancel()
		for end := realTime() + 50*time.Millisecond; realTime() < end; {
			runtime.Gosched()
		}
	}()
	_, err := tx.ExecContext(ctx, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000000)
		INSERT INTO counters (name, n) SELECT 'n' || i, 0 FROM n`)
	return err
}

func realTime() time.Duration {
	var tv syscall.Timeval
	if err := syscall.Gettimeofday(&tv); err != nil {
		return math.MaxInt64
	}
	return time.Duration(tv.Nano())
}

// diskFull has a write meet a database that may not grow, and lets it grow again.
func diskFull(ctx context.Context, tx *sql.Tx) error {
	if _, err := tx.ExecContext(ctx, "PRAGMA max_page_count = 1"); err != nil {
		return err
	}
	_, full := tx.ExecContext(ctx, "INSERT INTO counters (name, n, padding) VALUES ('full', 0, zeroblob(1000000))")
	_, err := tx.ExecContext(ctx, "PRAGMA max_page_count = 1000000")
	return errors.Join(full, err)
}

// fullError gives the driver's own error for a full disk.
func fullError(ctx context.Context, driver string) (error, error) {
	db, err := sql.Open(driver, ":memory:")
	if err != nil {
		return nil, err
	}
	defer func() { _ = db.Close() }()
	db.SetMaxOpenConns(1)
	if _, err := db.ExecContext(ctx, "PRAGMA max_page_count = 1"); err != nil {
		return nil, err
	}
	_, full := db.ExecContext(ctx, "CREATE TABLE t (x)")
	if full == nil {
		return nil, errors.New("a database of one page takes a table")
	}
	return full, nil
}

func sqliteFaults(c *lossydb.Connector, db *sql.DB, full error) contracttest.DatabaseFaults {
	return contracttest.DatabaseFaults{
		LoseCommit: loseCommit(c),
		Outages: map[string]outage{
			"stopped": stopped(c),
			"full at commit": func(context.Context) (func(), func() int, error) {
				f := c.DropCommit(0, full)
				return f.Stop, f.Fired, nil
			},
			"read-only":      pragmaOutage(db, "PRAGMA query_only = ON", "PRAGMA query_only = OFF"),
			"full":           pragmaOutage(db, "PRAGMA max_page_count = 1", "PRAGMA max_page_count = 1000000"),
			"pool exhausted": exhausted(db, sqlitePool),
		},
	}
}

// pragmaOutage sets every connection of the pool so that it refuses to write, and proves that it does.
func pragmaOutage(db *sql.DB, on, off string) outage {
	set := func(ctx context.Context, pragma string, then func(*sql.Conn) error) error {
		conns, err := takeAll(ctx, db, sqlitePool)
		if err != nil {
			return err
		}
		defer giveAll(conns)
		for _, c := range conns {
			if _, err := c.ExecContext(ctx, pragma); err != nil {
				return err
			}
			if err := then(c); err != nil {
				return err
			}
		}
		return nil
	}
	return func(ctx context.Context) (func(), func() int, error) {
		refused := 0
		err := set(ctx, on, func(c *sql.Conn) error {
			_, err := c.ExecContext(ctx, `INSERT INTO counters VALUES ('probe', 0, zeroblob(5000))`)
			if err == nil {
				return fmt.Errorf("%s: a connection still writes", on)
			}
			refused++
			return nil
		})
		end := sync.OnceFunc(func() { _ = set(context.WithoutCancel(ctx), off, func(*sql.Conn) error { return nil }) })
		return end, func() int { return refused }, err
	}
}
