package contracttest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// The environment of a test process: in the parent the process id, to know that TestMain called TxChild; in a child what
// it has to do.
const (
	parentVariable = "PENSTOCK_CONTRACT_TX_PARENT"
	childVariable  = "PENSTOCK_CONTRACT_TX_CHILD"
)

// exitNotKilled is the exit code of a child that could not kill itself.
const exitNotKilled = 70

// childPlan says what a child process does: it consumes until its standard input ends or it reaches its point.
type childPlan struct {
	Store, Dir, Address string
	Topic, Group        string
	Guarantee           idempotency.Guarantee
	// At and Nth name the point where the child dies; none: it does not.
	At  point
	Nth int64
	// How, where set, makes the handler of the Nth message end the transaction before the child dies.
	How    Ending
	Window int
	// Crowd, where set, makes the first message that is handled hold the only lane until so many others are pending: they
	// are the next batch.
	Crowd int
}

// TxChild turns this process into the consumer that a kill clause has started, if it was started as one, and then does
// not return. Call it first in TestMain, with every store harness that RunTx is used with; once for each type T.
//
//	func TestMain(m *testing.M) {
//		contracttest.TxChild(sqliteHarness())
//		os.Exit(m.Run())
//	}
func TxChild[T any](stores ...StoreHarness[T]) {
	raw := os.Getenv(childVariable)
	if raw == "" {
		_ = os.Setenv(parentVariable, strconv.Itoa(os.Getpid())) // fails for names no system takes
		return
	}
	var p childPlan
	if err := json.Unmarshal([]byte(raw), &p); err != nil {
		exitChild(fmt.Errorf("reading the child's plan: %w", err))
	}
	for _, s := range stores {
		if s.Name == p.Store {
			exitChild(runChild(p, s))
		}
	}
}

// childReady tells whether TestMain called TxChild in this very process.
func childReady() bool { return os.Getenv(parentVariable) == strconv.Itoa(os.Getpid()) }

func exitChild(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// runChild consumes until standard input ends.
func runChild[T any](p childPlan, s StoreHarness[T]) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	death := &deathPoint{at: p.At, nth: p.Nth}
	d, err := pipe.Open(ctx, func(ctx context.Context) (io.ReadWriteCloser, error) {
		return new(net.Dialer).DialContext(ctx, "unix", p.Address)
	}, 0)
	if err != nil {
		return fmt.Errorf("connecting to the parent's broker: %w", err)
	}
	e := &txEnv[T]{
		Env: newEnv(Harness{Patience: 5 * time.Second}, "child"), s: s, dir: p.Dir, topic: p.Topic, group: p.Group,
		w: newWatch(mortalDriver{Driver: d, p: death}),
	}
	started := make(chan *consumer[T], 1)
	c, err := e.consume(ctx, plan[T]{
		window: p.Window,
		config: idempotency.Config{
			Guarantee: p.Guarantee, Lanes: min(p.Crowd, 1), BatchTime: crowdTime, TxBudget: crowdBudget,
		},
		handle: e.crowded(p.Crowd, started, e.ending(p.How, death)),
		wrap:   func(s receipts.Store[T]) receipts.Store[T] { return mortalStore[T]{Store: s, p: death} },
	})
	if err != nil {
		return err
	}
	started <- c
	_, _ = io.Copy(io.Discard, os.Stdin) // its end, however it comes, is the word to stop
	return errors.Join(e.close(), d.Close(context.Background()))
}

// crowded makes the first run of a handler wait until n more messages are pending.
func (e *txEnv[T]) crowded(n int, started <-chan *consumer[T], handle handler[T]) handler[T] {
	var once sync.Once
	return func(ctx context.Context, tx T, msg *message.Message) error {
		once.Do(func() {
			if n == 0 {
				return
			}
			c := <-started
			for c.m.Report().Health.Pending <= n && pause(ctx, pollPause) == nil {
				continue
			}
			_ = pause(ctx, settling)
		})
		return handle(ctx, tx, msg)
	}
}

// ending is a handler that applies the effect, and ends the transaction itself where it is told to.
func (e *txEnv[T]) ending(how Ending, death *deathPoint) handler[T] {
	return func(ctx context.Context, tx T, msg *message.Message) error {
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		if how != "" && death.seen.Load()+1 == death.nth {
			_ = e.s.End(ctx, tx, how) // a store may refuse it: then the process dies in a handler that has tried
		}
		death.reach(atEnded)
		return nil
	}
}

// child is a consumer in a process of its own.
type child struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr *bytes.Buffer
	exited chan error
}

// listen serves the watched driver to child processes until the clause ends.
func (e *txEnv[T]) listen(ctx context.Context) (string, error) {
	address := filepath.Join(e.dir, "broker")
	if _, err := os.Stat(address); err == nil {
		return address, nil
	}
	ln, err := net.Listen("unix", address)
	if err != nil {
		return "", fmt.Errorf("listening for child processes: %w", err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- pipe.NewServer(e.w, 0).Serve(ctx, ln) }()
	e.atEnd(func() error {
		cancel()
		return ends(done, e.h.Patience, "the pipe's server")
	})
	return address, nil
}

// spawn starts a child. It is killed at the end of the clause if it still lives then.
func (e *txEnv[T]) spawn(ctx context.Context, p childPlan) (*child, error) {
	address, err := e.listen(ctx)
	if err != nil {
		return nil, err
	}
	p.Store, p.Dir, p.Address, p.Topic, p.Group = e.s.Name, e.dir, address, e.topic, e.group
	raw, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("writing the child's plan: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding the test binary: %w", err)
	}
	c := &child{cmd: exec.CommandContext(ctx, self, "-test.run=^$"), stderr: &bytes.Buffer{}, exited: make(chan error, 1)}
	c.cmd.Env = append(os.Environ(), childVariable+"="+string(raw))
	c.cmd.Stderr = c.stderr
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("making the child's standard input: %w", err)
	}
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting a child: %w", err)
	}
	go func() { c.exited <- c.cmd.Wait() }()
	e.atEnd(func() error {
		_ = c.cmd.Process.Kill() // fails where it is dead already
		return nil
	})
	return c, nil
}

// killed waits for the child's death and fails unless it came from SIGKILL: the proof that the point was reached.
func (c *child) killed(ctx context.Context, patience time.Duration) error {
	ended, err := c.wait(ctx, patience)
	switch {
	case !ended:
		return fmt.Errorf("the child did not reach its point within %s", patience)
	case err == nil:
		return fmt.Errorf("the child ended in order instead of being killed: %s", c.words())
	case !strings.Contains(err.Error(), "signal: killed"):
		return fmt.Errorf("the child was not killed: %w: %s", err, c.words())
	default:
		return nil
	}
}

// finish tells the child to stop and waits until it did, in order.
func (c *child) finish(ctx context.Context, patience time.Duration) error {
	_ = c.stdin.Close() // fails where the child is dead, which the exit tells
	ended, err := c.wait(ctx, patience)
	if !ended {
		return fmt.Errorf("the child did not stop within %s", patience)
	}
	if err != nil {
		return fmt.Errorf("the child ended with %w: %s", err, c.words())
	}
	return nil
}

func (c *child) wait(ctx context.Context, patience time.Duration) (ended bool, exit error) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-c.exited:
		return true, err
	case <-timer.C:
	case <-ctx.Done():
	}
	return false, nil
}

// words gives what the child wrote to standard error, once it is dead.
func (c *child) words() string {
	const most = 2000
	out := strings.TrimSpace(c.stderr.String())
	return out[:min(len(out), most)]
}

var _ sdk.Driver = mortalDriver{}
