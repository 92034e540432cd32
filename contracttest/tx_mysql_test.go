package contracttest_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/contracttest/lossydb"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestStoreMariaDB(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, onMySQL(t, "mariadb", backends.MySQL))
}

func TestTxMemoryMariaDB(t *testing.T) {
	t.Parallel()
	contracttest.RunTx(t, unbubbled(), onMySQL(t, "mariadb", backends.MySQL))
}

// TestMariaDBSavepoints is about what differs with them.
func TestMariaDBSavepoints(t *testing.T) {
	t.Parallel()
	at := servers.TestDatabase(t, backends.MySQL)
	failing(t, contracttest.ExamineStore(t, mysqlAt(t, mysqlSavepoints(), at),
		"S13", "S14", "S15", "S16", "S17", "S19", "S20", "S21", "S26", "S27"), "")
	failing(t, contracttest.ExamineTx(t, unbubbled(), mysqlAt(t, mysqlSavepoints(), at), "T07", "T12", "T13", "T15", "T16", "T30"), "")
}

// TestStoreMySQL8 runs where PENSTOCK_MYSQL8_URL names a server.
func TestStoreMySQL8(t *testing.T) { contracttest.RunStore(t, onMySQL(t, "mysql8", backends.MySQL8)) }

// mysqlPool is the most connections of one handle.
const mysqlPool = 5

// onMySQL is a harness on the server of a kind that the tests share.
func onMySQL(t *testing.T, name string, kind backends.Kind) contracttest.StoreHarness[*sql.Tx] {
	t.Helper()
	return onMySQLOf(t, name, servers.TestDatabase(t, kind))
}

// onMySQLOf is a harness on the server of a database. There each folder has a database of its own.
func onMySQLOf(t *testing.T, name string, at backends.Database) contracttest.StoreHarness[*sql.Tx] {
	t.Helper()
	return mysqlAt(t, mysqlHarness(name), at)
}

// mysqlAt tells a harness its server, and drops with the test what it makes there.
func mysqlAt(t *testing.T, s contracttest.StoreHarness[*sql.Tx], at backends.Database) contracttest.StoreHarness[*sql.Tx] {
	t.Helper()
	tell(t, s.Name, at.DSN())
	made := map[string]bool{}
	var mu sync.Mutex
	note := func(dir string) {
		mu.Lock()
		defer mu.Unlock()
		made[mysqlName(dir)] = true
	}
	for _, open := range []*func(context.Context, string) (contracttest.Database[*sql.Tx], error){&s.Open, &s.Empty} {
		inner := *open
		*open = func(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
			note(dir)
			return inner(ctx, dir)
		}
	}
	t.Cleanup(func() {
		db, err := mysqlOpen(mysqlServer{name: s.Name}, "")
		must(t, err)
		defer func() { must(t, db.Close()) }()
		for name := range made {
			_, err := db.ExecContext(context.Background(), "DROP DATABASE IF EXISTS "+name)
			must(t, err)
		}
	})
	return s
}

// mysqlName is the name of a folder's database, the same in every process.
func mysqlName(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return "penstock_test_" + hex.EncodeToString(sum[:8])
}

// mysqlServer is the server that was told of to the harness of that name.
type mysqlServer struct {
	name string
	opts receipts.MySQLOptions
}

// config is that of a folder's database; "" is none.
func (s mysqlServer) config(dir string) (*mysql.Config, error) {
	config, err := mysql.ParseDSN(told(s.name))
	if err != nil {
		return nil, fmt.Errorf("%s is not a DSN", serverVariable(s.name))
	}
	config.Logger = &mysql.NopLogger{} // lost connections are what the tests are about
	config.Params = map[string]string{"innodb_lock_wait_timeout": "1"}
	config.InterpolateParams = true // as who wants speed sets it
	config.DBName = ""
	if dir != "" {
		config.DBName = mysqlName(dir)
	}
	return config, nil
}

