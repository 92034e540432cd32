package receipts_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// TestMySQLCheckRefuses wants each setting that cannot work to be refused, in words that say what to change.
func TestMySQLCheckRefuses(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change func(*mysql.Config)
		before []string
		pool   int
		says   string
	}{
		"not strict":      {change: param("sql_mode", "''"), says: "STRICT_TRANS_TABLES"},
		"no database":     {change: func(c *mysql.Config) { c.DBName = "" }, says: "DSN"},
		"MyISAM":          {before: []string{"ALTER TABLE penstock_markers ENGINE = MyISAM"}, says: "ENGINE = InnoDB"},
		"one connection":  {pool: 1, says: "SetMaxOpenConns"},
		"lost table":      {before: []string{"DROP TABLE penstock_outputs"}, says: "penstock_outputs"},
		"no version":      {before: []string{"DELETE FROM penstock_schema"}, says: "empty"},
		"newer":           {before: []string{"INSERT INTO penstock_schema VALUES (99, 98, 0)"}, says: "upgrade"},
		"another table":   {before: []string{"ALTER TABLE penstock_outputs DROP COLUMN sent_at"}, says: "table is not what it was"},
		"read-only table": {before: []string{"CREATE TRIGGER no BEFORE INSERT ON penstock_markers FOR EACH ROW SIGNAL SQLSTATE '45000'"}, says: "cannot be written"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newMyDB(t)
			mustExec(t, db.DB, test.before...)
			change := test.change
			if change == nil {
				change = func(*mysql.Config) {}
			}
			other := db.again(t, change)
			if test.pool > 0 {
				other.SetMaxOpenConns(test.pool)
			}
			_, err := other.store.Check(t.Context())
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("Check: %v, want it to say %q", err, test.says)
			}
		})
	}
}

func TestMySQLCheckFinds(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	for pool, lanes := range map[int]int{0: 16, 2: 1, 5: 4, 9: 8, 17: 16, 100: 16} {
		db.SetMaxOpenConns(pool)
		info, err := db.store.Check(t.Context())
		must(t, err)
		with, err := receipts.NewMySQL(db.DB, receipts.MySQLOptions{Savepoints: true})
		must(t, err)
		other, err := with.Check(t.Context())
		must(t, err)
		if info.Lanes != lanes || info.Pool != pool || info.Parts || !other.Parts || info.Schema != 1 || info.Dialect != "mariadb" && info.Dialect != "mysql" {
			t.Errorf("with a pool of %d: %+v", pool, info)
		}
	}
	empty := openMy(t, servers.MySQL(t))
	if _, err := empty.store.Check(t.Context()); !errors.Is(err, receipts.ErrSchemaMissing) {
		t.Errorf("without tables: %v", err)
	}
	if _, err := receipts.NewMySQL(nil, receipts.MySQLOptions{}); err == nil {
		t.Error("a nil handle is taken")
	}
	if _, err := receipts.NewMySQL(db.DB, receipts.MySQLOptions{TablePrefix: "a-b"}); err == nil {
		t.Error("a prefix that is no name is taken")
	}
	sqlite := modernc()
	wrong, err := receipts.NewMySQL(sqlite.open(t, sqlite.file(t)), receipts.MySQLOptions{})
	must(t, err)
	if _, err := wrong.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "go-sql-driver/mysql") {
		t.Errorf("on SQLite: %v", err)
	}
}

// TestMySQLServerSettings needs a server of its own.
func TestMySQLServerSettings(t *testing.T) {
	t.Parallel()
	server := servers.TestServer(t, backends.MySQL, backends.ServerOptions{Settings: map[string]string{
		"log-bin": "", "binlog-format": "STATEMENT", "server-id": "1", "innodb-flush-log-at-trx-commit": "2",
	}})
	db := openMy(t, server.TestDatabase(t))
	must(t, db.store.Migrate(t.Context()))
	_, err := db.store.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), "binlog_format") {
		t.Errorf("with STATEMENT: %v", err)
	}
	mustExec(t, db.DB, "SET GLOBAL binlog_format = ROW")
	rows := db.again(t)
	if _, err := rows.store.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "innodb_flush_log_at_trx_commit") {
		t.Errorf("with a flush at 2: %v", err)
	}
	s, err := receipts.NewMySQL(rows.DB, receipts.MySQLOptions{AllowUnsafeSync: true})
	must(t, err)
	info, err := s.Check(t.Context())
	must(t, err)
	if len(info.Warnings) != 1 {
		t.Errorf("warnings: %q", info.Warnings)
	}
	mustExec(t, db.DB, "SET GLOBAL read_only = 1")
	user := db.user(t, "GRANT SELECT, INSERT, UPDATE, DELETE ON *.* TO %s")
	s, err = receipts.NewMySQL(user.DB, receipts.MySQLOptions{AllowUnsafeSync: true})
	must(t, err)
	if _, err := s.Check(t.Context()); err == nil || s.Classify(err) != receipts.ClassOutage {
		t.Errorf("on a read-only server: %v", err)
	}
}

// user opens a handle for a user who has been given that, and no more.
func (db *myDB) user(t *testing.T, grants ...string) *myDB {
	t.Helper()
	name := "u" + receipts.NewNonce().String()[:10]
	const password = "Pa55-word-of-a-test"
	who := fmt.Sprintf("'%s'@'%%'", name)
	mustExec(t, db.DB, fmt.Sprintf("CREATE USER %s IDENTIFIED BY '%s'", who, password))
	t.Cleanup(func() {
		_, err := db.ExecContext(context.Background(), "DROP USER "+who)
		must(t, err)
	})
	for _, grant := range grants {
		mustExec(t, db.DB, fmt.Sprintf(grant, who))
	}
	return openMy(t, db.at.As(name, password))
}

