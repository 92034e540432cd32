package backends

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// child is the runner of a server that is a child process.
type child struct {
	dir     string
	argv    []string
	program program
	process process
	dog     *watchdog
	mounted bool
}

// program is what differs between servers that are started here.
type program struct {
	// as, where set, is the user of the server in the place of one with a new password.
	as Database
	// stop ends the server in order, quit at once and together with its children.
	stop, quit syscall.Signal
	// make writes the data folder, once.
	make func(ctx context.Context, c *child, at Database) error
	// command is the server in the foreground.
	command func(c *child, at Database) []string
}

// login gives the server's user.
func (p program) login(at Database) Database {
	if p.as.Address == "" {
		return at
	}
	p.as.Kind, p.as.Address, p.as.params = at.Kind, at.Address, nil
	return p.as
}

// stopPatience is how long a server may take to end in order.
const stopPatience = 30 * time.Second

// startChild makes a server of installed programs and starts it.
func startChild(ctx context.Context, k Kind, p program, base string, opt ServerOptions) (*Server, error) {
	const attempts = 3 // somebody may take the port between our looking and the server's
	var failed error
	for range attempts {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		s, err := makeChild(ctx, k, p, base, opt, p.login(login(k, port)))
		if err == nil {
			if err = s.start(ctx); err == nil {
				return s, nil
			}
			err = errors.Join(err, s.Close())
		}
		failed = fmt.Errorf("starting a private %s: %w", k, err)
		if isFree(port) {
			break // then that was not why
		}
	}
	return nil, failed
}

// makeChild makes the folder and its watchdog, and the data in it.
func makeChild(ctx context.Context, k Kind, p program, base string, opt ServerOptions, at Database) (*Server, error) {
	dir, err := os.MkdirTemp(base, "penstock-"+string(k)+"-")
	if err != nil {
		return nil, fmt.Errorf("making its folder: %w", err)
	}
	disk := "plain"
	if opt.DiskSize > 0 {
		disk = "mounted"
	}
	c := &child{dir: dir, program: p}
	c.dog, err = startWatchdog(watchProcess, dir, signalName(p.quit), disk)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	s := &Server{kind: k, at: at, opt: opt, dir: dir, run: c}
	if err := c.furnish(ctx, at, opt); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// furnish fills the folder.
func (c *child) furnish(ctx context.Context, at Database, opt ServerOptions) error {
	data := filepath.Join(c.dir, "data")
	if err := errors.Join(give(c.dir), os.Mkdir(data, 0o700)); err != nil {
		return fmt.Errorf("making its folder: %w", err)
	}
	if opt.DiskSize > 0 {
		if err := mountMemory(ctx, data, opt.DiskSize); err != nil {
			return err
		}
		c.mounted = true
	}
	if err := give(data); err != nil {
		return fmt.Errorf("making its folder: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := c.program.make(ctx, c, at); err != nil {
		return err
	}
	c.argv = c.program.command(c, at)
	for _, name := range sortedKeys(opt.Settings) {
		c.argv = append(c.argv, setting(at.Kind, name, opt.Settings[name])...)
	}
	return nil
}

func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

// setting is one setting on the command line.
func setting(k Kind, name, value string) []string {
	if k == Postgres {
		return []string{"-c", name + "=" + value}
	}
	return []string{"--" + name + "=" + value}
}

// write puts a file into the server's folder that only the server can read.
func (c *child) write(name, text string) (string, error) {
	path := filepath.Join(c.dir, name)
	if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), give(path)); err != nil {
		return "", fmt.Errorf("writing %s: %w", name, err)
	}
	return path, nil
}

func (c *child) start(context.Context) error {
	if err := c.process.start(c.dir, c.argv); err != nil {
		return err
	}
	return c.dog.watch(c.process.pid)
}

func (c *child) alive() error {
	if !c.process.ended() {
		return nil
	}
	return fmt.Errorf("it has ended; its log: %s", tail(filepath.Join(c.dir, "log")))
}

func (c *child) stop(ctx context.Context) error {
	patience := stopPatience
	if end, ok := ctx.Deadline(); ok {
		patience = min(patience, time.Until(end))
	}
	return errors.Join(c.process.stop(c.program.stop, patience), c.dog.watch(0))
}

func (c *child) kill() error   { return errors.Join(c.process.kill(), c.dog.watch(0)) }
func (c *child) freeze() error { return c.process.freeze() }
func (c *child) thaw() error   { return c.process.thaw() }

// close ends the server without ceremony; the watchdog removes the folder.
func (c *child) close() error {
	const patience = 10 * time.Second
	var err error
	if !c.process.ended() {
		err = errors.Join(c.process.thaw(), c.process.stop(c.program.quit, patience))
	}
	return errors.Join(err, c.dog.watch(0), c.dog.finish())
}

func signalName(s syscall.Signal) string {
	if s == syscall.SIGQUIT {
		return "QUIT"
	}
	return "KILL"
}
