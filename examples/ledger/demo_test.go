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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

var servers *backends.Set

// TestMain makes the test binary a consumer process, when the demo starts it as one. Otherwise it runs the tests with a
// folder of their own for temporary files, whose path is short enough for a socket, and sees that none is left.
func TestMain(m *testing.M) {
	if os.Getenv(consumerEnv) != "" {
		os.Exit(run(nil, os.Stdout, os.Stderr))
	}
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	var err error
	if servers, err = backends.Open(backends.Options{Dir: os.TempDir()}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	dir, err := os.MkdirTemp("", "lt")
	if err == nil {
		err = os.Setenv("TMPDIR", dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	code := servers.Around(m).Run()
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

// Four processes, killed at each point once. All at once there is no deadlock; one by one there may be some.
func TestEveryTransferIsAppliedOnce(t *testing.T) {
	for name, single := range map[string]bool{"all at once": false, "one by one": true} {
		t.Run(name, func(t *testing.T) {
			database := servers.Postgres(t)
			var out, progress bytes.Buffer
			opts := options{transfers: 400, accounts: 20, processes: 4, kills: 5, seed: 3, single: single}
			err := runDemo(t.Context(), opts, database.URL(), &out, &progress)
			require.NoError(t, err, out.String())
			assert.Contains(t, out.String(), "KEPT: every transfer was applied once, and the 20 accounts hold 200000.00, as before")
			assert.Equal(t, 400, row(t, out.String(), "applied"))
			assert.Equal(t, 400, row(t, out.String(), "receipts"))
			assert.Greater(t, row(t, out.String(), "delivered"), row(t, out.String(), "sent"), "something was redelivered")
			assert.Positive(t, row(t, out.String(), "replays"))
			assert.Zero(t, row(t, out.String(), "failed"), out.String())
			assert.Less(t, row(t, out.String(), "commits"), 400, "some messages shared a transaction")
			for _, p := range points() {
				assert.Equal(t, 1, strings.Count(progress.String(), string(p)), "kills %s", p)
			}
			assert.Contains(t, progress.String(), "100 %")
			assert.Regexp(t, `Killed inside a transaction: the work of \d+ messages was gone`, out.String())
			if !single {
				assert.Zero(t, row(t, out.String(), "deadlocks"), out.String())
			}
		})
	}
}

// The verdict can fail: without the middleware duplicates are applied again.
func TestTheVerdictFailsWithoutTheMiddleware(t *testing.T) {
	database := servers.Postgres(t)
	var out, progress bytes.Buffer
	err := runDemo(t.Context(), options{transfers: 200, accounts: 20, processes: 2, kills: 2, seed: 3, bare: true}, database.URL(), &out, &progress)
	require.ErrorIs(t, err, errVerdict)
	assert.Contains(t, out.String(), "BROKEN")
	assert.Contains(t, out.String(), "applied more than once")
	assert.Contains(t, out.String(), "have another balance")
	assert.NotContains(t, out.String(), "the accounts hold 200", "each transfer alone conserves the money")
	assert.Zero(t, row(t, out.String(), "receipts"))
	assert.NotContains(t, out.String(), "Killed", "nothing is said of what the middleware would have done")
}

// An interrupted run ends soon, leaves no file (see TestMain) and no process (a consumer's pipes would be goroutines left).
func TestAnInterruptedRunEnds(t *testing.T) {
	database := servers.Postgres(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out bytes.Buffer
	progress := &signalWriter{word: "kill 1", seen: cancel}
	err := runDemo(ctx, options{transfers: 400, accounts: 20, processes: 2, kills: 4, seed: 1}, database.URL(), &out, progress)
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

// The command finds a server for itself, and drops the database it made.
func TestTheCommandUsesTheServerItIsGiven(t *testing.T) {
	database := servers.Postgres(t)
	t.Setenv(backends.Postgres.Variable(), database.URL())
	var out, progress bytes.Buffer
	require.Zero(t, run([]string{"-n", "30", "-processes", "1"}, &out, &progress), progress.String())
	assert.Contains(t, out.String(), "KEPT")
	assert.Contains(t, progress.String(), "PostgreSQL "+database.Version+": PENSTOCK_POSTGRES_URL")
}

func TestTheCommandNamesWhatIsMissing(t *testing.T) {
	t.Setenv(backends.Postgres.Variable(), "mysql://nobody@127.0.0.1/")
	var out, progress bytes.Buffer
	require.Equal(t, exitFailed, run([]string{"-n", "10"}, &out, &progress))
	assert.Contains(t, progress.String(), "ledger: PENSTOCK_POSTGRES_URL has to begin with postgres://")
	assert.Empty(t, out.String())
}

func TestAConsumerThatEndsByItselfIsAnError(t *testing.T) {
	t.Parallel()
	p := newPlace(consumerSpec{Socket: "nobody", Database: "postgres://127.0.0.1:1/none"}, nil, 0)
	err := p.hold(t.Context())
	require.ErrorContains(t, err, "a consumer ended by itself")
	require.ErrorContains(t, err, "connect to the broker", "its last words are there")
}
