package stage

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"time"
)

// Child is one life of a consumer process. Its methods can be called from any goroutine.
type Child struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stderr lockedBuffer
	exited chan struct{}
	err    error // after exited: what Wait said
}

// Start starts this program again. What is to become of it is in an environment variable: spec, as JSON, which [Consumer]
// reads there. line is called with each line that the process writes to its standard output, one after the other, and no
// more once Exited is closed; it does not keep the slice.
func Start(variable string, spec any, line func([]byte)) (*Child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program, to start it as the consumer: %w", err)
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encode what the consumer is told: %w", err)
	}
	c := &Child{cmd: exec.Command(self), exited: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), variable+"="+string(text))
	c.cmd.Stderr = &c.stderr
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start the consumer: %w", err)
	}
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start the consumer: %w", err)
	}
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the consumer: %w", err)
	}
	go c.watch(stdout, line)
	return c, nil
}

func (c *Child) watch(stdout io.Reader, line func([]byte)) {
	defer close(c.exited)
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		line(lines.Bytes())
	}
	c.err = c.cmd.Wait()
}

// Exited is closed when the process has ended and all that it wrote was read.
func (c *Child) Exited() <-chan struct{} { return c.exited }

// Ended says, after Exited, how the process ended, with what it wrote to standard error; nil: in order.
func (c *Child) Ended() error {
	<-c.exited
	if c.err == nil {
		return nil
	}
	return fmt.Errorf("%w%s", c.err, c.LastWords())
}

// Kill sends SIGKILL and waits for the end.
func (c *Child) Kill() {
	_ = c.cmd.Process.Kill() // an error means that it has ended
	<-c.exited
}

// Tell writes a line to the process's standard input, spec as JSON. It does not wait for an effect; an error means that the
// process has ended.
func (c *Child) Tell(spec any) error {
	line, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encode what the consumer is told: %w", err)
	}
	if _, err := c.stdin.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("tell the consumer: %w", err)
	}
	return nil
}

// Stop asks the process to end, by ending its input, and waits; it is killed when it takes longer than patience.
func (c *Child) Stop(patience time.Duration) error {
	_ = c.stdin.Close()
	select {
	case <-c.exited:
	case <-time.After(patience):
		c.Kill()
		return fmt.Errorf("the consumer did not end within %s of being asked to%s", patience, c.LastWords())
	}
	if err := c.Ended(); err != nil {
		return fmt.Errorf("the consumer ended with an error: %w", err)
	}
	return nil
}

// Killed tells, after Exited, whether a signal ended the process, as against an exit of its own.
func (c *Child) Killed() bool {
	<-c.exited
	return c.cmd.ProcessState != nil && c.cmd.ProcessState.ExitCode() == -1
}

// LastWords gives what the process wrote to standard error, to be appended to an error.
func (c *Child) LastWords() string {
	if words := strings.TrimSpace(c.stderr.String()); words != "" {
		return ": " + words
	}
	return ""
}

// Consumer is the main of a child process. It reads into spec what the parent said, and calls consume, whose context is done
// when standard input ends: that is how the parent asks for the end, and what happens when the parent dies. What the parent
// tells meanwhile is called out to heard, line by line, where that is not nil; heard does not keep the slice. Ctrl-C reaches
// the whole group of processes and is left to the parent.
func Consumer(variable string, spec any, heard func([]byte), consume func(context.Context) error) error {
	signal.Ignore(os.Interrupt)
	text, ok := os.LookupEnv(variable)
	if !ok {
		return errors.New(variable + " is not set")
	}
	if err := json.Unmarshal([]byte(text), spec); err != nil {
		return fmt.Errorf("read %s: %w", variable, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			if heard != nil {
				heard(lines.Bytes())
			}
		}
		cancel()
	}()
	return consume(ctx)
}

// lockedBuffer keeps the first kilobytes written to it.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.buf.Write(p[:min(len(p), max(0, 8<<10-b.buf.Len()))])
	return len(p), nil
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
