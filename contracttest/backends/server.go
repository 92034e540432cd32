package backends

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// ServerOptions says what a private server is to be like. The zero value is a usual one.
type ServerOptions struct {
	// DiskSize, in bytes, puts the data on a file system of that size in memory, so that FillDisk can be used. It needs the
	// right to mount; 256 MiB is enough for either database. 0: the data is in the folder for temporary files.
	DiskSize int64
	// Settings are added to the command line of PostgreSQL or MariaDB, such as "max_connections": "20".
	Settings map[string]string
	// Upstream is the PostgreSQL that a PgBouncer stands before; the zero value is the one that the tests share.
	Upstream Database
}

// Server is a private server, of which a test may do what it likes. Its methods can be called from any goroutine; they do
// not overlap. Its port stays the same through all of them.
type Server struct {
	kind Kind
	at   Database
	opt  ServerOptions
	dir  string

	mu     sync.Mutex
	run    runner
	closed bool
}

// runner is how a private server lives: as a child process, or in a container.
type runner interface {
	// start returns when the server was started, not when it is ready.
	start(ctx context.Context) error
	// alive is nil while the server runs; else it says what the server said last.
	alive() error
	stop(ctx context.Context) error
	kill() error
	freeze() error
	thaw() error
	// close ends the server and removes all that is left of it.
	close() error
}

// readyTimeout is how long a server may take until it answers; a machine under load is slow.
const readyTimeout = 90 * time.Second

// Admin is the server's own database, which is always there, with the user who may do everything.
func (s *Server) Admin() Database {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at
}

// Database makes an empty database with a random name. It lives as long as the server.
func (s *Server) Database(ctx context.Context) (Database, error) { return newDatabase(ctx, s.Admin()) }

// Start starts a server that was stopped or killed, and returns when it answers.
func (s *Server) Start(ctx context.Context) error {
	return s.do(func() error {
		if s.run.alive() == nil {
			return errors.New("it runs already")
		}
		return s.start(ctx)
	})
}

// Stop ends the server in order, and returns when it has ended: its sessions are ended at once, what they have committed
// is on disk.
func (s *Server) Stop(ctx context.Context) error {
	return s.do(func() error { return s.run.stop(ctx) })
}

// Restart is Stop and Start.
func (s *Server) Restart(ctx context.Context) error {
	return s.do(func() error {
		if err := s.run.stop(ctx); err != nil {
			return err
		}
		return s.start(ctx)
	})
}

// Kill ends the server and all of its processes with SIGKILL, and returns when they are gone. Start starts it again, on the
// data as it is.
func (s *Server) Kill() error { return s.do(s.run.kill) }

// Freeze stops the server and all of its processes where they stand (SIGSTOP): connections stay open, nothing answers.
func (s *Server) Freeze() error { return s.do(s.run.freeze) }

// Thaw lets a frozen server go on.
func (s *Server) Thaw() error { return s.do(s.run.thaw) }

// FillDisk takes all space that is left on the server's disk, which needs ServerOptions.DiskSize, until FreeDisk.
func (s *Server) FillDisk() error {
	return s.do(func() error {
		if s.opt.DiskSize == 0 {
			return errors.New("it has no disk of its own: ServerOptions.DiskSize is 0")
		}
		return fill(s.ballast(), s.opt.DiskSize)
	})
}

// FreeDisk gives back what FillDisk took.
func (s *Server) FreeDisk() error {
	return s.do(func() error {
		if err := os.Remove(s.ballast()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	})
}

// Close ends the server and removes its data. A second call does nothing.
func (s *Server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if err := s.run.close(); err != nil {
		return fmt.Errorf("closing %s at %s: %w", s.kind, s.at.Address, err)
	}
	return nil
}

func (s *Server) do(action func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%s at %s is closed", s.kind, s.at.Address)
	}
	if err := action(); err != nil {
		return fmt.Errorf("%s at %s: %w", s.kind, s.at.Address, err)
	}
	return nil
}

// start starts the server and waits until it answers.
func (s *Server) start(ctx context.Context) error {
	if err := s.run.start(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		version, err := s.kind.admin().ping(ctx, s.at)
		if err == nil {
			s.at.Version = version
			return nil
		}
		if dead := s.run.alive(); dead != nil {
			return dead
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("it does not answer: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// ballast is the file that fills the disk.
func (s *Server) ballast() string { return filepath.Join(s.dir, "data", "ballast") }

// fill writes a file until the disk is full; most is the size of the disk.
func fill(path string, most int64) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	block := make([]byte, 1<<20)
	for written := int64(0); len(block) > 0; {
		n, err := f.Write(block)
		if written += int64(n); err != nil {
			block = block[:len(block)/2] // what is left is smaller
		}
		if written > most {
			return errors.New("the disk does not become full: it is not of its own")
		}
	}
	return nil
}

// freePort finds a TCP port of this machine that nobody uses now.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("looking for a free port: %w", err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}

// isFree tells whether a port can be listened at.
func isFree(port int) bool {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	return err == nil && l.Close() == nil
}

// login is the user of a private server, with a password made for it: others on this machine can reach its port as well.
func login(k Kind, port int) Database {
	name := ""
	if k.protocol() == Postgres {
		name = "postgres"
	}
	return Database{
		Kind: k, Address: fmt.Sprintf("127.0.0.1:%d", port), User: "penstock", Password: rand.Text(), Name: name,
	}
}
