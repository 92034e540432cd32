package contracttest_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

// TestTxStoppedPostgres has a server of its own stopped, killed, frozen and filled while messages come.
func TestTxStoppedPostgres(t *testing.T) {
	t.Parallel()
	m := newMortal(t, backends.Postgres, 2*time.Second)
	url := func(t *testing.T) string { return m.TestDatabase(t).URL() }
	large := execute(postgresLarge)
	t.Run("pgx", func(t *testing.T) { endServer(t, m, postgresPgx(url(t)), large) })
	t.Run("lib/pq", func(t *testing.T) { endServer(t, m, postgresLibPq(url(t)), large) })
	t.Run("pgxstore", func(t *testing.T) {
		endServer(t, m, postgresNative(url(t)), func(_ context.Context, tx *pgxstore.Tx) error {
			tx.Queue(postgresLarge)
			return tx.Err()
		})
	})
}

// TestTxStoppedMariaDB is TestTxStoppedPostgres for MariaDB, which stands still for 6 s where its disk is full, and then ends.
func TestTxStoppedMariaDB(t *testing.T) {
	t.Parallel()
	m := newMortal(t, backends.MySQL, 12*time.Second)
	endServer(t, m, onMySQLOf(t, "mariadb, stopped", m.TestDatabase(t)), execute("INSERT INTO large VALUES (REPEAT('x', 8000000))"))
}

// mortal is a server of a test's own.
type mortal struct {
	*backends.Server
	disk   bool          // it can be full
	budget time.Duration // see contracttest.DatabaseFaults
}

// newMortal starts a server whose disk can be full, where we may mount one.
func newMortal(t *testing.T, kind backends.Kind, budget time.Duration) mortal {
	t.Helper()
	server, err := servers.Private(t.Context(), kind, backends.ServerOptions{DiskSize: 256 << 20})
	if err == nil {
		t.Cleanup(func() { must(t, server.Close()) })
		return mortal{Server: server, disk: true, budget: budget}
	}
	if refused := new(backends.MountRefused); errors.As(err, &refused) {
		t.Logf("no disk will be full: %v", err)
	}
	return mortal{Server: servers.TestServer(t, kind, backends.ServerOptions{}), budget: budget} // it may skip or fail the test
}

// outages are real ones. Ending the test's context does not keep the server from coming back.
func (m mortal) outages(ctx context.Context) map[string]outage {
	start := func() error { return m.Start(context.WithoutCancel(ctx)) }
	all := map[string]outage{
		"stopped": serverOutage(func() error { return m.Stop(ctx) }, start),
		"killed":  serverOutage(m.Kill, start),
		"frozen":  serverOutage(m.Freeze, m.Thaw),
	}
	if m.disk {
		all["full"] = serverOutage(m.FillDisk, func() error {
			err := m.FreeDisk()
			_ = start() // it runs, unless it has ended for want of room
			return err
		})
	}
	return all
}

// serverOutage is one that lasts from begin to end. A server that does not come back is seen by the clause.
func serverOutage(begin, end func() error) outage {
	return func(context.Context) (func(), func() int, error) {
		return sync.OnceFunc(func() { _ = end() }), func() int { return 1 }, begin()
	}
}

// endServer checks T26 with real outages. Effects need room, or a full disk would not matter to them.
func endServer[T any](t *testing.T, m mortal, s contracttest.StoreHarness[T], large func(ctx context.Context, tx T) error) {
	t.Helper()
	apply, open := s.Apply, s.Open
	s.Apply = func(ctx context.Context, tx T, counter string, by int64) error {
		return errors.Join(apply(ctx, tx, counter, by), large(ctx, tx))
	}
	s.OpenFaulty = func(ctx context.Context, dir string) (contracttest.Database[T], contracttest.DatabaseFaults, error) {
		db, err := open(ctx, dir)
		return db, contracttest.DatabaseFaults{Outages: m.outages(t.Context()), Budget: m.budget}, err
	}
	h := unbubbled()
	h.Patience += 2 * m.budget
	failing(t, contracttest.ExamineTx(t, h, s, "T26"), "")
}
