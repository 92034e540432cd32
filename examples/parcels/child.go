package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// child is one life of the consumer process.
type child struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr lockedBuffer
	exited chan struct{} // closed when it has ended and all it wrote was read

	replayed uint64    // after exited
	last     lastWords // after exited
	err      error     // after exited: what Wait said
}

// startChild starts this program again as a consumer.
func startChild(spec consumerSpec) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program, to start it as the consumer: %w", err)
	}
	specJSON, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encode what the consumer is told: %w", err)
	}
	c := &child{cmd: exec.Command(self), exited: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), consumerEnv+"="+string(specJSON))
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
	go c.watch(stdout)
	return c, nil
}

func (c *child) watch(stdout io.Reader) {
	defer close(c.exited)
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		var p progress
		if json.Unmarshal(lines.Bytes(), &p) != nil {
			continue
		}
		if c.replayed = max(c.replayed, p.Replayed); p.Last != nil {
			c.last = *p.Last
		}
	}
	c.err = c.cmd.Wait()
}

// kill sends SIGKILL and waits for the end.
func (c *child) kill() {
	_ = c.cmd.Process.Kill() // an error means that it has ended
	<-c.exited
}

// stop asks the process to end, by ending its input, and waits; it is killed when it takes longer than patience.
func (c *child) stop(patience time.Duration) error {
	_ = c.stdin.Close()
	select {
	case <-c.exited:
	case <-time.After(patience):
		c.kill()
		return fmt.Errorf("the consumer did not end within %s of being asked to%s", patience, c.lastWords())
	}
	if c.err != nil {
		return fmt.Errorf("the consumer ended with an error: %w%s", c.err, c.lastWords())
	}
	return nil
}

// killed tells, after exited, whether a signal ended the process, as against an exit of its own.
func (c *child) killed() bool {
	return c.cmd.ProcessState != nil && c.cmd.ProcessState.ExitCode() == -1
}

// lastWords gives what the process wrote to standard error, to be appended to an error.
func (c *child) lastWords() string {
	if words := strings.TrimSpace(c.stderr.String()); words != "" {
		return ": " + words
	}
	return ""
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
