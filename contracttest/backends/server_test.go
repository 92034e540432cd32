package backends_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

func serverCases() map[string]kindCase {
	all := kindCases()
	delete(all, "lib/pq")
	return all
}

// What was committed survives every end of a server; the port stays.
func TestAServerThatIsEnded(t *testing.T) {
	for name, c := range serverCases() {
		t.Run(name, func(t *testing.T) {
			server := servers.TestServer(t, c.kind, backends.ServerOptions{})
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
		})
	}
}

// A frozen server keeps its connections and answers nobody, old connection or new.
func TestAFrozenServer(t *testing.T) {
	for name, c := range serverCases() {
		t.Run(name, func(t *testing.T) {
			server := servers.TestServer(t, c.kind, backends.ServerOptions{})
			db := open(t, c.client, server.TestDatabase(t))
			conn, err := db.Conn(t.Context())
			require.NoError(t, err)
			defer conn.Close()
			answered := make(chan error, 1)
			require.NoError(t, server.Freeze())
			go func() { answered <- conn.PingContext(context.WithoutCancel(t.Context())) }()
			short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			assert.ErrorIs(t, db.PingContext(short), context.DeadlineExceeded, "a new connection")
			assert.Empty(t, answered, "the old connection")
			require.NoError(t, server.Thaw())
			require.NoError(t, <-answered)
		})
	}
}
