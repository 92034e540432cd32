package backends_test

import (
	"database/sql"
	"io"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

// open connects a client.
func open(t *testing.T, client string, d backends.Database) *sql.DB {
	t.Helper()
	db, err := sql.Open(client, d.DSN())
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, db.Close()) })
	return db
}

// closed closes what a test has opened.
func closed(t *testing.T, c io.Closer) {
	t.Helper()
	assert.NoError(t, c.Close())
}

// shared is the server that the tests share; without one the test is skipped.
func shared(t *testing.T, kind backends.Kind) backends.Database {
	t.Helper()
	servers.TestDatabase(t, kind)
	at, _, err := servers.Server(t.Context(), kind)
	require.NoError(t, err)
	return at
}

type kindCase struct {
	client string
	kind   backends.Kind
	get    func(testing.TB) backends.Database
	list   string
}

// list queries name the databases of a server.
const (
	postgresList = "SELECT datname FROM pg_database WHERE datname LIKE 'penstock_test_%'"
	mysqlList    = "SELECT schema_name FROM information_schema.schemata WHERE schema_name LIKE 'penstock_test_%'"
)

func kindCases() map[string]kindCase {
	return map[string]kindCase{
		"pgx":     {"pgx", backends.Postgres, servers.Postgres, postgresList},
		"lib/pq":  {"postgres", backends.Postgres, servers.Postgres, postgresList},
		"mariadb": {"mysql", backends.MySQL, servers.MySQL, mysqlList},
		// pgx would keep statements prepared, which transaction mode does not.
		"pgbouncer": {"postgres", backends.PgBouncer, servers.PgBouncer, postgresList},
	}
}

// Each test has a database to itself; it is gone afterwards, even with a transaction open in it.
func TestADatabaseForEachTest(t *testing.T) {
	for name, c := range kindCases() {
		t.Run(name, func(t *testing.T) {
			at := shared(t, c.kind)
			var first, second backends.Database
			t.Run("use", func(t *testing.T) {
				first, second = c.get(t), c.get(t)
				require.NotEqual(t, first.Name, second.Name)
				require.Equal(t, first.Address, second.Address)
				require.NotEmpty(t, first.Version)
				for _, d := range []backends.Database{first, second} {
					_, err := open(t, c.client, d).ExecContext(t.Context(), "CREATE TABLE a (n INT)")
					require.NoError(t, err)
				}
				tx, err := open(t, c.client, first).BeginTx(t.Context(), nil)
				require.NoError(t, err)
				_, err = tx.ExecContext(t.Context(), "INSERT INTO a VALUES (1)")
				require.NoError(t, err)
			})
			rows, err := open(t, c.client, at).QueryContext(t.Context(), c.list)
			require.NoError(t, err)
			defer closed(t, rows)
			for rows.Next() {
				var left string
				require.NoError(t, rows.Scan(&left))
				assert.NotContains(t, []string{first.Name, second.Name}, left)
			}
			require.NoError(t, rows.Err())
		})
	}
}

// Behind PgBouncer each transaction may be in another session.
func TestPgBouncerChangesSessions(t *testing.T) {
	db := open(t, "postgres", servers.PgBouncer(t))
	one, err := db.Conn(t.Context())
	require.NoError(t, err)
	defer closed(t, one)
	other, err := db.BeginTx(t.Context(), nil) // keeps one session busy
	require.NoError(t, err)
	defer func() { _ = other.Rollback() }()
	const query = "SELECT pg_backend_pid()"
	var busy, pid int
	require.NoError(t, other.QueryRowContext(t.Context(), query).Scan(&busy))
	require.NoError(t, one.QueryRowContext(t.Context(), query).Scan(&pid))
	require.NotEqual(t, busy, pid)
	require.NoError(t, other.Rollback())
	require.Eventually(t, func() bool {
		return one.QueryRowContext(t.Context(), query).Scan(&pid) == nil && pid == busy
	}, 10*time.Second, time.Millisecond)
}

// What a Database says of itself.
func TestDatabaseInWords(t *testing.T) {
	for name, c := range map[string]struct {
		kind backends.Kind
		dsn  string
	}{
		"postgres":  {backends.Postgres, "postgres://penstock:pw@127.0.0.1:1/a?sslmode=disable"},
		"mysql":     {backends.MySQL, "penstock:pw@tcp(127.0.0.1:1)/a"},
		"mysql8":    {backends.MySQL8, "penstock:pw@tcp(127.0.0.1:1)/a"},
		"pgbouncer": {backends.PgBouncer, "postgres://penstock:pw@127.0.0.1:1/a?sslmode=disable"},
	} {
		t.Run(name, func(t *testing.T) {
			d := backends.Database{Kind: c.kind, Name: "a"}.At("127.0.0.1:1").As("penstock", "pw")
			assert.Equal(t, c.dsn, d.DSN())
			assert.NotContains(t, d.String(), "pw")
			assert.Contains(t, d.String(), "127.0.0.1:1")
		})
	}
}
