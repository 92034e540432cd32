package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest/stage"
)

// TestMain makes the test binary the consumer process, when the demo starts it as one. Otherwise it runs the tests with a
// folder of their own for temporary files, whose path is short enough for a socket, and sees that none is left.
func TestMain(m *testing.M) {
	if os.Getenv(consumerEnv) != "" {
		os.Exit(run(nil, os.Stdout, os.Stderr))
	}
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "pt")
	if err == nil {
		err = os.Setenv("TMPDIR", dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	code := m.Run()
	left, err := os.ReadDir(dir)
	if code == 0 && (err != nil || len(left) > 0) {
		fmt.Fprintln(os.Stderr, "temporary files are left:", left, err)
		return 1
	}
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// row finds the number in a row of the printed table.
func row(t *testing.T, out, name string) int {
	t.Helper()
	match := regexp.MustCompile(`(?m)^│ ` + name + `\s+(\d+) `).FindStringSubmatch(out)
	require.NotNil(t, match, "row %q of\n%s", name, out)
	n, err := strconv.Atoi(match[1])
	require.NoError(t, err)
	return n
}

func TestEveryEventTakesEffectOnce(t *testing.T) {
	t.Parallel()
	var out, progress bytes.Buffer
	err := runDemo(t.Context(), options{events: 300, seed: 3, kills: 5}, &out, &progress)
	require.NoError(t, err, out.String())
	assert.Contains(t, out.String(), "KEPT")
	assert.Equal(t, row(t, out.String(), "distinct"), row(t, out.String(), "effects"))
	assert.Equal(t, row(t, out.String(), "distinct"), row(t, out.String(), "receipts"))
	assert.Equal(t, 1, row(t, out.String(), "conflicts"))
	assert.Positive(t, row(t, out.String(), "refused"))
	assert.Greater(t, row(t, out.String(), "delivered"), row(t, out.String(), "sent"), "something was redelivered")
	assert.Positive(t, row(t, out.String(), "replays"))
	for _, p := range points() {
		assert.Equal(t, 1, strings.Count(progress.String(), string(p)), "kills %s", p)
	}
	assert.Contains(t, progress.String(), "100 %")
	assert.Less(t, row(t, out.String(), "commits"), row(t, out.String(), "receipts"), "some messages shared a transaction")
	inside := regexp.MustCompile(`Killed inside a transaction: the work of (\d+) messages was gone`).FindStringSubmatch(out.String())
	require.NotNil(t, inside, out.String())
	undone, err := strconv.Atoi(inside[1])
	require.NoError(t, err)
	assert.GreaterOrEqual(t, undone, 2, "one kill before COMMIT, one between two messages")
	assert.Regexp(t, `Killed after COMMIT: \d+ messages came again, and changed nothing`, out.String())
}

// The verdict can fail: without the middleware duplicates take effect again.
func TestTheVerdictFailsWithoutTheMiddleware(t *testing.T) {
	t.Parallel()
	var out, progress bytes.Buffer
	err := runDemo(t.Context(), options{events: 100, seed: 3, kills: 2, bare: true}, &out, &progress)
	require.ErrorIs(t, err, errVerdict)
	assert.Contains(t, out.String(), "BROKEN")
	assert.Contains(t, out.String(), "took effect more than once")
	assert.Greater(t, row(t, out.String(), "effects"), row(t, out.String(), "distinct"))
	assert.Zero(t, row(t, out.String(), "receipts"))
	assert.NotContains(t, out.String(), "Killed", "nothing is said of what the middleware would have done")
}

func TestADatabaseIsKeptOnlyWhereAskedFor(t *testing.T) {
	t.Parallel()
	dir := t.TempDir() + "/Köln 100%? #1"
	opts := options{events: 60, seed: 1, kills: 1, dir: dir}
	var out bytes.Buffer
	require.NoError(t, runDemo(t.Context(), opts, &out, &out))
	kept, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, kept, 1, "nothing but the database")
	assert.Equal(t, "parcels.db", kept[0].Name())
	require.ErrorContains(t, runDemo(t.Context(), opts, &out, &out), "remove it or give another -dir")
}

// An interrupted run ends soon, leaves no file (see TestMain) and no process (the consumer's pipes would be goroutines left).
func TestAnInterruptedRunEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out bytes.Buffer
	progress := &signalWriter{word: "kill 1", seen: cancel}
	err := runDemo(ctx, options{events: 200, seed: 1, kills: 4}, &out, progress)
	require.ErrorIs(t, err, context.Canceled)
	assert.Empty(t, out.String(), "no verdict")
}

// signalWriter calls seen when word is written.
type signalWriter struct {
	word string
	seen func()
}

func (w *signalWriter) Write(p []byte) (int, error) {
	if strings.Contains(string(p), w.word) {
		w.seen()
	}
	return len(p), nil
}

func TestAConsumerThatEndsByItselfIsAnError(t *testing.T) {
	t.Parallel()
	d := &demo{
		sent: make([]input, 1), tally: stage.NewTally(), out: stage.NewDisplay(&bytes.Buffer{}, 1),
		socket: "nobody", database: t.TempDir() + "/parcels.db",
	}
	err := d.consumers(t.Context())
	require.ErrorContains(t, err, "the consumer ended by itself")
	require.ErrorContains(t, err, "connect to the broker", "its last words are there")
}

func TestChildEnds(t *testing.T) {
	t.Parallel()
	failing, err := startLife(consumerSpec{Socket: "nobody", Database: t.TempDir() + "/no/such/folder/parcels.db"})
	require.NoError(t, err)
	err = failing.Stop(time.Minute)
	require.ErrorContains(t, err, "create the tables", "why it ended")
	assert.False(t, failing.Killed())

	// It stops in the middle of anything: here it never finds a broker, or has not even begun to look for one.
	stopped, err := startLife(consumerSpec{Socket: "nobody", Database: t.TempDir() + "/parcels.db"})
	require.NoError(t, err)
	stopped.Kill()
	assert.True(t, stopped.Killed())
	require.Error(t, stopped.Stop(time.Minute))
}
