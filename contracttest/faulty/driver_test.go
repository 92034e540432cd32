package faulty_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/faulty"
	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// updateVar makes the test write the golden file instead of comparing with it.
const updateVar = "PENSTOCK_UPDATE_GOLDEN"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// harness is the memory driver with a fault in every driver that is opened, in a bubble.
func harness(wrap func(sdk.Driver) sdk.Driver) contracttest.Harness {
	fresh := func() contracttest.Harness {
		net := memory.NewNetwork(memory.Options{Lease: 8 * time.Second, Horizon: time.Hour, MaxPayload: 64 << 10})
		b := net.Broker("b")
		return contracttest.Harness{
			Open: func(context.Context) (sdk.Driver, error) {
				d, err := net.Driver("b")
				if err != nil {
					return nil, err
				}
				return wrap(d), nil
			},
			Restart:         func(context.Context) error { b.Restart(); return nil },
			Cut:             func(context.Context) error { b.Disconnect(); return nil },
			Stall:           func(context.Context) (func(), error) { return b.Stall(), nil },
			Refuse:          func(_ context.Context, topic string) (func(), error) { return b.Refuse(topic, nil), nil },
			DropTopology:    func(_ context.Context, topic string) error { b.DropTopic(topic); return nil },
			Undecodable:     func(_ context.Context, topic string, raw []byte) error { return b.PutUndecodable(topic, raw) },
			DeadLetterTopic: func(topic string) string { return topic + memory.DeadSuffix },
			Unsettled: func(_ context.Context, topic, group string) (int, error) {
				return b.Unsettled(topic, group), nil
			},
		}
	}
	return contracttest.Harness{Name: "faulty", Bubble: true, Fresh: fresh, Many: 400}
}

// TestReference shows that what fails below fails because of the fault.
func TestReference(t *testing.T) {
	t.Parallel()
	rep := contracttest.Examine(t, harness(func(d sdk.Driver) sdk.Driver { return d }))
	if !rep.OK() {
		t.Errorf("the healthy driver fails:\n%s", rep)
	}
}

// TestDriverFaults runs the suite over every fault and compares which clauses fail with the golden file, so that a clause
// that goes blind is seen, as is one that fails for no reason.
func TestDriverFaults(t *testing.T) {
	var mu sync.Mutex
	caught := map[string][]string{}
	t.Run("each", func(t *testing.T) {
		for _, f := range faulty.DriverFaults() {
			t.Run(f.Name, func(t *testing.T) {
				t.Parallel()
				var fired atomic.Int64
				rep := contracttest.Examine(t, harness(func(d sdk.Driver) sdk.Driver { return f.Wrap(d, &fired) }))
				if fired.Load() == 0 {
					t.Error("the fault never fired: the run proves nothing")
				}
				if rep.OK() {
					t.Errorf("not caught: %s", f.Breaks)
				}
				if testing.Verbose() {
					t.Logf("%s\n%s", f.Breaks, rep)
				}
				mu.Lock()
				defer mu.Unlock()
				caught[f.Name] = rep.IDs(contracttest.Failed)
			})
		}
	})
	compare(t, filepath.Join("testdata", "drivers.golden"), caught)
	t.Logf("clauses that no fault breaks: %q", unbroken(caught))
}

// expectation is what the golden file says about one fault: the clauses that always fail, and those that fail depending
// on which goroutine comes first.
type expectation struct{ always, sometimes []string }

// compare fails the test where a fault breaks other clauses than the golden file says. With updateVar it merges what was
// seen into the file instead: run it a few times to find out what depends on scheduling, after deleting what is wrong.
func compare(t *testing.T, path string, caught map[string][]string) {
	t.Helper()
	golden := readGolden(t, path)
	if os.Getenv(updateVar) != "" {
		golden = merge(golden, caught)
		writeGolden(t, path, golden)
	}
	for name, ids := range caught {
		want, ok := golden[name]
		if !ok {
			t.Errorf("%s: not in %s", name, path)
		}
		for _, id := range want.always {
			if !slices.Contains(ids, id) {
				t.Errorf("%s: %s has to fail and passes: it went blind", name, id)
			}
		}
		for _, id := range ids {
			if !slices.Contains(want.always, id) && !slices.Contains(want.sometimes, id) {
				t.Errorf("%s: %s fails, and is not in %s", name, id, path)
			}
		}
	}
	for name := range golden {
		if !slices.ContainsFunc(faulty.DriverFaults(), func(f faulty.DriverFault) bool { return f.Name == name }) {
			t.Errorf("%s is in %s, but there is no such fault", name, path)
		}
	}
}

func merge(golden map[string]expectation, caught map[string][]string) map[string]expectation {
	for name, ids := range caught {
		old, known := golden[name]
		now := expectation{sometimes: old.sometimes}
		for _, id := range ids {
			if !known || slices.Contains(old.always, id) {
				now.always = append(now.always, id)
			} else {
				now.sometimes = append(now.sometimes, id)
			}
		}
		for _, id := range old.always {
			if !slices.Contains(ids, id) {
				now.sometimes = append(now.sometimes, id)
			}
		}
		slices.Sort(now.sometimes)
		now.sometimes = slices.Compact(now.sometimes)
		golden[name] = now
	}
	return golden
}

// readGolden reads lines of a fault's name, a colon, and the clauses that fail; sometimes is marked with a question mark.
func readGolden(t *testing.T, path string) map[string]expectation {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil && os.Getenv(updateVar) == "" {
		t.Fatal(err)
	}
	golden := map[string]expectation{}
	for line := range strings.Lines(string(text)) {
		name, list, _ := strings.Cut(strings.TrimSpace(line), ":")
		var e expectation
		for _, id := range strings.Fields(list) {
			if base, maybe := strings.CutSuffix(id, "?"); maybe {
				e.sometimes = append(e.sometimes, base)
			} else {
				e.always = append(e.always, id)
			}
		}
		golden[name] = e
	}
	return golden
}

func writeGolden(t *testing.T, path string, golden map[string]expectation) {
	t.Helper()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(golden)) {
		fmt.Fprintf(&b, "%s: %s", name, strings.Join(golden[name].always, " "))
		for _, id := range golden[name].sometimes {
			fmt.Fprintf(&b, " %s?", id)
		}
		b.WriteString("\n")
	}
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}

// unbroken lists the clauses that fail under no fault.
func unbroken(caught map[string][]string) []string {
	broken := map[string]bool{}
	for _, ids := range caught {
		for _, id := range ids {
			broken[id] = true
		}
	}
	var left []string
	for _, c := range contracttest.Clauses() {
		if !broken[c.ID] {
			left = append(left, c.ID)
		}
	}
	return left
}
