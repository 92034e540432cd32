package backends

import (
	"errors"
	"fmt"
	"io"
	"os/exec"
	"time"
)

// watchdog is a shell that waits for the end of its standard input, which comes when we close it or when this process dies,
// however it dies. Then it removes what its script says. So there is one way to clean up, and it is used every time.
type watchdog struct {
	cmd *exec.Cmd
	in  io.WriteCloser
}

// Each script reads the id of the running server, again and again until the input ends.
const (
	// watchProcess: $1 is the server's folder, $2 the signal that ends the server together with its children, $3 is
	// "plain" unless a file system is mounted for the data. SIGCONT comes
	// first because a frozen server hears no other. The segment of shared memory is one that PostgreSQL leaves when it is
	// killed.
	watchProcess = `trap '' HUP INT QUIT TERM
server=0
while read -r id; do server=$id; done
if [ "$server" -gt 1 ] && kill -CONT "$server" 2>/dev/null; then
  kill -"$2" "$server"
  turns=0
  while kill -0 "$server" 2>/dev/null && [ "$turns" -lt 80 ]; do sleep 0.1; turns=$((turns+1)); done
  kill -KILL -"$server" 2>/dev/null
fi
if [ -f "$1/data/postmaster.pid" ]; then
  segment=$(sed -n 7p "$1/data/postmaster.pid")
  ipcrm -m "${segment##* }" 2>/dev/null
fi
[ "$3" = plain ] || umount "$1/data" 2>/dev/null || umount -l "$1/data" 2>/dev/null
rm -rf -- "$1"`
	// watchContainer: $1 is the engine's program, $2 the name of the container.
	watchContainer = `trap '' HUP INT QUIT TERM
while read -r id; do :; done
"$1" rm -f -v "$2" >/dev/null 2>&1`
)

func startWatchdog(script string, args ...string) (*watchdog, error) {
	cmd := exec.Command("/bin/sh", append([]string{"-c", script, "penstock-watchdog"}, args...)...)
	apart(cmd)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("making the watchdog's pipe: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("starting the watchdog: %w", err), in.Close())
	}
	return &watchdog{cmd: cmd, in: in}, nil
}

// watch tells which process is the server now; 0: none.
func (w *watchdog) watch(pid int) error {
	if _, err := fmt.Fprintln(w.in, pid); err != nil {
		return fmt.Errorf("telling the watchdog: %w", err)
	}
	return nil
}

// finish has the watchdog clean up, and returns when it has.
func (w *watchdog) finish() error {
	const patience = 30 * time.Second
	timer := time.AfterFunc(patience, func() { _ = w.cmd.Process.Kill() }) // fails where it has ended
	defer timer.Stop()
	err := w.in.Close()
	_ = w.cmd.Wait() // the script's last command may fail where there is nothing to remove
	return err
}
