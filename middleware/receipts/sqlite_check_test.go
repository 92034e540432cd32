package receipts_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest/lossydb"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestNewSQLite(t *testing.T) {
	d := modernc()
	db := d.open(t, d.file(t))
	if _, err := receipts.NewSQLite(nil, receipts.SQLiteOptions{}); err == nil || !strings.Contains(err.Error(), "nil *sql.DB") {
		t.Errorf("a nil handle: %v", err)
	}
	for prefix, ok := range map[string]bool{
		"": true, "a": true, "billing_": true, "_x9": true, strings.Repeat("p", 48): true,
		strings.Repeat("p", 49): false, "9a": false, "a b": false, "a;": false, "a\"": false, "a-b": false, "é": false, "a\n": false,
		"sqlite_x": false, "SQLite_x": false, "a.": false,
	} {
		_, err := receipts.NewSQLite(db, receipts.SQLiteOptions{TablePrefix: prefix})
		if (err == nil) != ok {
			t.Errorf("prefix %q: %v", prefix, err)
		}
		if _, err := receipts.SQLiteMigrations(prefix); (err == nil) != ok {
			t.Errorf("migrations with prefix %q: %v", prefix, err)
		}
	}
}

func TestCheckAccepts(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for _, pool := range []int{0, 1, 2, 5} {
			db := d.open(t, d.file(t))
			db.SetMaxOpenConns(pool)
			s := migrated(t, db)
			for range 2 {
				info, err := s.Check(t.Context())
				must(t, err)
				if info.Dialect != "sqlite" || info.Lanes != 1 || info.Pool != pool || info.Schema != 2 || len(info.Warnings) != 0 {
					t.Errorf("Check with a pool of %d: %+v", pool, info)
				}
			}
			if most := db.Stats().MaxOpenConnections; most != pool {
				t.Errorf("Check left the pool at %d, it was %d", most, pool)
			}
			wantFreeLock(t, db)
			for range 2 { // both connections of the probe
				conn, err := db.Conn(t.Context())
				must(t, err)
				var busy int
				must(t, conn.QueryRowContext(t.Context(), "PRAGMA busy_timeout").Scan(&busy))
				if busy != 5000 {
					t.Errorf("Check left busy_timeout at %d", busy)
				}
				if pool == 1 {
					must(t, conn.Close())
					continue
				}
				defer func() { must(t, conn.Close()) }()
			}
		}
	})
}

// filePerConnection opens another file each time, as a DSN that names a temporary file would.
type filePerConnection struct {
	driver.Connector
	t *testing.T
	d sqliteDriver
}

func (f filePerConnection) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := lossydb.Wrap(f.d.name, f.d.dsn(f.d.file(f.t), settings()))
	must(f.t, err)
	return c.Connect(ctx)
}

// Each transaction is a writer, but not of the same database.
func TestCheckSeesSeparateFiles(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := sql.OpenDB(filePerConnection{t: t, d: d})
		defer func() { must(t, db.Close()) }()
		_, err := storeOn(t, db).Check(t.Context())
		if err == nil || !strings.Contains(err.Error(), "one database file for all connections") {
			t.Errorf("Check: %v, want an error about the second writer", err)
		}
	})
}

