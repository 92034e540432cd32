package lossydb_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	_ "modernc.org/sqlite"

	"github.com/penstock-mq/penstock/contracttest/lossydb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open gives a file-backed handle with one connection at most, and a second one without faults that looks from outside.
func open(t *testing.T) (c *lossydb.Connector, db, outside *sql.DB) {
	t.Helper()
	dsn := "file:" + filepath.Join(t.TempDir(), "a.db") + "?_txlock=immediate&_pragma=busy_timeout(2000)&_pragma=journal_mode(WAL)"
	c, err := lossydb.Wrap("sqlite", dsn)
	if err != nil {
		t.Fatal(err)
	}
	outside, err = sql.Open("sqlite", dsn)
	if err != nil {
		t.Fatal(err)
	}
	db = c.DB()
	t.Cleanup(func() { _, _ = db.Close(), outside.Close() })
	if _, err := outside.Exec("CREATE TABLE t (x)"); err != nil {
		t.Fatal(err)
	}
	return c, db, outside
}

func rows(t *testing.T, db *sql.DB) (n int) {
	t.Helper()
	if err := db.QueryRow("SELECT count(*) FROM t").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func insert(db *sql.DB) error {
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	if _, err := tx.Exec("INSERT INTO t VALUES (?)", 1); err != nil {
		_ = tx.Rollback()
		return err
	}
	return tx.Commit()
}

func TestWrapRefusesUnknownDrivers(t *testing.T) {
	if _, err := lossydb.Wrap("no such driver", ""); err == nil {
		t.Error("an unknown driver was accepted")
	}
}

func TestCommitFaults(t *testing.T) {
	for name, c := range map[string]struct {
		script    func(c *lossydb.Connector, err error) *lossydb.Fault
		committed int
	}{
		"answer lost":   {func(c *lossydb.Connector, err error) *lossydb.Fault { return c.LoseCommitAnswer(1, err) }, 1},
		"never arrives": {func(c *lossydb.Connector, err error) *lossydb.Fault { return c.DropCommit(1, err) }, 0},
	} {
		for errName, want := range map[string]error{"bad connection": driver.ErrBadConn, "no code": lossydb.ErrNoCode} {
			t.Run(name+", "+errName, func(t *testing.T) {
				connector, db, outside := open(t)
				db.SetMaxOpenConns(1)
				fault := c.script(connector, want)
				if err := insert(db); !errors.Is(err, want) {
					t.Errorf("Commit: %v, want %v", err, want)
				}
				if fault.Fired() != 1 || rows(t, outside) != c.committed {
					t.Errorf("fired %d times, %d rows; want once and %d", fault.Fired(), rows(t, outside), c.committed)
				}
				// The connection is dead, its lock is free, the fault is spent.
				if err := insert(db); err != nil {
					t.Errorf("the next transaction: %v", err)
				}
				if fault.Fired() != 1 || rows(t, outside) != c.committed+1 {
					t.Errorf("fired %d times, %d rows", fault.Fired(), rows(t, outside))
				}
			})
		}
	}
}

func TestRefusedCommitLeavesTheTransactionOpen(t *testing.T) {
	connector, db, outside := open(t)
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	tx, err := conn.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec("INSERT INTO t VALUES (1)"); err != nil {
		t.Fatal(err)
	}
	fault := connector.RefuseCommit(1, lossydb.ErrNoCode)
	if err := tx.Commit(); !errors.Is(err, lossydb.ErrNoCode) || fault.Fired() != 1 {
		t.Errorf("Commit: %v, fired %d times", err, fault.Fired())
	}
	if _, err := conn.ExecContext(t.Context(), "COMMIT"); err != nil || rows(t, outside) != 1 {
		t.Errorf("the transaction was not open: %v, %d rows", err, rows(t, outside))
	}
}

func TestBeginAndConnectFaults(t *testing.T) {
	connector, db, _ := open(t)
	own := errors.New("own")
	connect := connector.FailConnect(1, own)
	if err := insert(db); !errors.Is(err, own) || connect.Fired() != 1 {
		t.Errorf("connecting: %v, fired %d times", err, connect.Fired())
	}
	begin := connector.FailBegin(2, own)
	for range 2 {
		if err := insert(db); !errors.Is(err, own) {
			t.Errorf("beginning: %v", err)
		}
	}
	if err := insert(db); err != nil || begin.Fired() != 2 {
		t.Errorf("after the fault: %v, fired %d times", err, begin.Fired())
	}
	bad := connector.FailBegin(1, nil)
	if err := insert(db); err != nil || bad.Fired() != 1 { // database/sql takes another connection
		t.Errorf("a bad connection: %v, fired %d times", err, bad.Fired())
	}
}

func TestStatementFaults(t *testing.T) {
	connector, db, outside := open(t)
	stmt, err := db.Prepare("INSERT INTO t VALUES (2)")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stmt.Close() }()
	fault := connector.FailStatement("INSERT INTO t", 0, lossydb.ErrNoCode)
	if err := insert(db); !errors.Is(err, lossydb.ErrNoCode) {
		t.Errorf("text: %v", err)
	}
	if _, err := stmt.Exec(); !errors.Is(err, lossydb.ErrNoCode) {
		t.Errorf("prepared: %v", err)
	}
	if rows(t, db) != 0 || fault.Fired() != 2 { // a query that does not match passes
		t.Errorf("%d rows, fired %d times", rows(t, db), fault.Fired())
	}
	fault.Stop()
	fault.Stop()
	if _, err := stmt.Exec(); err != nil || rows(t, outside) != 1 {
		t.Errorf("after Stop: %v, %d rows", err, rows(t, outside))
	}
	query := connector.FailStatement("SELECT", 1, lossydb.ErrNoCode)
	var n int
	if err := db.QueryRow("SELECT 1").Scan(&n); !errors.Is(err, lossydb.ErrNoCode) || query.Fired() != 1 {
		t.Errorf("query: %v, fired %d times", err, query.Fired())
	}
}

