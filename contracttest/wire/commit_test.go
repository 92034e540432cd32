package wire_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/contracttest/wire"
)

// poll is how often a server is asked for its transactions: MariaDB shows old ones while it is asked more often than every
// 100 ms.
const poll = 150 * time.Millisecond

// client is a client with its server and the proxy between them.
type client struct {
	*wire.Proxy
	d        backends.Database
	through  *sql.DB // by the proxy
	directly *sql.DB
}

type clientCase struct {
	name     string
	get      func(testing.TB) backends.Database
	protocol wire.Protocol
	// open counts the other sessions of a database that are in a transaction.
	open string
}

func clientCases() map[string]clientCase {
	const postgresOpen = `SELECT COUNT(*) FROM pg_stat_activity
		WHERE datname = current_database() AND xact_start IS NOT NULL AND backend_type = 'client backend' AND pid <> pg_backend_pid()`
	const mysqlOpen = `SELECT COUNT(*) FROM information_schema.processlist p JOIN information_schema.innodb_trx t
		ON t.trx_mysql_thread_id = p.id WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()`
	return map[string]clientCase{
		"pgx":    {"pgx", servers.Postgres, wire.Postgres, postgresOpen},
		"lib/pq": {"postgres", servers.Postgres, wire.Postgres, postgresOpen},
		"mysql":  {"mysql", servers.MySQL, wire.MySQL, mysqlOpen},
	}
}

// forEachClient runs a test with every client, each on a database with an empty table.
func forEachClient(t *testing.T, opt wire.Options, test func(*testing.T, clientCase, *client)) {
	t.Helper()
	for name, c := range clientCases() {
		t.Run(name, func(t *testing.T) { test(t, c, connect(t, c, opt)) })
	}
}

func connect(t *testing.T, c clientCase, opt wire.Options) *client {
	t.Helper()
	d := c.get(t)
	opt.Upstream, opt.Protocol = d.Address, c.protocol
	p := wire.Test(t, opt)
	all := &client{Proxy: p, d: d, through: open(t, c.name, d.At(p.Address())), directly: open(t, c.name, d)}
	_, err := all.directly.ExecContext(t.Context(), "CREATE TABLE a (n INT)")
	require.NoError(t, err)
	return all
}

func open(t *testing.T, name string, d backends.Database) *sql.DB {
	t.Helper()
	db, err := sql.Open(name, d.DSN())
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, db.Close()) })
	return db
}

// count asks the server itself.
func (c *client) count(t *testing.T, query string) (n int) {
	t.Helper()
	require.NoError(t, c.directly.QueryRowContext(t.Context(), query).Scan(&n))
	return n
}

func (c *client) rows(t *testing.T) int { t.Helper(); return c.count(t, "SELECT COUNT(*) FROM a") }

// empty leaves no row and no connection of an earlier subtest.
func (c *client) empty(t *testing.T) {
	t.Helper()
	c.through.SetMaxIdleConns(0)
	_, err := c.directly.ExecContext(t.Context(), "DELETE FROM a")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return c.Connections() == 0 }, 10*time.Second, time.Millisecond)
}

// commit inserts a row and commits, and gives the channel with the answer of Commit.
func (c *client) commit(t *testing.T) <-chan error {
	t.Helper()
	tx, err := c.through.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	_, err = tx.ExecContext(t.Context(), "INSERT INTO a VALUES (1)")
	require.NoError(t, err)
	answer := make(chan error, 1)
	go func() { answer <- tx.Commit() }()
	return answer
}

func fired(t *testing.T, f *wire.Fault) {
	t.Helper()
	select {
	case <-f.Fired():
	case <-time.After(20 * time.Second):
		t.Fatal("the rule has not acted")
	}
}