func mysqlOpen(s mysqlServer, dir string) (*sql.DB, error) {
	config, err := s.config(dir)
	if err != nil {
		return nil, err
	}
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return nil, err
	}
	return mysqlPooled(sql.OpenDB(connector)), nil
}

func mysqlPooled(db *sql.DB) *sql.DB {
	db.SetMaxOpenConns(mysqlPool)
	db.SetMaxIdleConns(mysqlPool)
	return db
}

// create makes the folder's database.
func (s mysqlServer) create(ctx context.Context, dir string) error {
	db, err := mysqlOpen(s, "")
	if err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, "CREATE DATABASE IF NOT EXISTS "+mysqlName(dir)+" CHARACTER SET utf8mb4")
	return errors.Join(err, db.Close())
}

// mysqlHarness is all that the clauses need of a store on a server that a variable names.
func mysqlHarness(name string) contracttest.StoreHarness[*sql.Tx] {
	return mysqlServer{name: name}.harness()
}

// mysqlSavepointsName is that of the harness whose messages have savepoints.
const mysqlSavepointsName = "mariadb, savepoints"

func mysqlSavepoints() contracttest.StoreHarness[*sql.Tx] {
	return mysqlServer{mysqlSavepointsName, receipts.MySQLOptions{Savepoints: true}}.harness()
}

func (s mysqlServer) harness() contracttest.StoreHarness[*sql.Tx] {
	name := s.name
	return contracttest.StoreHarness[*sql.Tx]{
		Name: name,
		Open: func(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
			if err := s.create(ctx, dir); err != nil {
				return contracttest.Database[*sql.Tx]{}, err
			}
			db, err := mysqlOpen(s, dir)
			if err != nil {
				return contracttest.Database[*sql.Tx]{}, err
			}
			return s.database(ctx, db)
		},
		Empty: func(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
			if err := s.create(ctx, dir); err != nil {
				return contracttest.Database[*sql.Tx]{}, err
			}
			db, err := mysqlOpen(s, dir)
			if err != nil {
				return contracttest.Database[*sql.Tx]{}, err
			}
			store, err := receipts.NewMySQL(db, s.opts)
			return contracttest.Database[*sql.Tx]{Store: store, Close: db.Close}, err
		},
		Apply: func(ctx context.Context, tx *sql.Tx, counter string, by int64) error {
			_, err := tx.ExecContext(ctx, `INSERT INTO counters (name, n) VALUES (?, ?) ON DUPLICATE KEY UPDATE n = n + ?`, counter, by, by)
			return err
		},
		Read: func(ctx context.Context, tx *sql.Tx, counter string) (n int64, err error) {
			// What is not there cannot be locked.
			if _, err := tx.ExecContext(ctx, `INSERT INTO counters (name, n) VALUES (?, 0) ON DUPLICATE KEY UPDATE n = n`, counter); err != nil {
				return 0, err
			}
			return n, tx.QueryRowContext(ctx, `SELECT n FROM counters WHERE name = ?`, counter).Scan(&n)
		},
		End: func(ctx context.Context, tx *sql.Tx, how contracttest.Ending) error {
			if how == contracttest.EndImplicit {
				return execute("CREATE TABLE IF NOT EXISTS made_by_a_handler (n INT) ENGINE = InnoDB")(ctx, tx)
			}
			return endSQL(ctx, tx, how)
		},
		Endings: []contracttest.Ending{contracttest.EndImplicit},
		Violate: execute("INSERT INTO counters (name, n) VALUES ('violated', NULL)"),
		Errors: map[string]func(ctx context.Context, tx *sql.Tx) error{
			"deadlock":      s.deadlock,
			"lock wait":     s.lockWait,
			"cut statement": cutStatement,
		},
		Kill:       s.kill,
		OpenFaulty: s.openFaulty,
		Newer: func(ctx context.Context, dir string) (err error) {
			db, err := mysqlOpen(s, dir)
			if err != nil {
				return err
			}
			for statement := range strings.SplitSeq(nextVersion, ";") {
				_, executed := db.ExecContext(ctx, statement)
				err = errors.Join(err, executed)
			}
			return errors.Join(err, db.Close())
		},
		Limited: s.limited,
	}
}

