package backends_test

import (
	"context"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

// openSet opens a set with an environment of its own.
func openSet(t *testing.T, opt backends.Options, env map[string]string) *backends.Set {
	t.Helper()
	opt.Getenv = func(name string) string { return env[name] }
	set, err := backends.Open(opt)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, set.Close()) })
	return set
}

// witness sees how a test ends.
type witness struct {
	testing.TB
	skipped, failed bool
	said            []any
	cleanups        []func()
}

func (w *witness) Helper()                  {}
func (w *witness) Context() context.Context { return w.TB.Context() }
func (w *witness) Cleanup(f func())         { w.cleanups = append(w.cleanups, f) }
func (w *witness) Error(args ...any)        { w.failed, w.said = true, append(w.said, args...) }
func (w *witness) Skip(args ...any)         { w.skipped, w.said = true, args; runtime.Goexit() }
func (w *witness) Fatal(args ...any)        { w.failed, w.said = true, args; runtime.Goexit() }

// watch runs a test and its cleanups.
func watch(t *testing.T, test func(testing.TB)) *witness {
	t.Helper()
	w := &witness{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		test(w)
	}()
	<-done
	for _, cleanup := range w.cleanups {
		cleanup()
	}
	return w
}

// A server that is missing skips the test, names the command that installs it, and is an error where it is required.
func TestMissing(t *testing.T) {
	empty := backends.Options{Path: "/nonexistent", NoLocal: true}
	for name, c := range map[string]struct {
		kind    backends.Kind
		get     func(*backends.Set, testing.TB)
		install string
	}{
		"postgres": {backends.Postgres, func(s *backends.Set, t testing.TB) { s.Postgres(t) }, "apt-get install postgresql"},
		"mysql":    {backends.MySQL, func(s *backends.Set, t testing.TB) { s.MySQL(t) }, "apt-get install mariadb-server-core"},
		"mysql8":   {backends.MySQL8, func(s *backends.Set, t testing.TB) { s.MySQL8(t) }, "PENSTOCK_MYSQL8_URL"},
		"pgbouncer": {
			backends.PgBouncer, func(s *backends.Set, t testing.TB) { s.PgBouncer(t) }, "apt-get install pgbouncer",
		},
		"private": {backends.MySQL, func(s *backends.Set, t testing.TB) {
			s.TestServer(t, backends.MySQL, backends.ServerOptions{})
		}, "apt-get install mariadb-server-core"},
	} {
		t.Run(name, func(t *testing.T) {
			for list, fails := range map[string]bool{
				"": false, "all": c.kind != backends.MySQL8, "mysql8, " + string(c.kind): true,
			} {
				set := openSet(t, empty, map[string]string{"PENSTOCK_REQUIRE": list})
				w := watch(t, func(t testing.TB) { c.get(set, t) })
				assert.Equal(t, fails, w.failed, "PENSTOCK_REQUIRE=%s", list)
				assert.Equal(t, !fails, w.skipped, "PENSTOCK_REQUIRE=%s", list)
				missing := new(backends.Missing)
				require.Len(t, w.said, 1)
				require.ErrorAs(t, w.said[0].(error), &missing)
				assert.Equal(t, c.kind, missing.Kind)
				assert.ErrorContains(t, missing, c.install)
			}
		})
	}
}

func TestRequireNamesNothing(t *testing.T) {
	_, err := backends.Open(backends.Options{Getenv: func(string) string { return "all,oracle" }})
	require.ErrorContains(t, err, "oracle")
}

// An address in a variable is used, and nothing is started.
func TestAddressInAVariable(t *testing.T) {
	for name, c := range kindCases() {
		t.Run(name, func(t *testing.T) {
			at := shared(t, c.kind)
			set := openSet(t, backends.Options{Path: "/nonexistent"}, map[string]string{c.kind.Variable(): at.URL()})
			found, source, err := set.Server(t.Context(), c.kind)
			require.NoError(t, err)
			require.Equal(t, c.kind.Variable(), source)
			require.Equal(t, at.Address, found.Address)
			d, err := set.Database(t.Context(), c.kind)
			require.NoError(t, err)
			require.NoError(t, open(t, c.client, d).PingContext(t.Context()))
			require.NoError(t, set.Drop(t.Context(), d))
			require.ErrorContains(t, set.Drop(t.Context(), found), "not a test's")
		})
	}
}

// An address that cannot be used is an error, not a missing server, and shows no password.
func TestAddressThatCannotBeUsed(t *testing.T) {
	at, other := shared(t, backends.Postgres), shared(t, backends.MySQL)
	for name, c := range map[string]struct {
		kind      backends.Kind
		url, want string
	}{
		"password":         {backends.Postgres, at.As("penstock", "sesame").URL(), "does not let us in"},
		"password, mysql":  {backends.MySQL, other.As("penstock", "sesame").URL(), "does not let us in"},
		"nobody there":     {backends.Postgres, "postgres://penstock:sesame@127.0.0.1:1/", "does not let us in"},
		"scheme":           {backends.Postgres, "mysql://penstock:sesame@127.0.0.1/", "postgres://"},
		"scheme, mysql":    {backends.MySQL, "postgres://penstock:sesame@127.0.0.1/", "mysql://"},
		"host":             {backends.MySQL8, "mysql://penstock:sesame@/", "host"},
		"no URL":           {backends.PgBouncer, "postgres://penstock:sesame@[", "PENSTOCK_PGBOUNCER_URL"},
		"parameter, mysql": {backends.MySQL, other.As("penstock", "sesame").URL() + "?timeout=sesame", "does not let us in"},
	} {
		t.Run(name, func(t *testing.T) {
			set := openSet(t, backends.Options{}, map[string]string{c.kind.Variable(): c.url})
			w := watch(t, func(t testing.TB) { set.TestDatabase(t, c.kind) })
			require.True(t, w.failed)
			err := w.said[0].(error)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "sesame")
			missing := new(backends.Missing)
			require.NotErrorAs(t, err, &missing)
		})
	}
}

// A set that is closed has ended what it started, and starts nothing more.
func TestAClosedSet(t *testing.T) {
	shared(t, backends.Postgres)
	dir := enterable(t)
	set := openSet(t, backends.Options{NoLocal: true, Dir: dir}, nil)
	at, source, err := set.Server(t.Context(), backends.Postgres)
	require.NoError(t, err)
	require.Contains(t, source, "private")
	require.NoError(t, set.Close())
	require.NoError(t, set.Close())
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	require.Error(t, open(t, "pgx", at).PingContext(t.Context()))
	_, err = set.Private(t.Context(), backends.Postgres, backends.ServerOptions{})
	require.ErrorContains(t, err, "closed")
	left, err = os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

// enterable is a folder for private servers: testing's own are closed to other users.
func enterable(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "penstock-backends-")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	return dir
}
