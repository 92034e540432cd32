package backends

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
)

// find looks for the server that tests share.
func (s *Set) find(ctx context.Context, k Kind) (at Database, source string, err error) {
	if raw := s.opt.Getenv(k.Variable()); raw != "" {
		at, err := named(ctx, k, raw)
		return at, k.Variable(), err
	}
	tried := []string{k.Variable() + " is not set"}
	switch {
	case k == MySQL8:
		return Database{}, "", &Missing{Kind: k, Tried: tried}
	case k == PgBouncer: // one at the usual port has its own ideas of databases and modes
	case s.opt.NoLocal:
		tried = append(tried, "servers at local ports are left alone")
	default:
		if at, ok := local(ctx, k, localAddress(k)); ok {
			return at, "the local server at " + at.Address, nil
		}
		tried = append(tried, "no server lets us in at "+localAddress(k))
	}
	server, source, more, err := s.private(ctx, k, ServerOptions{})
	if err != nil {
		return Database{}, "", err
	}
	if server == nil {
		return Database{}, "", &Missing{Kind: k, Tried: append(tried, more...)}
	}
	return server.Admin(), source, nil
}

// named is the server of the variable.
func named(ctx context.Context, k Kind, raw string) (Database, error) {
	at, err := parseURL(k, raw)
	if err != nil {
		return Database{}, err
	}
	if at.Version, err = k.admin().ping(ctx, at); err != nil {
		return Database{}, fmt.Errorf("the server that %s names does not let us in: %w", k.Variable(), err)
	}
	return at, nil
}

func localAddress(k Kind) string {
	if k == Postgres {
		return "127.0.0.1:5432"
	}
	return "127.0.0.1:3306"
}

// local tries the usual port, with the users that a fresh installation lets in without a password. It counts only where we
// may make a database, which is tried.
func local(ctx context.Context, k Kind, address string) (Database, bool) {
	users := []string{"root"}
	at := Database{Kind: k, Address: address}
	if k == Postgres {
		users, at.Name = []string{"postgres"}, "postgres"
	}
	if me, err := user.Current(); err == nil && !slices.Contains(users, me.Username) {
		users = append(users, me.Username)
	}
	for _, at.User = range users {
		version, err := k.admin().ping(ctx, at)
		if err != nil {
			continue
		}
		at.Version = version
		if d, err := newDatabase(ctx, at); err == nil && dropDatabase(ctx, at, d) == nil {
			return at, true
		}
	}
	return Database{}, false
}

// private starts a server of our own. Where there is nothing to start it from, the server is nil, and tried says why.
func (s *Set) private(ctx context.Context, k Kind, opt ServerOptions) (server *Server, source string, tried []string, err error) {
	source = "a private server from installed programs"
	if why := cannotStart(); why != "" {
		return nil, "", []string{why}, nil
	}
	if err := s.isClosed(); err != nil {
		return nil, "", nil, err
	}
	program, tried, err := s.program(ctx, k, opt)
	if err != nil {
		return nil, "", nil, err
	}
	if program != nil {
		server, err = startChild(ctx, k, *program, s.opt.Dir, opt)
	} else {
		source = "a container"
		var more []string
		server, more, err = s.container(ctx, k, opt)
		tried = append(tried, more...)
	}
	if err == nil && server != nil {
		err = s.keep(server)
	}
	return server, source, tried, err
}

// program finds the installed programs of a kind.
func (s *Set) program(ctx context.Context, k Kind, opt ServerOptions) (*program, []string, error) {
	var found program
	switch k {
	case Postgres:
		initdb, postgres := s.look("initdb"), s.look("postgres")
		if initdb == "" || postgres == "" {
			return nil, []string{"initdb and postgres are not installed"}, nil
		}
		found = postgresProgram(initdb, postgres)
	case MySQL:
		install, server := s.look("mariadb-install-db"), s.look("mariadbd")
		if install == "" || server == "" {
			return nil, []string{"mariadb-install-db and mariadbd are not installed"}, nil
		}
		found = mariadbProgram(install, server)
	case PgBouncer:
		pgbouncer := s.look("pgbouncer")
		if pgbouncer == "" {
			return nil, []string{"pgbouncer is not installed"}, nil
		}
		if opt.Upstream.Address == "" {
			var err error
			if opt.Upstream, _, err = s.Server(ctx, Postgres); err != nil {
				return nil, nil, err
			}
		}
		found = pgbouncerProgram(pgbouncer, opt.Upstream)
	case MySQL8:
		return nil, nil, nil
	}
	return &found, nil, nil
}

// look finds a program; "": it is not there.
func (s *Set) look(name string) string {
	folders := filepath.SplitList(s.opt.Path)
	if s.opt.Path == "" {
		folders = filepath.SplitList(os.Getenv("PATH"))
		for _, pattern := range []string{
			"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/local/pgsql/bin", "/opt/homebrew/opt/*/bin", "/usr/sbin",
			"/usr/local/sbin", "/usr/libexec",
		} {
			more, _ := filepath.Glob(pattern) // its only error is that of a bad pattern
			folders = append(folders, more...)
		}
	}
	for _, folder := range folders {
		if path, err := exec.LookPath(filepath.Join(folder, name)); err == nil && filepath.IsAbs(path) {
			return path
		}
	}
	return ""
}
