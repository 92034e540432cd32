package backends_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

func serverCases() map[string]kindCase {
	all := kindCases()
	delete(all, "lib/pq")
	delete(all, "pgbouncer")
	return all
}

// A private server of each kind, made once because that takes seconds.
func TestPrivateServer(t *testing.T) {
	for name, c := range serverCases() {
		t.Run(name, func(t *testing.T) {
			server := servers.TestServer(t, c.kind, backends.ServerOptions{Settings: map[string]string{"max_connections": "77"}})
			t.Run("has its settings", func(t *testing.T) { hasSettings(t, c, server) })
			t.Run("is frozen", func(t *testing.T) { isFrozen(t, c, server) })
			t.Run("is ended", func(t *testing.T) { isEnded(t, c, server) })
			t.Run("is closed", func(t *testing.T) {
				require.NoError(t, server.Freeze())
				require.NoError(t, server.Close())
				require.NoError(t, server.Close())
				require.ErrorContains(t, server.Start(t.Context()), "closed")
				require.ErrorContains(t, server.Thaw(), "closed")
			})
		})
	}
}

func hasSettings(t *testing.T, c kindCase, server *backends.Server) {
	query := map[backends.Kind]string{backends.Postgres: "SHOW max_connections", backends.MySQL: "SELECT @@max_connections"}
	var got string
	require.NoError(t, open(t, c.client, server.Admin()).QueryRowContext(t.Context(), query[c.kind]).Scan(&got))
	require.Equal(t, "77", got)
	require.ErrorContains(t, server.FillDisk(), "no disk of its own")
}

// What was committed survives every end of a server; the port stays.
func isEnded(t *testing.T, c kindCase, server *backends.Server) {
	d := server.TestDatabase(t)
	db := open(t, c.client, d)
	exec := func(query string) error {
		_, err := db.ExecContext(t.Context(), query)
		return err
	}
	require.NoError(t, exec("CREATE TABLE a (n INT)"))
	for step, end := range []func() error{
		server.Kill,
		func() error { return server.Stop(t.Context()) },
	} {
		require.NoError(t, exec("INSERT INTO a VALUES (1)"))
		require.NoError(t, end())
		require.Error(t, exec("INSERT INTO a VALUES (1)"), "step %d: the server is there", step)
		require.NoError(t, server.Start(t.Context()))
		require.Error(t, server.Start(t.Context()), "it runs already")
	}
	require.NoError(t, server.Restart(t.Context()))
	var n int
	require.Eventually(t, func() bool {
		return db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM a").Scan(&n) == nil
	}, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, 2, n)
	require.Equal(t, d.Address, server.Admin().Address)
}

// A frozen server keeps its connections and answers nobody, old connection or new.
func isFrozen(t *testing.T, c kindCase, server *backends.Server) {
	db := open(t, c.client, server.TestDatabase(t))
	conn, err := db.Conn(t.Context())
	require.NoError(t, err)
	defer closed(t, conn)
	answered := make(chan error, 1)
	require.NoError(t, server.Freeze())
	go func() { answered <- conn.PingContext(context.WithoutCancel(t.Context())) }()
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	assert.ErrorIs(t, db.PingContext(short), context.DeadlineExceeded, "a new connection")
	assert.Empty(t, answered, "the old connection")
	require.NoError(t, server.Thaw())
	require.NoError(t, <-answered)
}

// A full disk fails what needs room, and space that is given back is used again.
func TestAFullDisk(t *testing.T) {
	for name, c := range serverCases() {
		t.Run(name, func(t *testing.T) {
			server := servers.TestServer(t, c.kind, backends.ServerOptions{DiskSize: 256 << 20})
			db := open(t, c.client, server.TestDatabase(t))
			insert := func() error {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				_, err := db.ExecContext(ctx, "INSERT INTO a VALUES ('"+strings.Repeat("x", 1<<20)+"')")
				return err
			}
			_, err := db.ExecContext(t.Context(), map[string]string{
				"pgx": "CREATE TABLE a (t TEXT)", "mariadb": "CREATE TABLE a (t LONGTEXT)",
			}[name])
			require.NoError(t, err)
			if name == "pgx" { // else a megabyte of one letter is compressed
				_, err = db.ExecContext(t.Context(), "ALTER TABLE a ALTER t SET STORAGE EXTERNAL")
				require.NoError(t, err)
			}
			require.NoError(t, insert())
			require.NoError(t, server.FillDisk())
			failed := false
			for turn := 0; turn < 200 && !failed; turn++ {
				failed = insert() != nil
			}
			require.True(t, failed, "200 MiB found room on a full disk")
			require.NoError(t, server.FreeDisk())
			require.NoError(t, server.FreeDisk(), "once more does nothing")
			if server.Start(t.Context()) == nil {
				t.Log("the server had ended")
			}
			require.Eventually(t, func() bool { return insert() == nil }, 30*time.Second, 100*time.Millisecond)
		})
	}
}

// A server that cannot start says why.
func TestServerThatDoesNotStart(t *testing.T) {
	for name, c := range serverCases() {
		t.Run(name, func(t *testing.T) {
			shared(t, c.kind)
			_, err := servers.Private(t.Context(), c.kind, backends.ServerOptions{Settings: map[string]string{"no_such": "1"}})
			require.ErrorContains(t, err, "no_such")
		})
	}
}

// PgBouncer can be ended too, and stand before another server.
func TestPrivatePgBouncer(t *testing.T) {
	d := servers.Postgres(t)
	bouncer := servers.TestServer(t, backends.PgBouncer, backends.ServerOptions{Upstream: shared(t, backends.Postgres)})
	db := open(t, "postgres", d.At(bouncer.Admin().Address))
	require.NoError(t, db.PingContext(t.Context()))
	require.NoError(t, bouncer.Kill())
	require.Error(t, db.PingContext(t.Context()))
	require.NoError(t, bouncer.Start(t.Context()))
	require.NoError(t, db.PingContext(t.Context()))
	require.NoError(t, bouncer.Stop(t.Context()))
}
