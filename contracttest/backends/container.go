package backends

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// engineTimeout is how long docker or podman may take for one command; the first one brings the image.
const engineTimeout = 5 * time.Minute

// container is the runner of a server in a container.
type container struct {
	engine, name string
	run          []string // the arguments that make it
	password     string   // as NAME=value, for its environment
	made         bool
	dog          *watchdog
}

// container starts a server in a container. Where no engine answers, the server is nil, and tried says so.
func (s *Set) container(ctx context.Context, k Kind, opt ServerOptions) (server *Server, tried []string, err error) {
	if k != Postgres && k != MySQL {
		return nil, nil, nil
	}
	engine := s.engine(ctx)
	if engine == "" {
		return nil, []string{"neither docker nor podman answers"}, nil
	}
	if opt.DiskSize > 0 {
		return nil, nil, &MountRefused{Reason: "the server is in a container, where it is not offered"}
	}
	port, err := freePort()
	if err != nil {
		return nil, nil, err
	}
	at := login(k, port)
	c := &container{engine: engine, name: "penstock-" + string(k) + "-" + strings.ToLower(rand.Text()[:12])}
	c.run, c.password = imageArguments(k, c.name, port, at.Password)
	at.User = map[Kind]string{Postgres: "postgres", MySQL: "root"}[k] // the images' own
	for _, name := range sortedKeys(opt.Settings) {
		c.run = append(c.run, setting(k, name, opt.Settings[name])...)
	}
	if c.dog, err = startWatchdog(watchContainer, engine, c.name); err != nil {
		return nil, nil, err
	}
	server = &Server{kind: k, at: at, opt: opt, run: c}
	if err := server.start(ctx); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("starting %s in a container: %w", k, err), server.Close())
	}
	return server, nil, nil
}

// engine finds a container engine that answers.
func (s *Set) engine(ctx context.Context) string {
	for _, name := range []string{"docker", "podman"} {
		path := s.look(name)
		if path == "" {
			continue
		}
		short, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := exec.CommandContext(short, path, "ps", "-q").Run()
		cancel()
		if err == nil {
			return path
		}
	}
	return ""
}

// imageArguments are the arguments that run the image of a kind, and the variable its password is in, which the command
// line does not show.
func imageArguments(k Kind, name string, port int, password string) (arguments []string, variable string) {
	image, inside, variable := "docker.io/library/postgres:17", 5432, "POSTGRES_PASSWORD"
	if k == MySQL {
		image, inside, variable = "docker.io/library/mariadb:11", 3306, "MARIADB_ROOT_PASSWORD"
	}
	return []string{
		"run", "-d", "--name", name, "-p", fmt.Sprintf("127.0.0.1:%d:%d", port, inside), "-e", variable, image,
	}, variable + "=" + password
}

func (c *container) do(ctx context.Context, arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.engine, arguments...)
	cmd.Env = append(os.Environ(), c.password)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", c.engine, arguments[0], err, strings.TrimSpace(string(out)))
	}
	return strings.TrimSpace(string(out)), nil
}

func (c *container) start(ctx context.Context) error {
	if c.made {
		_, err := c.do(ctx, "start", c.name)
		return err
	}
	_, err := c.do(ctx, c.run...)
	c.made = err == nil
	return err
}

func (c *container) alive() error {
	running, err := c.do(context.Background(), "inspect", "-f", "{{.State.Running}}", c.name)
	if err != nil || running == "true" {
		return err
	}
	log, err := c.do(context.Background(), "logs", "--tail", "20", c.name)
	return errors.Join(fmt.Errorf("it has ended; its log: %s", log), err)
}

func (c *container) stop(ctx context.Context) error {
	_, err := c.do(ctx, "stop", "-t", "30", c.name)
	return err
}

func (c *container) kill() error   { return c.now("kill") }
func (c *container) freeze() error { return c.now("pause") }
func (c *container) thaw() error   { return c.now("unpause") }

func (c *container) now(what string) error {
	_, err := c.do(context.Background(), what, c.name)
	return err
}

// close has the watchdog remove the container.
func (c *container) close() error { return c.dog.finish() }
