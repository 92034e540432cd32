package backends_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

// folderVariable tells the test binary that it is a process that will be killed; it holds the folder for its servers.
const folderVariable = "PENSTOCK_BACKENDS_FOLDER"

// untilKilled starts a server of each kind, and one that is frozen, and waits.
func untilKilled(dir string) error {
	set, err := backends.Open(backends.Options{Dir: dir, NoLocal: true})
	if err != nil {
		return err
	}
	ctx := context.Background()
	for _, kind := range []backends.Kind{backends.Postgres, backends.PgBouncer, backends.MySQL} {
		if _, _, err := set.Server(ctx, kind); err != nil {
			return err
		}
	}
	opt := backends.ServerOptions{}
	if os.Geteuid() == 0 {
		opt.DiskSize = 128 << 20
	}
	frozen, err := set.Private(ctx, backends.Postgres, opt)
	if err != nil {
		return err
	}
	if err := frozen.Freeze(); err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}

// A test process that is killed leaves no server, no folder, no mount.
func TestNothingIsLeftOfAKilledProcess(t *testing.T) {
	for _, kind := range []backends.Kind{backends.Postgres, backends.PgBouncer, backends.MySQL} {
		shared(t, kind)
		if _, source, _ := servers.Server(t.Context(), kind); !strings.Contains(source, "installed programs") {
			t.Skipf("needs the installed programs of %s, and has %s", kind, source)
		}
	}
	dir := enterable(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), folderVariable+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	assert.NoError(t, err)
	assert.Equal(t, "ready\n", line)
	assert.Len(t, using(dir), 4, "servers with a folder here")
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait() // it was killed
	require.Eventually(t, func() bool {
		left, err := os.ReadDir(dir)
		return err == nil && len(left) == 0 && len(using(dir)) == 0
	}, 60*time.Second, 50*time.Millisecond)
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), dir)
}

// using lists the servers whose command line names a folder.
func using(dir string) []string {
	var found []string
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range paths {
		text, _ := os.ReadFile(path)
		if words := strings.Split(string(text), "\x00"); strings.Contains(string(text), dir) && words[0] != "/bin/sh" {
			found = append(found, words[0])
		}
	}
	return found
}
