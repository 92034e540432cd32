package receipts_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/contracttest/lossydb"
	"github.com/penstock-mq/penstock/middleware/receipts"

	_ "modernc.org/sqlite"
)

// servers are the database servers of these tests.
var servers *backends.Set

func TestMain(m *testing.M) {
	var err error
	if servers, err = backends.Open(backends.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(servers.Around(m))
}

// sqliteDriver is one database/sql driver under test, with its own spelling of the same settings.
type sqliteDriver struct {
	name   string
	dsn    func(path string, settings map[string]string) string
	absent string // why it cannot run here
}

// settings are those that Check asks for; tests change one at a time.
func settings(changes ...string) map[string]string {
	s := map[string]string{"txlock": "immediate", "journal_mode": "WAL", "synchronous": "FULL", "busy_timeout": "5000"}
	for _, c := range changes {
		k, v, _ := strings.Cut(c, "=")
		s[k] = v
	}
	return s
}

func modernc() sqliteDriver {
	return sqliteDriver{name: "sqlite", dsn: func(path string, settings map[string]string) string {
		q := url.Values{}
		for k, v := range settings {
			switch {
			case v == "":
			case k == "txlock":
				q.Set("_txlock", v)
			case k == "mode":
				q.Set("mode", v)
			default:
				q.Add("_pragma", k+"("+v+")")
			}
		}
		return "file:" + path + "?" + q.Encode()
	}}
}

func mattn() sqliteDriver {
	return sqliteDriver{name: "sqlite3", absent: mattnAbsent, dsn: func(path string, settings map[string]string) string {
		q := url.Values{}
		for k, v := range settings {
			switch {
			case v == "":
			case k == "mode":
				q.Set("mode", v)
			default:
				q.Set("_"+k, v)
			}
		}
		return "file:" + path + "?" + q.Encode()
	}}
}

// drivers gives those that can run here; the other ones are skipped visibly by onEachDriver.
func drivers(testing.TB) []sqliteDriver {
	if mattnAbsent != "" {
		return []sqliteDriver{modernc()}
	}
	return []sqliteDriver{modernc(), mattn()}
}

// onEachDriver runs a test on both drivers.
func onEachDriver(t *testing.T, f func(t *testing.T, d sqliteDriver)) {
	t.Helper()
	for _, d := range []sqliteDriver{modernc(), mattn()} {
		t.Run(d.name, func(t *testing.T) {
			if d.absent != "" {
				t.Skip(d.absent)
			}
			f(t, d)
		})
	}
}

func (d sqliteDriver) file(t testing.TB) string { return filepath.Join(t.TempDir(), "receipts.db") }

// open gives a handle that is closed with the test.
func (d sqliteDriver) open(t testing.TB, path string, changes ...string) *sql.DB {
	t.Helper()
	db, err := sql.Open(d.name, d.dsn(path, settings(changes...)))
	must(t, err)
	t.Cleanup(func() { must(t, db.Close()) })
	return db
}

// lossy gives a handle over a driver with scripted faults.
func (d sqliteDriver) lossy(t testing.TB, path string, changes ...string) (*lossydb.Connector, *sql.DB) {
	t.Helper()
	c, err := lossydb.Wrap(d.name, d.dsn(path, settings(changes...)))
	must(t, err)
	db := c.DB()
	t.Cleanup(func() { must(t, db.Close()) })
	return c, db
}

// storeOn gives a store without touching the database.
func storeOn(t testing.TB, db *sql.DB) *receipts.SQLite {
	t.Helper()
	s, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	must(t, err)
	return s
}

// migrated gives a store whose tables are there, and beside them counters for effects.
func migrated(t testing.TB, db *sql.DB) *receipts.SQLite {
	t.Helper()
	s := storeOn(t, db)
	must(t, s.Migrate(context.Background()))
	return s
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mustExec(t testing.TB, db *sql.DB, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := db.ExecContext(context.Background(), s); err != nil {
			t.Fatal(fmt.Errorf("%s: %w", s, err))
		}
	}
}
