//go:build unix

package backends

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// stubborn is a server that wants nothing of SIGTERM, with a child in a session of its own, as PostgreSQL has many; it
// writes the child's id and that of the child's child.
const stubborn = `trap '' TERM
setsid sh -c 'trap "" TERM; sleep 600 & echo $$ $! >> ids; wait' &
while :; do sleep 600 & wait $!; done`

// startProcess runs a shell script as a server, and waits for what it writes to the file ids.
func startProcess(t *testing.T, script string, lines int) (*process, []int) {
	t.Helper()
	dir, err := os.MkdirTemp("", "penstock-process-")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, give(dir))
	p := &process{}
	require.NoError(t, p.start(dir, []string{"/bin/sh", "-c", script}))
	t.Cleanup(func() { assert.NoError(t, p.kill()) })
	var ids []int
	require.Eventually(t, func() bool {
		text, _ := os.ReadFile(filepath.Join(dir, "ids"))
		ids = nil
		for _, word := range strings.Fields(string(text)) {
			id, err := strconv.Atoi(word)
			require.NoError(t, err)
			ids = append(ids, id)
		}
		return len(ids) == lines
	}, 20*time.Second, 5*time.Millisecond)
	return p, ids
}

// A server that does not end when it is asked to is ended, with all that descends from it.
func TestAProcessIsEndedWithItsDescendants(t *testing.T) {
	if _, err := exec.LookPath("setsid"); err != nil {
		t.Skip("needs setsid")
	}
	for name, end := range map[string]func(*process) error{
		"kill": (*process).kill,
		"stop": func(p *process) error { return p.stop(syscall.SIGTERM, 50*time.Millisecond) },
		"kill, frozen": func(p *process) error {
			if err := p.freeze(); err != nil {
				return err
			}
			return p.kill()
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, ids := startProcess(t, stubborn, 2)
			pid := p.pid
			require.False(t, p.ended())
			require.Len(t, living(ids), 2)
			require.Subset(t, descendants(pid), ids)
			require.NoError(t, end(p))
			require.True(t, p.ended())
			require.Empty(t, living(append(ids, pid)))
			require.NoError(t, p.kill(), "once more does nothing")
			require.NoError(t, p.stop(syscall.SIGTERM, time.Second))
			require.Error(t, p.freeze())
			require.Error(t, p.thaw())
		})
	}
}

// Frozen, nothing of it runs; thawed, all of it does.
func TestAProcessIsFrozenWithItsDescendants(t *testing.T) {
	if _, err := exec.LookPath("setsid"); err != nil {
		t.Skip("needs setsid")
	}
	p, ids := startProcess(t, stubborn, 2)
	states := func() string {
		found := ""
		for _, id := range append(ids, p.pid) {
			found += string(state(id))
		}
		return found
	}
	require.NoError(t, p.freeze())
	require.Equal(t, "TTT", states())
	require.NoError(t, p.thaw())
	require.Eventually(t, func() bool { return !strings.Contains(states(), "T") }, 10*time.Second, time.Millisecond)
}

// A process that ends by itself is noticed, and so is one that never began.
func TestAProcessThatEnds(t *testing.T) {
	p, _ := startProcess(t, "echo 1 >> ids", 1)
	require.Eventually(t, p.ended, 10*time.Second, time.Millisecond)
	require.NoError(t, p.stop(syscall.SIGTERM, time.Second))
	none := &process{}
	require.True(t, none.ended())
	require.Error(t, none.start(t.TempDir(), []string{"/nonexistent/server"}))
	require.True(t, none.ended())
}

// If we are root, servers are not; they see nothing of our environment.
func TestAProcessHasNoRightsOfOurs(t *testing.T) {
	t.Setenv("PENSTOCK_SECRET", "sesame")
	p, ids := startProcess(t, `id -u >> ids; [ -z "$PENSTOCK_SECRET" ] && echo 1 >> ids`, 2)
	require.Eventually(t, p.ended, 10*time.Second, time.Millisecond)
	if os.Geteuid() == 0 {
		require.NotZero(t, ids[0])
	} else {
		require.Equal(t, os.Geteuid(), ids[0])
	}
}

// ps tells the same as /proc.
func TestTablesOfProcesses(t *testing.T) {
	if _, err := exec.LookPath("ps"); err != nil {
		t.Skip("needs ps")
	}
	p, ids := startProcess(t, "sleep 600 & echo $! >> ids; wait", 1)
	for name, all := range map[string][]entry{"/proc": table(), "ps": psTable()} {
		parents := map[int]int{}
		for _, one := range all {
			parents[one.pid] = one.parent
		}
		assert.Equal(t, os.Getpid(), parents[p.pid], name)
		assert.Equal(t, p.pid, parents[ids[0]], name)
	}
}

func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	assert.Empty(t, tail(path))
	require.NoError(t, os.WriteFile(path, []byte(" short\n"), 0o600))
	assert.Equal(t, "short", tail(path))
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("x", 5000)+"end\n"), 0o600))
	assert.Len(t, tail(path), 1999)
	assert.True(t, strings.HasSuffix(tail(path), "xend"))
}

// The watchdog cleans up once its input has ended, and does nothing before.
func TestWatchdog(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "server")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "data"), 0o700))
	p, _ := startProcess(t, "echo 1 >> ids; while :; do sleep 600 & wait $!; done", 1)
	dog, err := startWatchdog(watchProcess, dir, "KILL", "plain")
	require.NoError(t, err)
	require.NoError(t, dog.watch(0))
	require.NoError(t, dog.watch(p.pid))
	require.DirExists(t, dir)
	require.False(t, p.ended())
	done := make(chan error, 1)
	go func() { done <- dog.finish() }()
	require.Eventually(t, p.ended, 20*time.Second, time.Millisecond) // we reap it, which it waits for
	require.NoError(t, <-done)
	require.NoDirExists(t, dir)
	require.Error(t, dog.watch(1))
}

func TestParseURL(t *testing.T) {
	for raw, want := range map[string]Database{
		"postgres://a:b@host/x?sslmode=require": {
			Kind: Postgres, Address: "host:5432", User: "a", Password: "b", Name: "x", params: map[string][]string{"sslmode": {"require"}},
		},
		"postgresql://a@host:1": {Kind: Postgres, Address: "host:1", User: "a", Name: "postgres", params: map[string][]string{}},
		"mysql://a:b%40c@[::1]": {Kind: MySQL, Address: "[::1]:3306", User: "a", Password: "b@c", params: map[string][]string{}},
		"mysql://a@h/x?tls=skip-verify": {
			Kind: MySQL8, Address: "h:3306", User: "a", Name: "x", params: map[string][]string{"tls": {"skip-verify"}},
		},
	} {
		got, err := parseURL(want.Kind, raw)
		require.NoError(t, err, raw)
		assert.Equal(t, want, got, raw)
	}
	tls, err := parseURL(MySQL, "mysql://a:b@h/x?tls=skip-verify")
	require.NoError(t, err)
	assert.Equal(t, "a:b@tcp(h:3306)/x?tls=skip-verify", tls.DSN())
	assert.Equal(t, "mysql://a:b@h:3306/x?tls=skip-verify", tls.URL())
}