// Each wrong setting is refused with an error that says what to change.
func TestCheckRefuses(t *testing.T) {
	cases := map[string]struct {
		changes []string
		path    string
		pool    int
		want    string
		unsafe  bool // AllowUnsafeSync lets it pass
	}{
		"deferred":                {[]string{"txlock="}, "", 0, "_txlock=immediate", false},
		"deferred, pool of one":   {[]string{"txlock=deferred"}, "", 1, "_txlock=immediate", false},
		"deferred, rollback mode": {[]string{"txlock=", "journal_mode=DELETE"}, "", 1, "_txlock=immediate", false},
		"memory with a pool":      {nil, ":memory:", 0, "SetMaxOpenConns(1)", false},
		"memory with two":         {nil, ":memory:", 2, "SetMaxOpenConns(1)", false},
		"deferred in memory":      {[]string{"txlock="}, ":memory:", 1, "_txlock=immediate", false},
		"synchronous OFF":         {[]string{"synchronous=OFF"}, "", 0, "synchronous(FULL)", true},
		"synchronous NORMAL":      {[]string{"synchronous=NORMAL"}, "", 0, "synchronous(FULL)", true},
		"journal OFF":             {[]string{"journal_mode=OFF"}, "", 0, "cannot be rolled back", false},
		"journal MEMORY":          {[]string{"journal_mode=MEMORY"}, "", 0, "damages the file", true},
	}
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				path := c.path
				if path == "" {
					path = d.file(t)
				}
				db := d.open(t, path, c.changes...)
				db.SetMaxOpenConns(c.pool)
				_ = migrated(t, db)
				for _, allow := range []bool{false, true} {
					s, err := receipts.NewSQLite(db, receipts.SQLiteOptions{AllowUnsafeSync: allow})
					must(t, err)
					info, err := s.Check(t.Context())
					if allow && c.unsafe {
						if err != nil || len(info.Warnings) != 1 || !strings.Contains(info.Warnings[0], c.want) {
							t.Errorf("allowed: %v, warnings %q; want one with %q", err, info.Warnings, c.want)
						}
						continue
					}
					if err == nil || !strings.Contains(err.Error(), c.want) {
						t.Errorf("Check: %v, want an error with %q", err, c.want)
					}
				}
				if db.Stats().InUse != 0 {
					t.Errorf("%d connections are in use", db.Stats().InUse)
				}
			})
		}
	})
}

func TestCheckWarns(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		memory := d.open(t, ":memory:")
		memory.SetMaxOpenConns(1)
		info, err := migrated(t, memory).Check(t.Context())
		must(t, err)
		if len(info.Warnings) != 1 || !strings.Contains(info.Warnings[0], "lives in memory") {
			t.Errorf("in memory: warnings %q", info.Warnings)
		}
		info, err = migrated(t, d.open(t, d.file(t), "busy_timeout=0")).Check(t.Context())
		must(t, err)
		if len(info.Warnings) != 1 || !strings.Contains(info.Warnings[0], "busy_timeout") {
			t.Errorf("without busy_timeout: warnings %q", info.Warnings)
		}
		info, err = migrated(t, d.open(t, d.file(t), "synchronous=NORMAL", "journal_mode=DELETE")).Check(t.Context())
		if err != nil || len(info.Warnings) != 1 || !strings.Contains(info.Warnings[0], "one open reader") {
			t.Errorf("synchronous NORMAL in rollback-journal mode: %v, warnings %q", err, info.Warnings)
		}
	})
}

// A table that is gone is neither overlooked nor made anew: with it went what recognises a redelivery.
func TestLostTable(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for _, table := range []string{"receipts", "markers", "outputs", "dead_letters"} {
			db := d.open(t, d.file(t))
			s := migrated(t, db)
			mustExec(t, db, "DROP TABLE penstock_"+table)
			_, checked := s.Check(t.Context())
			for call, err := range map[string]error{"Check": checked, "Migrate": s.Migrate(t.Context())} {
				if !errors.Is(err, receipts.ErrSchemaMissing) || !strings.Contains(err.Error(), "penstock_"+table) {
					t.Errorf("%s without table %s: %v", call, table, err)
				}
			}
		}
	})
}

// mattn's build makes NORMAL the default in WAL mode, which is not durable: the default must be refused too.
func TestCheckSeesDefaultSynchronous(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		migrated(t, d.open(t, path))
		db := d.open(t, path, "synchronous=", "journal_mode=")
		var sync, objects int
		conn, err := db.Conn(t.Context())
		must(t, err)
		must(t, conn.QueryRowContext(t.Context(), "SELECT count(*) FROM sqlite_schema").Scan(&objects))
		must(t, conn.QueryRowContext(t.Context(), "PRAGMA synchronous").Scan(&sync))
		must(t, conn.Close())
		_, err = storeOn(t, d.open(t, path, "synchronous=", "journal_mode=")).Check(t.Context())
		if (sync < 2) != (err != nil) {
			t.Errorf("synchronous is %d by default, and Check says %v", sync, err)
		}
	})
}

