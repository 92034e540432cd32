package backends_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

// engineVariable tells the test binary that it is a container engine; it holds the folder where that keeps its things. Its
// "containers" are processes that forward a port to a server which the test has started.
const engineVariable = "PENSTOCK_FAKE_ENGINE"

// fakeEngine does what docker does with these arguments.
func fakeEngine(dir string, args []string) error {
	if err := note(dir, args); err != nil {
		return err
	}
	pid := 0
	if text, err := os.ReadFile(filepath.Join(dir, "pid")); err == nil {
		pid, _ = strconv.Atoi(string(text))
	}
	signal := func(s syscall.Signal) error { return syscall.Kill(pid, s) }
	switch args[0] {
	case "ps":
		return nil
	case "run":
		if err := userOfTheImage(dir); err != nil {
			return err
		}
		port := strings.Split(args[slices.Index(args, "-p")+1], ":")[1]
		if err := os.WriteFile(filepath.Join(dir, "port"), []byte(port), 0o600); err != nil {
			return err
		}
		return startContainer(dir)
	case "start":
		return startContainer(dir)
	case "stop", "kill", "rm":
		_ = signal(syscall.SIGKILL) // it may have ended
		return os.Remove(filepath.Join(dir, "pid"))
	case "pause":
		return signal(syscall.SIGSTOP)
	case "unpause":
		return signal(syscall.SIGCONT)
	case "inspect":
		fmt.Println(pid != 0 && signal(0) == nil)
		return nil
	case "logs":
		fmt.Println("it was tired")
		return nil
	case "forward":
		return forward(dir)
	}
	return errors.New("no such command")
}

// note keeps the command for the test to see.
func note(dir string, args []string) error {
	f, err := os.OpenFile(filepath.Join(dir, "commands"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, strings.Join(args, " "))
	return errors.Join(err, f.Close())
}

// userOfTheImage makes the user that the image would have.
func userOfTheImage(dir string) error {
	url, err := os.ReadFile(filepath.Join(dir, "url"))
	if len(url) == 0 {
		return err
	}
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, string(url))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, "CREATE ROLE postgres SUPERUSER LOGIN PASSWORD '"+os.Getenv("POSTGRES_PASSWORD")+"'")
	return errors.Join(err, conn.Close(ctx))
}

func startContainer(dir string) error {
	cmd := exec.Command(os.Args[0], "forward")
	cmd.Env = append(os.Environ(), engineVariable+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "pid"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
}

// forward is the container's process.
func forward(dir string) error {
	port, err1 := os.ReadFile(filepath.Join(dir, "port"))
	upstream, err2 := os.ReadFile(filepath.Join(dir, "upstream"))
	l, err3 := net.Listen("tcp", "127.0.0.1:"+string(port))
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	for {
		client, err := l.Accept()
		if err != nil {
			return err
		}
		server, err := net.Dial("tcp", string(upstream))
		if err != nil {
			return err
		}
		go func() { _, _ = io.Copy(server, client); _ = server.Close() }()
		go func() { _, _ = io.Copy(client, server); _ = client.Close() }()
	}
}

// installEngine puts a docker into a folder, whose containers are the server.
func installEngine(t *testing.T, at backends.Database) (path, dir string) {
	t.Helper()
	path, dir = t.TempDir(), t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\n%s='%s' exec '%s' \"$@\"\n", engineVariable, dir, os.Args[0])
	require.NoError(t, os.WriteFile(filepath.Join(path, "docker"), []byte(script), 0o755))
	url, upstream := at.URL(), at.Address
	if upstream == "" {
		url, upstream = "", "127.0.0.1:1" // it ends at the first ping
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "url"), []byte(url), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "upstream"), []byte(upstream), 0o600))
	return path, dir
}

// Without an engine the commands are all that can be tested: what is said to docker, and that a server in a container can
// be ended, frozen, started, and is removed.
func TestContainer(t *testing.T) {
	path, dir := installEngine(t, servers.TestServer(t, backends.Postgres, backends.ServerOptions{}).Admin())
	set := openSet(t, backends.Options{Path: path, NoLocal: true}, nil)
	server := set.TestServer(t, backends.Postgres, backends.ServerOptions{Settings: map[string]string{"max_connections": "20"}})
	d, err := server.Database(t.Context())
	require.NoError(t, err)
	db := open(t, "pgx", d)
	db.SetMaxIdleConns(0)
	require.NoError(t, db.PingContext(t.Context()))

	require.NoError(t, server.Freeze())
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, db.PingContext(short), context.DeadlineExceeded)
	require.NoError(t, server.Thaw())
	for _, end := range []func() error{server.Kill, func() error { return server.Stop(t.Context()) }} {
		require.NoError(t, end())
		require.Error(t, db.PingContext(t.Context()))
		require.NoError(t, server.Start(t.Context()))
		require.NoError(t, db.PingContext(t.Context()))
	}
	require.NoError(t, server.Close())
	require.Error(t, db.PingContext(t.Context()))

	commands, err := os.ReadFile(filepath.Join(dir, "commands"))
	require.NoError(t, err)
	assert.Contains(t, string(commands), "-e POSTGRES_PASSWORD docker.io/library/postgres:17 -c max_connections=20\n")
	assert.NotContains(t, string(commands), server.Admin().Password)
	assert.Contains(t, string(commands), "\nrm -f -v penstock-postgres-")

	disk := watch(t, func(t testing.TB) {
		set.TestServer(t, backends.Postgres, backends.ServerOptions{DiskSize: 1 << 20})
	})
	assert.True(t, disk.skipped, "%v", disk.said)
}

// A container that does not start is removed, and its log is shown.
func TestContainerThatDoesNotStart(t *testing.T) {
	path, dir := installEngine(t, backends.Database{})
	set := openSet(t, backends.Options{Path: path, NoLocal: true}, nil)
	_, _, err := set.Server(t.Context(), backends.Postgres)
	require.ErrorContains(t, err, "it was tired")
	commands, err := os.ReadFile(filepath.Join(dir, "commands"))
	require.NoError(t, err)
	assert.Contains(t, string(commands), "\nrm -f -v penstock-postgres-")
}