// limited makes a user with the everyday rights, who is dropped when the handle is closed.
func (s mysqlServer) limited(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], error) {
	none := contracttest.Database[*sql.Tx]{}
	admin, err := mysqlOpen(s, dir)
	if err != nil {
		return none, err
	}
	config, err := s.config(dir)
	if err != nil {
		return none, errors.Join(err, admin.Close())
	}
	config.User, config.Passwd = "penstock_test_"+strings.ToLower(rand.Text()[:12]), rand.Text()
	for _, statement := range []string{
		fmt.Sprintf("CREATE USER %s IDENTIFIED BY '%s'", config.User, config.Passwd),
		fmt.Sprintf("GRANT SELECT, INSERT, UPDATE, DELETE ON %s.* TO %s", config.DBName, config.User),
	} {
		if _, err := admin.ExecContext(ctx, statement); err != nil {
			return none, errors.Join(err, admin.Close())
		}
	}
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return none, errors.Join(err, admin.Close())
	}
	db := mysqlPooled(sql.OpenDB(connector))
	store, err := receipts.NewMySQL(db, s.opts)
	return contracttest.Database[*sql.Tx]{
		Store:   store,
		Effects: func(ctx context.Context) (map[string]int64, error) { return readCounters(ctx, db) },
		Close: func() error {
			err := db.Close()
			_, dropped := admin.ExecContext(context.Background(), "DROP USER "+config.User)
			return errors.Join(err, dropped, admin.Close())
		},
	}, err
}

// database makes the tables and the store.
func (s mysqlServer) database(ctx context.Context, db *sql.DB) (contracttest.Database[*sql.Tx], error) {
	store, err := receipts.NewMySQL(db, s.opts)
	if err == nil {
		err = store.Migrate(ctx)
	}
	if err == nil {
		_, err = db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS counters (name VARBINARY(1500) PRIMARY KEY, n BIGINT NOT NULL) ENGINE = InnoDB`)
	}
	if err == nil {
		_, err = db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS large (t LONGTEXT) ENGINE = InnoDB`)
	}
	if err != nil {
		return contracttest.Database[*sql.Tx]{}, errors.Join(err, db.Close())
	}
	return contracttest.Database[*sql.Tx]{
		Store: store, Close: db.Close,
		Effects: func(ctx context.Context) (map[string]int64, error) { return readCounters(ctx, db) },
	}, nil
}

// cutStatement has a statement cut off by a context of its own, which closes the connection.
func cutStatement(ctx context.Context, tx *sql.Tx) error {
	ctx, cancel := context.WithTimeout(ctx, 50_000_000)
	defer cancel()
	_, err := tx.ExecContext(ctx, "DO sleep(5)")
	return err
}

// deadlock makes the transaction the victim of a deadlock: the other one has changed more, so that it is the dearer one.
func (s mysqlServer) deadlock(ctx context.Context, tx *sql.Tx) error {
	return s.against(ctx, tx, func(other *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `INSERT INTO counters (name, n) VALUES ('deadlock a', 0) ON DUPLICATE KEY UPDATE n = 0`); err != nil {
			return err
		}
		for i := range 500 {
			if _, err := other.ExecContext(ctx, `INSERT INTO counters (name, n) VALUES (?, 1) ON DUPLICATE KEY UPDATE n = 1`,
				fmt.Sprint("deadlock ", i)); err != nil {
				return err
			}
		}
		if _, err := other.ExecContext(ctx, `INSERT INTO counters (name, n) VALUES ('deadlock b', 0) ON DUPLICATE KEY UPDATE n = 0`); err != nil {
			return err
		}
		waits := make(chan error, 1)
		go func() {
			_, err := other.ExecContext(ctx, `UPDATE counters SET n = 0 WHERE name = 'deadlock a'`)
			waits <- err
		}()
		_, err := tx.ExecContext(ctx, `UPDATE counters SET n = 0 WHERE name = 'deadlock b'`)
		return errors.Join(err, <-waits)
	})
}

