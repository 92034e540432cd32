package backends

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
)

// Runner is what [testing.M] and goleak's TestingM have in common.
type Runner interface{ Run() int }

// Around is m with the set closed after its tests, so that TestMain is one line, with or without goleak:
//
//	goleak.VerifyTestMain(servers.Around(m))
//	os.Exit(servers.Around(m).Run())
//
// What cannot be closed makes the run fail.
func (s *Set) Around(m Runner) Runner { return around{m: m, s: s} }

type around struct {
	m Runner
	s *Set
}

func (a around) Run() int {
	code := a.m.Run()
	if err := a.s.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

// Postgres gives the test an empty database on PostgreSQL, dropped when the test ends. Where there is no server the test is
// skipped, or fails if PENSTOCK_REQUIRE names it.
func (s *Set) Postgres(t testing.TB) Database { t.Helper(); return s.TestDatabase(t, Postgres) }

// MySQL is Postgres for MariaDB, or whatever server of the MySQL family the variable names.
func (s *Set) MySQL(t testing.TB) Database { t.Helper(); return s.TestDatabase(t, MySQL) }

// MySQL8 is Postgres for MySQL 8, which has to be named by its variable.
func (s *Set) MySQL8(t testing.TB) Database { t.Helper(); return s.TestDatabase(t, MySQL8) }

// PgBouncer is Postgres through PgBouncer in transaction mode.
func (s *Set) PgBouncer(t testing.TB) Database { t.Helper(); return s.TestDatabase(t, PgBouncer) }

// TestDatabase is Postgres for any kind.
func (s *Set) TestDatabase(t testing.TB, k Kind) Database {
	t.Helper()
	d, err := s.Database(t.Context(), k)
	s.check(t, k, err)
	t.Cleanup(func() {
		if err := s.Drop(context.WithoutCancel(t.Context()), d); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestServer gives the test a private server, closed when the test ends. Where none can be started the test is skipped, or
// fails if PENSTOCK_REQUIRE names it; without the right to mount a disk that the options ask for it is always skipped.
func (s *Set) TestServer(t testing.TB, k Kind, opt ServerOptions) *Server {
	t.Helper()
	server, err := s.Private(t.Context(), k, opt)
	s.check(t, k, err)
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	return server
}

// TestDatabase makes an empty database on the server; it lives as long as the server.
func (s *Server) TestDatabase(t testing.TB) Database {
	t.Helper()
	d, err := s.Database(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// check ends the test where there is an error.
func (s *Set) check(t testing.TB, k Kind, err error) {
	t.Helper()
	missing, refused := new(Missing), new(MountRefused)
	switch {
	case err == nil:
	case errors.As(err, &refused), errors.As(err, &missing) && !s.mustHave(k):
		t.Skip(err)
	default:
		t.Fatal(err)
	}
}
