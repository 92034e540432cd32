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
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// brokerVar tells the test binary that it is the process with the broker; it holds the socket's path.
const brokerVar = "PENSTOCK_PIPE_BROKER"

// serveAsChild is the broker's process. Its standard input says, line by line, what it is to do; each line is answered.
func serveAsChild(path string) error {
	network := memory.NewNetwork(memory.Options{Lease: 3 * time.Second, MaxPayload: 1 << 20})
	d, err := network.Driver("child")
	if err != nil {
		return err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server, broker := pipe.NewServer(d, 0), network.Broker("child")
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, l) }()
	fmt.Println("ready")
	undo := map[string]func(){}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); fmt.Println("done") {
		switch command, topic, _ := strings.Cut(lines.Text(), " "); command {
		case "cut":
			server.Cut()
		case "stall":
			undo["stall"] = server.Stall()
		case "refuse":
			undo["refuse"] = broker.Refuse(topic, nil)
		case "undo":
			undo[topic]()
		}
	}
	cancel()
	return errors.Join(<-served, d.Close(context.Background()))
}

// brokerProcess is the parent's end of it.
type brokerProcess struct {
	path string
	mu   sync.Mutex
	in   io.WriteCloser
	out  *bufio.Reader
}

func startBroker(t *testing.T) *brokerProcess {
	t.Helper()
	p := &brokerProcess{path: filepath.Join(t.TempDir(), "s")}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), brokerVar+"="+p.path)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.in, p.out = in, bufio.NewReader(out)
	t.Cleanup(func() {
		if err := errors.Join(p.in.Close(), cmd.Wait()); err != nil {
			t.Errorf("the broker's process: %v", err)
		}
	})
	if err := p.expect("ready"); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *brokerProcess) expect(want string) error {
	line, err := p.out.ReadString('\n')
	if err == nil && line != want+"\n" {
		err = fmt.Errorf("the broker's process said %q, want %q", line, want)
	}
	return err
}

// tell has the process do something, and waits until it is done.
func (p *brokerProcess) tell(command string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := fmt.Fprintln(p.in, command); err != nil {
		return err
	}
	return p.expect("done")
}

// The broker in another process: lost answers (P06), silence (P08, F03) and cuts (F01) between two real processes.
func TestContractAcrossProcesses(t *testing.T) {
	p := startBroker(t)
	during := func(command, undo string) (func(), error) {
		err := p.tell(command)
		return sync.OnceFunc(func() {
			if err := p.tell(undo); err != nil {
				t.Error(err)
			}
		}), err
	}
	rep := contracttest.Check(t.Context(), contracttest.Harness{
		Name:     "pipe to another process",
		Patience: 6 * time.Second,
		Many:     1000, // TestContract has them all
		Open:     func(ctx context.Context) (sdk.Driver, error) { return pipe.Open(ctx, dialer(p.path), 0) },
		Cut:      func(context.Context) error { return p.tell("cut") },
		Stall:    func(context.Context) (func(), error) { return during("stall", "undo stall") },
		Refuse: func(_ context.Context, topic string) (func(), error) {
			return during("refuse "+topic, "undo refuse")
		},
	})
	t.Log("\n" + rep.String())
	if !rep.OK() {
		t.Errorf("failed: %q", rep.IDs(contracttest.Failed))
	}
	passed := rep.IDs(contracttest.Passed)
	for _, id := range []string{"P06/cut", "P06/refuse", "P06/stall", "P08", "P08/stall", "F01", "F01/load", "F03"} {
		if !slices.Contains(passed, id) {
			t.Errorf("%s did not run and pass", id)
		}
	}
}