// lockWait has a statement wait for too long: it fails, the transaction goes on.
func (s mysqlServer) lockWait(ctx context.Context, tx *sql.Tx) error {
	return s.against(ctx, tx, func(other *sql.Tx) error {
		if _, err := other.ExecContext(ctx, `INSERT INTO counters (name, n) VALUES ('locked', 0) ON DUPLICATE KEY UPDATE n = 0`); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `SET innodb_lock_wait_timeout = 1`); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO counters (name, n) VALUES ('locked', 0) ON DUPLICATE KEY UPDATE n = 1`)
		return err
	})
}

// against runs f with another transaction in the same database, which is rolled back.
func (s mysqlServer) against(ctx context.Context, tx *sql.Tx, f func(other *sql.Tx) error) (err error) {
	var name string
	if err := tx.QueryRowContext(ctx, "SELECT database()").Scan(&name); err != nil {
		return err
	}
	config, err := s.config("")
	if err != nil {
		return err
	}
	config.DBName = name
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	defer func() { err = errors.Join(err, db.Close()) }()
	other, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	err = f(other)
	_ = other.Rollback()
	return err
}

// kill ends the session of a transaction, and waits until it is gone.
func (s mysqlServer) kill(ctx context.Context, tx *sql.Tx) error {
	var id int64
	if err := tx.QueryRowContext(ctx, "SELECT connection_id()").Scan(&id); err != nil {
		return err
	}
	db, err := mysqlOpen(s, "")
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	if _, err := db.ExecContext(ctx, fmt.Sprintf("KILL %d", id)); err != nil {
		return err
	}
	for {
		var n int
		err := db.QueryRowContext(ctx, "SELECT count(*) FROM information_schema.processlist WHERE id = ?", id).Scan(&n)
		if err != nil || n == 0 {
			return err
		}
	}
}

// openFaulty goes through a proxy for what happens to connections, and gives the errors of a server that cannot work without
// having one.
func (s mysqlServer) openFaulty(ctx context.Context, dir string) (contracttest.Database[*sql.Tx], contracttest.DatabaseFaults, error) {
	none, noFaults := contracttest.Database[*sql.Tx]{}, contracttest.DatabaseFaults{}
	config, err := s.config(dir)
	if err != nil {
		return none, noFaults, err
	}
	p, err := proxyMySQL(ctx, config)
	if err != nil {
		return none, noFaults, err
	}
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return none, noFaults, errors.Join(err, p.Close())
	}
	c := lossydb.New(connector)
	handle := mysqlPooled(c.DB())
	db, err := s.database(ctx, handle)
	if err != nil {
		return none, noFaults, errors.Join(err, p.Close())
	}
	faults := p.faults()
	faults.Outages["pool exhausted"] = exhausted(handle, mysqlPool)
	for name, number := range map[string]uint16{"full": 1114, "read-only": 1290} {
		faults.Outages[name] = func(context.Context) (func(), func() int, error) {
			f := c.FailStatement("INSERT INTO", 0, &mysql.MySQLError{Number: number, Message: name})
			return f.Stop, f.Fired, nil
		}
	}
	faults.Outages["too many connections"] = func(context.Context) (func(), func() int, error) {
		f := c.FailBegin(0, &mysql.MySQLError{Number: 1040, Message: "Too many connections"})
		return f.Stop, f.Fired, nil
	}
	return closingProxy(p, db), faults, nil
}