func TestCheckSchema(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		s := storeOn(t, db)
		if _, err := s.Check(t.Context()); !errors.Is(err, receipts.ErrSchemaMissing) || !strings.Contains(err.Error(), "Migrate") {
			t.Errorf("without tables: %v, want ErrSchemaMissing and the remedy", err)
		}
		must(t, s.Migrate(t.Context()))
		mustExec(t, db, "INSERT INTO penstock_schema VALUES (7, 1, 0)")
		if info, err := s.Check(t.Context()); err != nil || info.Schema != 7 {
			t.Errorf("a newer schema that this code can use: version %d, %v", info.Schema, err)
		}
		must(t, s.Migrate(t.Context()))
		mustExec(t, db, "INSERT INTO penstock_schema VALUES (8, 4, 0)")
		_, checkErr := s.Check(t.Context())
		for what, err := range map[string]error{"Check": checkErr, "Migrate": s.Migrate(t.Context())} {
			if !errors.Is(err, receipts.ErrSchemaNewer) || !strings.Contains(err.Error(), "version 8") ||
				!strings.Contains(err.Error(), "this code has version 2") {
				t.Errorf("%s on a newer schema: %v, want ErrSchemaNewer with both versions", what, err)
			}
		}
		mustExec(t, db, "DELETE FROM penstock_schema")
		if _, err := s.Check(t.Context()); err == nil {
			t.Error("an empty version table was accepted")
		}
	})
}

// Another process holds the write lock for a while: the verdict comes later and is right, in both directions.
func TestCheckWhileTheLockIsHeld(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		for txlock, ok := range map[string]bool{"immediate": true, "deferred": false} {
			path := d.file(t)
			holder := migrated(t, d.open(t, path))
			held := begin(t, holder)
			s := storeOn(t, d.open(t, path, "txlock="+txlock, "busy_timeout=10"))
			time.AfterFunc(150*time.Millisecond, func() { _ = held.Rollback(context.Background()) })
			_, err := s.Check(t.Context())
			if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "_txlock=immediate") {
				t.Errorf("Check of a %s handle: %v", txlock, err)
			}
			held = begin(t, holder)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			_, err = s.Check(ctx)
			if ok && s.Classify(err) != receipts.ClassContention || !ok && !strings.Contains(err.Error(), "_txlock=immediate") {
				t.Errorf("Check of a %s handle while the lock is held: %v", txlock, err)
			}
			must(t, held.Rollback(t.Context()))
		}
	})
}

func TestCheckOfAnotherDatabase(t *testing.T) {
	d := modernc()
	connector, db := d.lossy(t, d.file(t))
	s := migrated(t, db)
	fault := connector.FailStatement("sqlite_version", 0, errors.New("function sqlite_version() does not exist"))
	_, err := s.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), "does not answer as a SQLite database") || fault.Fired() == 0 {
		t.Errorf("Check of a database that is not SQLite: %v", err)
	}
	fault.Stop()
	fault = connector.FailStatement("sqlite_version", 0, nil)
	if _, err := s.Check(t.Context()); s.Classify(err) != receipts.ClassOutage || fault.Fired() == 0 {
		t.Errorf("Check without a connection: %v, want an outage", err)
	}
	fault.Stop()
	connector.FailStatement("wal_checkpoint", 1, lossydb.ErrNoCode)
	if _, err := s.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "SQLiteOptions.ErrorCode") {
		t.Errorf("Check of a driver whose errors have no code: %v, want the remedy", err)
	}
}

func TestOptionErrorCode(t *testing.T) {
	d := modernc()
	own := errors.New("busy, says a driver of its own")
	s, err := receipts.NewSQLite(d.open(t, d.file(t)), receipts.SQLiteOptions{ErrorCode: func(err error) (int, bool) {
		return 261, err == own //nolint:errorlint // exactly this error is asked for
	}})
	must(t, err)
	if c := s.Classify(errors.Join(errors.New("x"), own)); c != receipts.ClassContention {
		t.Errorf("class %d, want contention", c)
	}
}