// What a client of a lost COMMIT sees is the same; what the server did depends on where it was lost.
func TestCommitIsCut(t *testing.T) {
	forEachClient(t, wire.Options{}, func(t *testing.T, kind clientCase, all *client) {
		for name, c := range map[string]struct {
			match func(wire.Message) bool
			when  wire.When
			rows  int
			fails bool
		}{
			"before it arrives": {wire.Commit, wire.Before, 0, true},
			"when it was sent":  {wire.Commit, wire.After, 1, true},
			"before its answer": {wire.Committed, wire.Before, 1, true},
			// PostgreSQL's clients wait for ReadyForQuery too.
			"when it is answered": {wire.Committed, wire.After, 1, kind.protocol == wire.Postgres},
		} {
			for how, action := range map[string]wire.Action{"reset": wire.Reset, "finish": wire.Finish} {
				t.Run(name+"/"+how, func(t *testing.T) {
					all.empty(t)
					rule := all.On(wire.Rule{Match: c.match, When: c.when, Do: action})
					err := <-all.commit(t)
					fired(t, rule)
					require.Equal(t, c.fails, err != nil, "%v", err)
					if name == "when it was sent" { // the server is still at it
						require.Eventually(t, func() bool { return all.rows(t) == c.rows }, 10*time.Second, time.Millisecond)
					}
					require.Equal(t, c.rows, all.rows(t))

					require.NoError(t, <-all.commit(t))
					require.Equal(t, c.rows+1, all.rows(t))
					require.Equal(t, 1, rule.Count(), "the rule acts once")
				})
			}
		}
	})
}

// Silence: nobody hears of anything, the server keeps its session, even when the client has gone.
func TestCommitIsSwallowed(t *testing.T) {
	forEachClient(t, wire.Options{}, func(t *testing.T, kind clientCase, all *client) {
		for name, c := range map[string]struct {
			match      func(wire.Message) bool
			rows, open int
		}{
			"before it arrives": {wire.Commit, 0, 1},
			"before its answer": {wire.Committed, 1, 0},
		} {
			t.Run(name, func(t *testing.T) {
				all.empty(t)
				rule := all.On(wire.Rule{Match: c.match, When: wire.Before, Do: wire.Swallow})
				answer := all.commit(t)
				fired(t, rule)
				require.Equal(t, c.rows, all.rows(t))
				require.Eventually(t, func() bool { return all.count(t, kind.open) == c.open }, 10*time.Second, poll)
				require.Empty(t, answer)
				require.Equal(t, 1, all.Connections())

				require.Equal(t, 1, all.Cut())
				require.Error(t, <-answer)
				require.Eventually(t, func() bool { return all.count(t, kind.open) == 0 }, 10*time.Second, poll)
				require.Equal(t, c.rows, all.rows(t))
			})
		}
	})
}

// A client that gives up a connection which was swallowed leaves the server's session behind.
func TestASwallowedSessionOutlivesItsClient(t *testing.T) {
	forEachClient(t, wire.Options{}, func(t *testing.T, kind clientCase, all *client) {
		if kind.name == "postgres" {
			t.Skip("lib/pq (v1.12.3) never gives up: after its request to cancel it waits for the server's answer for ever")
		}
		answer := func(m wire.Message) bool {
			return m.From == wire.Server && strings.HasPrefix(m.Answers, "INSERT") && (m.Kind == "CommandComplete" || m.Kind == "OK")
		}
		for name, rule := range map[string]wire.Rule{
			"statement": {Match: wire.Statement("insert"), When: wire.After, Do: wire.Swallow},
			"answer":    {Match: answer, When: wire.Before, Do: wire.Swallow},
		} {
			t.Run(name, func(t *testing.T) {
				all.empty(t)
				leave(t, all, all.On(rule))
				require.Eventually(t, func() bool { return all.count(t, kind.open) == 1 }, 10*time.Second, poll)
				for range 3 { // not require.Never: that one asks on after the test has ended
					time.Sleep(poll)
					require.Equal(t, 1, all.count(t, kind.open))
				}
				require.Equal(t, 1, all.Cut())
				require.Eventually(t, func() bool { return all.count(t, kind.open) == 0 }, 10*time.Second, poll)
			})
		}
	})
}

// leave begins a transaction, and gives its connection up when the rule has acted.
func leave(t *testing.T, all *client, rule *wire.Fault) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	tx, err := all.through.BeginTx(ctx, nil)
	require.NoError(t, err)
	answer := make(chan error, 1)
	go func() {
		_, err := tx.ExecContext(ctx, "INSERT INTO a VALUES (1)")
		answer <- err
	}()
	fired(t, rule)
	cancel()
	require.Error(t, <-answer)
	_ = tx.Rollback() // database/sql has done so
}