func TestOutage(t *testing.T) {
	connector, db, outside := open(t)
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec("INSERT INTO t VALUES (1)"); err != nil {
		t.Fatal(err)
	}
	fault := connector.Outage(nil)
	if err := tx.Commit(); err == nil {
		t.Error("COMMIT went through")
	}
	if _, err := db.Exec("INSERT INTO t VALUES (1)"); err == nil {
		t.Error("a statement went through")
	}
	if _, err := db.Begin(); err == nil {
		t.Error("a transaction began")
	}
	if err := db.Ping(); err == nil {
		t.Error("a connection was opened")
	}
	if fault.Fired() < 3 || rows(t, outside) != 0 {
		t.Errorf("refused %d times, %d rows", fault.Fired(), rows(t, outside))
	}
	connector.Back()
	if err := insert(db); err != nil || rows(t, outside) != 1 {
		t.Errorf("after the outage: %v, %d rows", err, rows(t, outside))
	}
}

func TestDelay(t *testing.T) {
	connector, db, _ := open(t)
	commit := connector.Delay(lossydb.OpCommit, "", 30*time.Millisecond, 1)
	start := time.Now()
	if err := insert(db); err != nil || time.Since(start) < 30*time.Millisecond || commit.Fired() != 1 {
		t.Errorf("%v after %v, fired %d times", err, time.Since(start), commit.Fired())
	}
	statement := connector.Delay(lossydb.OpStatement, "DELETE", time.Hour, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := db.ExecContext(ctx, "DELETE FROM t"); !errors.Is(err, context.DeadlineExceeded) || statement.Fired() == 0 {
		t.Errorf("a delayed statement: %v, fired %d times", err, statement.Fired())
	}
	if rows(t, db) != 1 {
		t.Error("the delayed statement ran")
	}
}

// The wrapper offers what the inner driver offers: modernc's connections reset and validate themselves, others do not.
func TestPassesInterfacesThrough(t *testing.T) {
	connector, _, _ := open(t)
	conn, err := connector.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, resets := conn.(driver.SessionResetter)
	_, validates := conn.(driver.Validator)
	if !resets || !validates {
		t.Errorf("resets %t, validates %t", resets, validates)
	}
	plain, err := lossydb.New(bareConnector{}).Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := plain.(driver.Validator); ok {
		t.Error("a connection that cannot validate itself says it can")
	}
	if _, err := plain.(driver.ExecerContext).ExecContext(t.Context(), "x", nil); !errors.Is(err, driver.ErrSkip) {
		t.Errorf("ExecContext over a driver without it: %v, want ErrSkip", err)
	}
	if _, err := plain.(driver.QueryerContext).QueryContext(t.Context(), "x", nil); !errors.Is(err, driver.ErrSkip) {
		t.Errorf("QueryContext over a driver without it: %v, want ErrSkip", err)
	}
	db := lossydb.New(bareConnector{}).DB()
	defer func() { _ = db.Close() }()
	if _, err := db.Exec("anything", 1); err != nil {
		t.Errorf("a statement over the bare driver: %v", err)
	}
	if err := insert(db); err != nil {
		t.Errorf("a transaction over the bare driver: %v", err)
	}
}

// bareConnector is a driver with nothing but what database/sql requires.
type bareConnector struct{}

func (bareConnector) Connect(context.Context) (driver.Conn, error) { return bareConn{}, nil }
func (bareConnector) Driver() driver.Driver                        { return nil }

type bareConn struct{}

func (bareConn) Prepare(string) (driver.Stmt, error) { return bareStmt{}, nil }
func (bareConn) Close() error                        { return nil }
func (bareConn) Begin() (driver.Tx, error)           { return bareTx{}, nil }

type bareTx struct{}

func (bareTx) Commit() error   { return nil }
func (bareTx) Rollback() error { return nil }

type bareStmt struct{}

func (bareStmt) Close() error                               { return nil }
func (bareStmt) NumInput() int                              { return 1 }
func (bareStmt) Exec([]driver.Value) (driver.Result, error) { return driver.RowsAffected(1), nil }
func (bareStmt) Query([]driver.Value) (driver.Rows, error)  { return nil, errors.New("no rows") }

// Faults are added, met and stopped from many goroutines.
func TestConcurrentUse(t *testing.T) {
	connector, db, outside := open(t)
	fault := connector.DropCommit(5, nil)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 5 {
				_ = insert(db)
				connector.FailConnect(1, nil).Stop()
			}
		})
	}
	wg.Wait()
	if fault.Fired() != 5 || rows(t, outside) != 15 {
		t.Errorf("fired %d times, %d rows; want 5 and 15", fault.Fired(), rows(t, outside))
	}
}
