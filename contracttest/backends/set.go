package backends

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
)

// Options says where servers are looked for. The zero value is right for tests.
type Options struct {
	// Getenv gives environment variables; nil: os.Getenv.
	Getenv func(string) string
	// Path is the list of folders where programs are looked for; "": that of PATH, and the folders where distributions keep
	// servers.
	Path string
	// NoLocal leaves servers at the usual local ports alone. So does PENSTOCK_LOCAL=no.
	NoLocal bool
	// Dir is where private servers keep their folders; "": the folder for temporary files. Another user has to be able to
	// enter it if we are root.
	Dir string
}

// Set is the servers of a process. Its methods can be called from any goroutine.
type Set struct {
	opt  Options
	must []Kind

	mu     sync.Mutex
	shared map[Kind]*shared
	own    []*Server
	closed bool
}

// shared is the server that the tests of the process share, once it is found or is known not to be there.
type shared struct {
	once   sync.Once
	at     Database
	source string
	err    error
}

// Open checks the options and the environment. It starts nothing.
func Open(opt Options) (*Set, error) {
	if opt.Getenv == nil {
		opt.Getenv = os.Getenv
	}
	must, err := required(opt.Getenv(requireVariable))
	if err != nil {
		return nil, err
	}
	if opt.Getenv(localVariable) == "no" {
		opt.NoLocal = true
	}
	return &Set{opt: opt, must: must, shared: map[Kind]*shared{}}, nil
}

// Server gives the address of the server of a kind that the tests of the process share, and how it was found. The first
// call finds or starts it, which may take as long as a minute on a loaded machine; others wait for it. Its databases are
// not ours: make new ones with Database. The error is a *Missing where there is no server; it stays the same.
func (s *Set) Server(ctx context.Context, k Kind) (at Database, source string, err error) {
	s.mu.Lock()
	one := s.shared[k]
	if one == nil {
		one = &shared{}
		s.shared[k] = one
	}
	s.mu.Unlock()
	one.once.Do(func() { one.at, one.source, one.err = s.find(context.WithoutCancel(ctx), k) })
	return one.at, one.source, one.err
}

// Database makes an empty database with a random name on the shared server of a kind. Drop removes it.
func (s *Set) Database(ctx context.Context, k Kind) (Database, error) {
	at, _, err := s.Server(ctx, k)
	if err != nil {
		return Database{}, err
	}
	return newDatabase(ctx, at)
}

// Drop ends the sessions of a database that Database made, and removes it.
func (s *Set) Drop(ctx context.Context, d Database) error {
	at, _, err := s.Server(ctx, d.Kind)
	if err != nil {
		return err
	}
	return dropDatabase(ctx, at, d)
}

// Private starts a server for the caller alone, who closes it; Set.Close does so too. There is none of MySQL8.
// The error is a *Missing where it cannot be started here, and a *MountRefused where it cannot have a disk of its own.
func (s *Set) Private(ctx context.Context, k Kind, opt ServerOptions) (*Server, error) {
	if k == MySQL8 {
		return nil, fmt.Errorf("there are no private servers of %s", k)
	}
	server, _, tried, err := s.private(ctx, k, opt)
	if err == nil && server == nil {
		err = &Missing{Kind: k, Tried: tried}
	}
	return server, err
}

// Close ends all servers that were started, and removes what is left of them. A second call does nothing.
func (s *Set) Close() error {
	s.mu.Lock()
	own := s.own
	s.own, s.closed = nil, true
	s.mu.Unlock()
	var err error
	for _, server := range slices.Backward(own) { // PgBouncer before its server
		err = errors.Join(err, server.Close())
	}
	return err
}

// isClosed tells whether nothing may be started any more.
func (s *Set) isClosed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errors.New("the set of servers is closed")
	}
	return nil
}

// keep notes a server for Close, which may have come meanwhile.
func (s *Set) keep(server *Server) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errors.Join(errors.New("the set of servers is closed"), server.Close())
	}
	s.own = append(s.own, server)
	return nil
}

func (s *Set) mustHave(k Kind) bool { return slices.Contains(s.must, k) }
