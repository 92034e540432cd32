package pipe_test

import (
	"bufio"
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
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// childVar tells the test binary that it is the child to be killed; it holds the socket's path.
const childVar = "PENSTOCK_PIPE_CHILD"

func TestMain(m *testing.M) {
	if path := os.Getenv(childVar); path != "" {
		if err := consume(context.Background(), path, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
	}
	if path := os.Getenv(brokerVar); path != "" {
		if err := serveAsChild(path); err != nil {
			fmt.Fprintln(os.Stderr, "broker:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// consume is the child: it takes n deliveries, says so, and waits to be killed.
func consume(ctx context.Context, path string, args []string) error {
	topic, group := args[0], args[1]
	n, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	d, err := pipe.Open(ctx, dialer(path), 0)
	if err != nil {
		return err
	}
	b := sdk.Binding{Topic: topic, Group: group, Window: max(n, 1), Declare: true}
	if err := d.Prepare(ctx, b); err != nil {
		return err
	}
	src, err := d.Open(ctx, b)
	if err != nil {
		return err
	}
	for n > 0 {
		got, err := src.Receive(ctx, n)
		if err != nil {
			return err
		}
		n -= len(got)
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin) // ends when the parent dies first
	return err
}

func dialer(path string) pipe.Dial {
	return func(ctx context.Context) (io.ReadWriteCloser, error) {
		var nd net.Dialer
		return nd.DialContext(ctx, "unix", path)
	}
}

// parent is a memory broker behind a pipe server on a Unix socket.
type parent struct {
	broker *memory.Broker
	server *pipe.Server
	path   string
}

func newParent(t *testing.T, opts memory.Options) *parent {
	t.Helper()
	network := memory.NewNetwork(opts)
	d, err := network.Driver("parent")
	if err != nil {
		t.Fatal(err)
	}
	p := &parent{broker: network.Broker("parent"), server: pipe.NewServer(d, 0), path: filepath.Join(t.TempDir(), "s")}
	l, err := net.Listen("unix", p.path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- p.server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-served, d.Close(context.Background())); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *parent) harness() contracttest.Harness {
	return contracttest.Harness{
		Name:     "pipe over memory",
		Patience: 6 * time.Second,
		Open:     func(ctx context.Context) (sdk.Driver, error) { return pipe.Open(ctx, dialer(p.path), 0) },
		Cut:      func(context.Context) error { p.server.Cut(); return nil },
		Stall:    func(context.Context) (func(), error) { return p.server.Stall(), nil },
		Restart:  func(context.Context) error { p.broker.Restart(); p.server.Cut(); return nil },
		Refuse: func(_ context.Context, topic string) (func(), error) {
			return p.broker.Refuse(topic, nil), nil
		},
		DropTopology:    func(_ context.Context, topic string) error { p.broker.DropTopic(topic); return nil },
		Undecodable:     func(_ context.Context, topic string, raw []byte) error { return p.broker.PutUndecodable(topic, raw) },
		DeadLetterTopic: func(topic string) string { return topic + memory.DeadSuffix },
		Unsettled: func(_ context.Context, topic, group string) (int, error) {
			return p.broker.Unsettled(topic, group), nil
		},
		KillConsumer: p.killConsumer,
	}
}

// killConsumer starts this test binary as a consumer and kills it once it holds n deliveries.
func (p *parent) killConsumer(ctx context.Context, topic, group string, n int) error {
	cmd := exec.CommandContext(ctx, os.Args[0], topic, group, strconv.Itoa(n))
	cmd.Env = append(os.Environ(), childVar+"="+p.path)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	defer func() { _ = stdin.Close() }()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err == nil && line != "ready\n" {
		err = fmt.Errorf("the child said %q", line)
	}
	if held := p.broker.Unsettled(topic, group); err == nil && held < n {
		err = fmt.Errorf("the child took %d deliveries, and the broker counts %d unsettled", n, held)
	}
	err = errors.Join(err, cmd.Process.Kill())
	if wait := cmd.Wait(); cmd.ProcessState.Success() {
		err = errors.Join(err, fmt.Errorf("the child was not killed: %w", wait))
	}
	return err
}

func TestContract(t *testing.T) {
	rep := contracttest.Check(t.Context(), newParent(t, memory.Options{Lease: 3 * time.Second, MaxPayload: 1 << 20}).harness())
	t.Log("\n" + rep.String())
	if !rep.OK() {
		t.Errorf("failed: %q", rep.IDs(contracttest.Failed))
	}
	if got := rep.IDs(contracttest.NotRun); !slices.Equal(got, []string{"L04/signal"}) {
		t.Errorf("not run: %q, want only L04/signal, which the memory driver's test runs", got)
	}
}
