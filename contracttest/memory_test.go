package contracttest_test

import (
	"context"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// memoryHarness is the reference: the memory driver with every hook that one process can offer.
func memoryHarness() contracttest.Harness {
	broker := "contract"
	net := memory.NewNetwork(memory.Options{Lease: 3 * time.Second, Horizon: time.Hour, MaxPayload: 2 << 20})
	b := net.Broker(broker)
	return contracttest.Harness{
		Name:     "memory",
		Patience: 6 * time.Second,
		Open:     func(context.Context) (sdk.Driver, error) { return net.Driver(broker) },
		Restart:  func(context.Context) error { b.Restart(); return nil },
		Cut:      func(context.Context) error { b.Disconnect(); return nil },
		Stall:    func(context.Context) (func(), error) { return b.Stall(), nil },
		Refuse:   func(_ context.Context, topic string) (func(), error) { return b.Refuse(topic, nil), nil },
		DropTopology: func(_ context.Context, topic string) error {
			b.DropTopic(topic)
			return nil
		},
		Undecodable:     func(_ context.Context, topic string, raw []byte) error { return b.PutUndecodable(topic, raw) },
		DeadLetterTopic: func(topic string) string { return topic + memory.DeadSuffix },
		Unsettled:       func(_ context.Context, topic, group string) (int, error) { return b.Unsettled(topic, group), nil },
	}
}

// wantNotRun fails the test unless exactly these clauses were not run, so that no clause is ever left out unseen.
func wantNotRun(t *testing.T, rep contracttest.Report, want ...string) {
	t.Helper()
	if got := rep.IDs(contracttest.NotRun); !slices.Equal(got, want) {
		t.Errorf("not run: %q, want %q", got, want)
	}
}

func TestMemoryInBubble(t *testing.T) {
	rep := contracttest.Examine(t, contracttest.Harness{Name: "memory", Bubble: true, Fresh: memoryHarness})
	t.Log("\n" + rep.String())
	if !rep.OK() {
		t.Errorf("failed: %q", rep.IDs(contracttest.Failed))
	}
	wantNotRun(t, rep, "D06/kill", "G03/kill", "L04/signal")
}

// Run, as a driver's author calls it: a subtest for each clause, and a skip that names the hook for each that one process
// cannot offer.
func TestMemoryBySubtests(t *testing.T) {
	contracttest.Run(t, contracttest.Harness{Name: "memory", Bubble: true, Fresh: memoryHarness})
}

func TestMemoryInRealTime(t *testing.T) {
	h := memoryHarness()
	h.Signal = func(context.Context) error { return syscall.Kill(os.Getpid(), syscall.SIGTERM) }
	rep := contracttest.Check(t.Context(), h)
	t.Log("\n" + rep.String())
	if !rep.OK() {
		t.Errorf("failed: %q", rep.IDs(contracttest.Failed))
	}
	wantNotRun(t, rep, "D06/kill", "G03/kill")
}
