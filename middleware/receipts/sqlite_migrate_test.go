package receipts_test

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestMigrationsArePrintable(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		migrations, err := receipts.SQLiteMigrations("own_")
		must(t, err)
		db := d.open(t, d.file(t))
		for i, m := range migrations {
			if m.Version != i+1 || !strings.HasPrefix(m.Name, "000") || strings.Contains(m.SQL, "penstock_") {
				t.Errorf("migration %d: version %d, name %s, or a table without the prefix", i, m.Version, m.Name)
			}
			mustExec(t, db, m.SQL) // as the user's own tool would
		}
		s, err := receipts.NewSQLite(db, receipts.SQLiteOptions{TablePrefix: "own_"})
		must(t, err)
		_, err = s.Check(t.Context())
		must(t, err)
		must(t, s.Migrate(t.Context()))
		tx := begin(t, s)
		claimed(t, tx, claim("a"))
		must(t, tx.Commit(t.Context()))
		wantStats(t, s, 1, 0, 0)
		if n := count(t, db, "SELECT count(*) FROM sqlite_schema WHERE name LIKE 'penstock%'"); n != 0 {
			t.Errorf("%d objects carry the default prefix", n)
		}
		other := migrated(t, db) // a second prefix in the same file
		wantStats(t, other, 0, 0, 0)
	})
}

func TestMigrateIsAllOrNothing(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		mustExec(t, db, "CREATE TABLE penstock_dead_letters (x)") // in the way of the last statements
		s := storeOn(t, db)
		if err := s.Migrate(t.Context()); err == nil {
			t.Fatal("Migrate succeeded over a foreign table")
		}
		if n := count(t, db, "SELECT count(*) FROM sqlite_schema WHERE type = 'table'"); n != 1 {
			t.Errorf("%d tables after a failed migration, want the foreign one only", n)
		}
		mustExec(t, db, "DROP TABLE penstock_dead_letters")
		must(t, s.Migrate(t.Context()))
		wantFreeLock(t, db)
	})
}

func TestMigrateConcurrently(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		mustExec(t, d.open(t, path), "CREATE TABLE warm (x)") // in WAL mode before they meet
		var wg sync.WaitGroup
		for range 4 {
			s := storeOn(t, d.open(t, path, "busy_timeout=1"))
			for range 2 {
				wg.Go(func() {
					if err := s.Migrate(context.Background()); err != nil {
						t.Errorf("Migrate: %v", err)
					}
				})
			}
		}
		wg.Wait()
		s := storeOn(t, d.open(t, path))
		_, err := s.Check(t.Context())
		must(t, err)
	})
}

const childEnv = "PENSTOCK_TEST_RECEIPTS_CHILD"

// beChild is the body of the child processes: it migrates and processes the same identities as its siblings.
func beChild(t *testing.T, path string) {
	t.Helper()
	for _, d := range drivers(t) {
		if d.name != os.Getenv(childEnv+"_DRIVER") {
			continue
		}
		s := migrated(t, d.open(t, path, "synchronous=OFF"))
		for i := range 30 {
			process(t, s, itoa(i))
		}
	}
}

func TestProcesses(t *testing.T) {
	if path := os.Getenv(childEnv); path != "" {
		beChild(t, path)
		return
	}
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		path := d.file(t)
		db := d.open(t, path)
		mustExec(t, db, counters)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				cmd := exec.Command(os.Args[0], "-test.run=^TestProcesses$", "-test.count=1")
				cmd.Env = append(os.Environ(), childEnv+"="+path, childEnv+"_DRIVER="+d.name)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("child: %v\n%s", err, out)
				}
			})
		}
		wg.Wait()
		wantStats(t, storeOn(t, db), 30, 0, 0)
		if sum := count(t, db, "SELECT sum(value) FROM counters"); sum != 30 {
			t.Errorf("three processes applied %d effects for 30 identities", sum)
		}
	})
}
