package receipts_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// coded is an error of a package that has nothing to do with SQLite, although its path may be near: its code is not ours.
type coded struct{ code int }

func (c coded) Error() string { return "database is locked" }
func (c coded) Code() int     { return c.code }

func TestClassifyWithoutCodes(t *testing.T) {
	d := modernc()
	s := storeOn(t, d.open(t, d.file(t)))
	for name, c := range map[string]struct {
		err  error
		want receipts.Class
	}{
		"nil":                  {nil, receipts.ClassOther},
		"plain":                {errors.New("SQLITE_BUSY: database is locked (5)"), receipts.ClassOther},
		"foreign code":         {coded{5}, receipts.ClassOther},
		"cancelled":            {context.Canceled, receipts.ClassOther},
		"deadline":             {context.DeadlineExceeded, receipts.ClassOther},
		"bad connection":       {driver.ErrBadConn, receipts.ClassOutage},
		"connection done":      {fmt.Errorf("x: %w", sql.ErrConnDone), receipts.ClassOutage},
		"transaction done":     {sql.ErrTxDone, receipts.ClassOther},
		"no rows":              {sql.ErrNoRows, receipts.ClassOther},
		"unknown with cause":   {fmt.Errorf("%w: %w", receipts.ErrCommitUnknown, driver.ErrBadConn), receipts.ClassOutage},
		"joined":               {errors.Join(errors.New("x"), fmt.Errorf("y: %w", driver.ErrBadConn)), receipts.ClassOutage},
		"ended":                {receipts.ErrTxEnded, receipts.ClassOther},
		"budget":               {receipts.ErrBudgetEnded, receipts.ClassOther},
		"cancelled and joined": {errors.Join(context.Canceled, errors.New("x")), receipts.ClassOther},
	} {
		t.Run(name, func(t *testing.T) {
			if got := s.Classify(c.err); got != c.want {
				t.Errorf("class %d, want %d", got, c.want)
			}
		})
	}
}

// Real errors of both drivers, wrapped and joined as applications do.
func TestClassifyRealErrors(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		s := migrated(t, db)
		mustExec(t, db, counters, "INSERT INTO counters VALUES ('a', 1)")
		exec := func(db *sql.DB, query string) error {
			_, err := db.Exec(query)
			return err
		}
		garbage := d.file(t)
		writeFile(t, garbage, "this is not a database, but it is long enough to look like a file that was one once upon a time")
		for name, c := range map[string]struct {
			err  error
			want receipts.Class
		}{
			"constraint":     {exec(db, "INSERT INTO counters VALUES ('a', 1)"), receipts.ClassOther},
			"syntax":         {exec(db, "SELEC"), receipts.ClassOther},
			"no table":       {exec(db, "DELETE FROM nowhere"), receipts.ClassOther},
			"cannot open":    {exec(d.open(t, "/nonexistent/directory/file.db"), "SELECT 1"), receipts.ClassOutage},
			"not a database": {exec(d.open(t, garbage, "journal_mode="), "SELECT * FROM sqlite_schema"), receipts.ClassOutage},
			"read-only":      {exec(d.open(t, garbage+"2", "query_only=1", "journal_mode="), "CREATE TABLE x (y)"), receipts.ClassOutage},
		} {
			if c.err == nil {
				t.Errorf("%s: no error", name)
			}
			for _, err := range []error{c.err, fmt.Errorf("handler: %w", c.err), errors.Join(errors.New("x"), c.err)} {
				if got := s.Classify(err); got != c.want {
					t.Errorf("%s: %v (%T) has class %d, want %d", name, err, c.err, got, c.want)
				}
			}
		}
	})
}

// A read-then-write transaction on a deferred handle is refused with BUSY_SNAPSHOT whatever busy_timeout says.
func TestBusySnapshotIsContention(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		db := d.open(t, path, "txlock=deferred")
		s := migrated(t, db)
		mustExec(t, db, counters)
		tx, err := db.Begin()
		must(t, err)
		defer func() { _ = tx.Rollback() }()
		var n int
		must(t, tx.QueryRow("SELECT count(*) FROM counters").Scan(&n))
		mustExec(t, d.open(t, path), "INSERT INTO counters VALUES ('a', 1)")
		_, err = tx.Exec("INSERT INTO counters VALUES ('b', 1)")
		if s.Classify(err) != receipts.ClassContention {
			t.Errorf("%v has class %d, want contention", err, s.Classify(err))
		}
	})
}