// TestMySQLRoleWithoutDDL does everything but make tables as a user who may not.
func TestMySQLRoleWithoutDDL(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	everyday := fmt.Sprintf("GRANT SELECT, INSERT, UPDATE, DELETE ON `%s`.* TO %%s", db.at.Name)
	user := db.user(t, everyday)
	_, err := user.store.Check(t.Context())
	must(t, err)
	must(t, user.store.Migrate(t.Context())) // there is nothing to do
	everything(t, user)
	holder := user.begin(t)
	session := sessionOf(t, holder.Raw())
	claimed(t, holder, claim("k"))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, _ = holder.Raw().ExecContext(ctx, "DO sleep(60)") // the client closes the connection, and the server sleeps
	_ = holder.Rollback(t.Context())
	db.wantGone(t, session)

	lesser := db.user(t, fmt.Sprintf("GRANT SELECT, INSERT, UPDATE ON `%s`.* TO %%s", db.at.Name))
	if _, err := lesser.store.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "right") {
		t.Errorf("without DELETE: %v", err)
	}
	must(t, err)
	empty := openMy(t, servers.MySQL(t))
	maker := empty.user(t, fmt.Sprintf("GRANT SELECT, INSERT ON `%s`.* TO %%s", empty.at.Name))
	if err := maker.store.Migrate(t.Context()); err == nil {
		t.Error("a user without DDL has made tables")
	}
}

// TestMySQLMigrations runs the printed files, half of them, and all again.
func TestMySQLMigrations(t *testing.T) {
	t.Parallel()
	if _, err := receipts.MySQLMigrations("a b"); err == nil {
		t.Error("a prefix that is no name is taken")
	}
	migrations, err := receipts.MySQLMigrations("mine_")
	must(t, err)
	if len(migrations) != 1 || strings.Contains(migrations[0].SQL, "penstock_") {
		t.Fatalf("%d migrations, first %q", len(migrations), migrations[0].Name)
	}
	db := openMy(t, servers.MySQL(t), func(c *mysql.Config) { c.MultiStatements = true })
	s, err := receipts.NewMySQL(db.DB, receipts.MySQLOptions{TablePrefix: "mine_"})
	must(t, err)
	half, _, _ := strings.Cut(migrations[0].SQL, "-- Messages a handler produced")
	mustExec(t, db.DB, half) // and then the connection was lost
	if _, err := s.Check(t.Context()); err == nil {
		t.Error("half of the tables are enough")
	}
	must(t, s.Migrate(t.Context()))
	_, err = s.Check(t.Context())
	must(t, err)
	mustExec(t, db.DB, migrations[0].SQL) // by the user's own tool, again
	_, err = s.Check(t.Context())
	must(t, err)
	mustExec(t, db.DB, "INSERT INTO mine_schema VALUES (7, 1, 0)")
	must(t, s.Migrate(t.Context()))
	info, err := s.Check(t.Context())
	must(t, err)
	if info.Schema != 7 {
		t.Errorf("schema %d", info.Schema)
	}
}

// TestMySQLClassify goes through what the numbers mean, however they are wrapped.
func TestMySQLClassify(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	if got := db.store.Classify(mysql.ErrInvalidConn); got != receipts.ClassOther {
		t.Errorf("before Check the client's sentinel is %d: it was learned by magic", got)
	}
	_, err := db.store.Check(t.Context())
	must(t, err)
	number := func(n uint16) error { return &mysql.MySQLError{Number: n, Message: "Deadlock found"} }
	tests := []struct {
		err  error
		want receipts.Class
	}{
		{nil, receipts.ClassOther},
		{number(1213), receipts.ClassContention},
		{number(1205), receipts.ClassContention},
		{number(1020), receipts.ClassContention},
		{number(1062), receipts.ClassOther},
		{number(1048), receipts.ClassOther},
		{number(1969), receipts.ClassOther},
		{number(1040), receipts.ClassOutage},
		{number(1114), receipts.ClassOutage},
		{number(1290), receipts.ClassOutage},
		{number(1053), receipts.ClassOutage},
		{number(1927), receipts.ClassOutage},
		{mysql.ErrInvalidConn, receipts.ClassOutage},
		{io.ErrUnexpectedEOF, receipts.ClassOutage},
		{&net.OpError{Op: "dial", Err: errors.New("refused")}, receipts.ClassOutage},
		{sql.ErrConnDone, receipts.ClassOutage},
		{sql.ErrNoRows, receipts.ClassOther},
		{context.DeadlineExceeded, receipts.ClassOther},
		{errors.New("Error 1213: Deadlock found"), receipts.ClassOther},
		{MySQLError{1213}, receipts.ClassOther}, // of a package of another name
		{(*mysql.MySQLError)(nil), receipts.ClassOther},
	}
	for _, test := range tests {
		wrapped := fmt.Errorf("outer: %w", errors.Join(errors.New("beside"), test.err))
		for _, err := range []error{test.err, wrapped} {
			if got := db.store.Classify(err); got != test.want {
				t.Errorf("%v: class %d, want %d", err, got, test.want)
			}
		}
	}
}

// MySQLError looks like the client's.
type MySQLError struct{ Number uint16 }

func (e MySQLError) Error() string { return "not a MySQL error" }
