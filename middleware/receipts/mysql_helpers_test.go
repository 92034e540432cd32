package receipts_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// myDB is a database on a server of the MySQL family, with the tables and an effect table.
type myDB struct {
	*sql.DB
	at     backends.Database
	config *mysql.Config
	store  *receipts.MySQL
}

const myCounters = `CREATE TABLE IF NOT EXISTS counters (name VARBINARY(600) PRIMARY KEY, value INT NOT NULL) ENGINE = InnoDB`

// newMyDB gives a database of its own. Each change is made to the client's configuration.
func newMyDB(t testing.TB, changes ...func(*mysql.Config)) *myDB {
	t.Helper()
	db := openMy(t, servers.MySQL(t), changes...)
	must(t, db.store.Migrate(t.Context()))
	mustExec(t, db.DB, myCounters)
	return db
}

// openMy opens another handle.
func openMy(t testing.TB, at backends.Database, changes ...func(*mysql.Config)) *myDB {
	t.Helper()
	config, err := mysql.ParseDSN(at.DSN())
	must(t, err)
	config.Logger = &mysql.NopLogger{} // lost connections are what the tests are about
	for _, change := range changes {
		change(config)
	}
	connector, err := mysql.NewConnector(config)
	must(t, err)
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(12)
	db.SetMaxIdleConns(12)
	t.Cleanup(func() { _ = db.Close() }) // its error may be that of a connection that was cut
	s, err := receipts.NewMySQL(db, receipts.MySQLOptions{})
	must(t, err)
	return &myDB{DB: db, at: at, config: config, store: s}
}

// again is another process, as far as the database can tell.
func (db *myDB) again(t testing.TB, changes ...func(*mysql.Config)) *myDB {
	t.Helper()
	return openMy(t, db.at, changes...)
}

// param sets a variable of the session, or the client's own.
func param(name, value string) func(*mysql.Config) {
	return func(c *mysql.Config) {
		if c.Params == nil {
			c.Params = map[string]string{}
		}
		c.Params[name] = value
	}
}

// begin opens a transaction that is rolled back with the test where it is still open.
func (db *myDB) begin(t testing.TB, opts ...receipts.TxOptions) receipts.Tx[*sql.Tx] {
	t.Helper()
	opt := receipts.TxOptions{Budget: time.Minute}
	for _, o := range opts {
		opt = o
	}
	tx, err := db.store.Begin(t.Context(), opt)
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// add is a handler's effect.
func (db *myDB) add(t testing.TB, tx *sql.Tx, name string) {
	t.Helper()
	_, err := tx.ExecContext(t.Context(), `INSERT INTO counters VALUES (?, 1) ON DUPLICATE KEY UPDATE value = value + 1`, name)
	must(t, err)
}

func (db *myDB) effect(t testing.TB, name string) int {
	t.Helper()
	return count(t, db.DB, `SELECT coalesce(sum(value), 0) FROM counters WHERE name = ?`, name)
}

func (db *myDB) wantStats(t testing.TB, done, diverted, torn int) {
	t.Helper()
	stats, err := db.store.Stats(t.Context())
	must(t, err)
	if stats.Done != done || stats.Diverted != diverted || stats.Torn != torn {
		t.Errorf("receipts done %d, diverted %d, torn %d; want %d, %d, %d",
			stats.Done, stats.Diverted, stats.Torn, done, diverted, torn)
	}
}

// status claims one key in a transaction of its own and rolls back.
func (db *myDB) status(t testing.TB, key string) receipts.ClaimStatus {
	t.Helper()
	tx := db.begin(t)
	defer func() { must(t, tx.Rollback(t.Context())) }()
	return claimed(t, tx, claim(key))[0].Status
}

// sessionOf gives the server's number of a transaction's session.
func sessionOf(t testing.TB, tx *sql.Tx) int {
	t.Helper()
	var id int
	must(t, tx.QueryRowContext(t.Context(), `SELECT connection_id()`).Scan(&id))
	return id
}

// wantGone waits for the end of a session.
func (db *myDB) wantGone(t testing.TB, session int) {
	t.Helper()
	eventually(t, "the session has ended", func() bool {
		return count(t, db.DB, `SELECT count(*) FROM information_schema.processlist WHERE id = ?`, session) == 0
	})
}

// sessionVariables are those that a transaction of the store touches, as every connection of the pool has them. They are asked
// for one by one, so that a difference shows which.
func (db *myDB) sessionVariables(t testing.TB) []string {
	t.Helper()
	names := []string{
		"autocommit", "tx_isolation", "innodb_lock_wait_timeout", "max_statement_time", "idle_transaction_timeout", "wait_timeout", "in_transaction",
	}
	open := db.Stats().OpenConnections
	var conns []*sql.Conn
	var all []string
	for range open {
		conn, err := db.Conn(t.Context())
		must(t, err)
		conns = append(conns, conn)
		for _, name := range names {
			var value string
			must(t, conn.QueryRowContext(t.Context(), "SELECT @@"+name).Scan(&value))
			if pair := fmt.Sprintf("%s=%s", name, value); !slices.Contains(all, pair) {
				all = append(all, pair)
			}
		}
	}
	for _, conn := range conns {
		must(t, conn.Close())
	}
	return all
}

// onMariaDB skips on another server of the family: the variables have other names there.
func (db *myDB) onMariaDB(t testing.TB) {
	t.Helper()
	if count(t, db.DB, `SELECT version() LIKE '%mariadb%'`) == 0 {
		t.Skip("the server is not MariaDB: its variables have other names")
	}
}
