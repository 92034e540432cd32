//go:build unix

package backends

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a server as a child of ours, in the foreground, with a process group of its own. No goroutine belongs to it:
// it is asked whether it has ended.
//
// Its descendants are found by their parent, because each backend of PostgreSQL has a session of its own that signals to the
// group do not reach.
type process struct {
	pid int // 0: not running
}

// programPause is how long we wait before we look at a process again.
const programPause = 5 * time.Millisecond

// cannotStart says why private servers are not started on this system; "": they are.
func cannotStart() string { return "" }

// servant is whom servers run as if we are root: PostgreSQL refuses to be root.
func servant() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil //nolint:nilnil // no other credential is needed
	}
	who, err := user.Lookup("nobody")
	if err != nil {
		return nil, fmt.Errorf("looking for the user that servers run as: %w", err)
	}
	uid, err1 := strconv.ParseUint(who.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(who.Gid, 10, 32)
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("reading the user that servers run as: %w", err)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// give makes a file or folder the servant's.
func give(path string) error {
	who, err := servant()
	if err != nil || who == nil {
		return err
	}
	return os.Chown(path, int(who.Uid), int(who.Gid))
}

// prepared readies a command to run as the servant, with an environment that says nothing of ours.
func prepared(cmd *exec.Cmd, dir string, output *os.File) error {
	who, err := servant()
	if err != nil {
		return err
	}
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, output, output
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC", "HOME=" + dir, "TMPDIR=" + dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: who}
	return nil
}

// runTool runs a program to its end, as the servant. The error shows the end of what it wrote.
func runTool(ctx context.Context, dir string, argv []string) error {
	output, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer output.Close() //nolint:errcheck // the tool has written to its own copy of it
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	if err := prepared(cmd, dir, output); err != nil {
		return err
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(argv[0]), err, tail(output.Name()))
	}
	return nil
}

// start runs the server; its output is appended to the log in dir.
func (p *process) start(dir string, argv []string) error {
	output, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer output.Close() //nolint:errcheck // the server writes to its own copy of it
	cmd := exec.Command(argv[0], argv[1:]...)
	if err := prepared(cmd, dir, output); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", filepath.Base(argv[0]), err)
	}
	p.pid = cmd.Process.Pid
	return cmd.Process.Release() // we wait for it by its id
}

// ended tells whether the server has ended, and reaps it.
func (p *process) ended() bool {
	if p.pid == 0 {
		return true
	}
	got, err := syscall.Wait4(p.pid, nil, syscall.WNOHANG, nil)
	if got == p.pid || (err != nil && !errors.Is(err, syscall.EINTR)) {
		p.pid = 0
	}
	return p.pid == 0
}

// stop asks the server to end, and ends it by force when the patience is over.
func (p *process) stop(how syscall.Signal, patience time.Duration) error {
	if p.ended() {
		return nil
	}
	if err := syscall.Kill(p.pid, how); err != nil {
		return fmt.Errorf("asking the server to end: %w", err)
	}
	if within(patience, p.ended) {
		return nil
	}
	return p.kill()
}

// kill ends the server and its descendants with SIGKILL, and returns when none is left.
func (p *process) kill() error {
	if p.ended() {
		return nil
	}
	all := p.halt()
	for _, pid := range all {
		_ = syscall.Kill(pid, syscall.SIGKILL) // fails where it has ended
	}
	if !within(10*time.Second, p.ended) {
		return errors.New("the server outlived SIGKILL for ten seconds")
	}
	if !within(10*time.Second, func() bool { return len(living(all)) == 0 }) {
		return errors.New("children of the server outlived SIGKILL for ten seconds")
	}
	return nil
}

// halt stops the server and its descendants where they stand, and lists them: stopped, it makes no new ones.
func (p *process) halt() []int {
	_ = syscall.Kill(p.pid, syscall.SIGSTOP)
	within(time.Second, func() bool { return state(p.pid) == 'T' })
	all := append([]int{p.pid}, descendants(p.pid)...)
	for _, pid := range all[1:] {
		_ = syscall.Kill(pid, syscall.SIGSTOP)
	}
	within(time.Second, func() bool {
		for _, pid := range all {
			if s := state(pid); s != 'T' && s != 'Z' && s != 0 {
				return false
			}
		}
		return true
	})
	return all
}

func (p *process) freeze() error {
	if p.ended() {
		return errors.New("the server does not run")
	}
	p.halt()
	return nil
}

func (p *process) thaw() error {
	if p.ended() {
		return errors.New("the server does not run")
	}
	for _, pid := range append(descendants(p.pid), p.pid) {
		_ = syscall.Kill(pid, syscall.SIGCONT) // fails where it has ended
	}
	return nil
}

// within asks until the answer is yes or the time is over.
func within(d time.Duration, yes func() bool) bool {
	for end := time.Now().Add(d); !yes(); time.Sleep(programPause) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// living keeps those of the processes that have not ended.
func living(pids []int) []int {
	var alive []int
	for _, pid := range pids {
		if syscall.Kill(pid, 0) == nil && state(pid) != 'Z' {
			alive = append(alive, pid)
		}
	}
	return alive
}

// state is the letter of a process's state: T stopped, Z ended but not reaped; 0 if it is not known.
func state(pid int) byte {
	if one, ok := stat(pid); ok {
		return one.state
	}
	return 0
}

// descendants lists the children of a process, theirs, and so on.
func descendants(pid int) []int {
	var found []int
	all := table()
	for known := []int{pid}; len(known) > 0; known = known[1:] {
		for _, one := range all {
			if one.parent == known[0] {
				found, known = append(found, one.pid), append(known, one.pid)
			}
		}
	}
	return found
}

type entry struct {
	pid, parent int
	state       byte
}

// stat reads about one process.
func stat(pid int) (entry, bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return entry{}, false // it has ended, or there is no such folder here
	}
	// The name, in parentheses, may hold blanks and parentheses.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) < 2 {
		return entry{}, false
	}
	parent, err := strconv.Atoi(fields[1])
	return entry{pid: pid, parent: parent, state: fields[0][0]}, err == nil
}

// table lists the processes of the machine, from /proc, or from ps where there is none.
func table() []entry {
	folders, _ := filepath.Glob("/proc/[0-9]*") // its only error is that of a bad pattern
	if len(folders) == 0 {
		return psTable()
	}
	all := make([]entry, 0, len(folders))
	for _, folder := range folders {
		pid, err := strconv.Atoi(filepath.Base(folder))
		if err != nil {
			continue
		}
		if one, ok := stat(pid); ok {
			all = append(all, one)
		}
	}
	return all
}

func psTable() []entry {
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=,state=").Output()
	if err != nil {
		return nil
	}
	var all []entry
	for line := range strings.Lines(string(out)) {
		var one entry
		var letter string
		if n, _ := fmt.Sscan(line, &one.pid, &one.parent, &letter); n == 3 {
			one.state = letter[0]
			all = append(all, one)
		}
	}
	return all
}

// tail is the end of a log.
func tail(path string) string {
	const most = 2000
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close() //nolint:errcheck // it was only read
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, size-most), io.SeekStart) // then the whole log is shown
	}
	text, _ := io.ReadAll(io.LimitReader(f, most)) // what can be read is enough
	return strings.TrimSpace(string(text))
}

// apart gives a command a process group of its own, out of the reach of a Ctrl-C at the terminal.
func apart(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }
