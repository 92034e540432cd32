package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/idempotency"
)

var servers *backends.Set

// TestMain makes the test binary a consumer process, when a crowd starts it as one.
func TestMain(m *testing.M) {
	if os.Getenv(consumerEnv) != "" {
		os.Exit(run(nil, os.Stdout, os.Stderr))
	}
	var err error
	if servers, err = backends.Open(backends.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(servers.Around(m))
}

// The short form of what `make crowd` does: eight processes, 3,000 messages, 30 % duplicates. The window is small, because a
// duplicate waits for a first copy in its own process for 20 s at most, and on a loaded machine a long queue takes longer.
func TestEightProcesses(t *testing.T) {
	for name, s := range stores() {
		t.Run(name, func(t *testing.T) {
			database := servers.TestDatabase(t, s.kind)
			var progress, out bytes.Buffer
			p := plan{messages: 3000, duplicates: 30, processes: 8, window: 32, store: name, seed: 1}
			r, err := runCrowd(t.Context(), p, database.DSN(), &progress)
			require.NoError(t, err)
			require.NoError(t, r.print(&out, p, database.Version), out.String())
			t.Log("\n" + out.String())
			assert.Equal(t, 2100, r.effects)
			assert.EqualValues(t, 900, r.replayed)
			assert.Contains(t, out.String(), "KEPT")
			assert.Contains(t, progress.String(), "100 %")
		})
	}
}

func TestIdentities(t *testing.T) {
	t.Parallel()
	p := plan{messages: 10_000, duplicates: 30, seed: 3}
	sent, distinct := identities(p)
	again, _ := identities(p)
	assert.Equal(t, sent, again, "same seed")
	assert.Len(t, sent, 10_000)
	assert.Equal(t, 7000, distinct)
	seen, beside := map[string]bool{}, 0
	for i, id := range sent {
		if i > 0 && sent[i-1] == id {
			beside++
		}
		seen[id] = true
	}
	assert.Len(t, seen, 7000)
	assert.InDelta(t, 1500, beside, 300, "half of the duplicates come at once")
	one, distinct := identities(plan{messages: 1, duplicates: 90})
	assert.Equal(t, []string{"m-0000000"}, one)
	assert.Equal(t, 1, distinct)
}

func good() *result {
	return &result{
		distinct: 7, sent: 10, effects: 7, identities: 7, receipts: 7, handled: 7, replayed: 3, deliveries: 10, took: 1,
	}
}

// Each fault is seen, by the complaint that is meant for it.
func TestTheVerdictSeesEveryFault(t *testing.T) {
	t.Parallel()
	for want, fault := range map[string]func(*result){
		"":                           func(*result) {},
		"8 effects for 7 identities": func(r *result) { r.effects, r.receipts = 8, 8 },
		"6 identities with an effect instead of 7": func(r *result) { r.identities = 6 },
		"1 effects of what was never sent":         func(r *result) { r.foreign = 1 },
		"6 receipts for 7 effects":                 func(r *result) { r.receipts = 6 },
		"1 receipts are torn":                      func(r *result) { r.torn = 1 },
		"1 messages were diverted":                 func(r *result) { r.diverted = 1 },
		"8 messages were handled instead of 7":     func(r *result) { r.handled = 8 },
		"1 handler runs were charged":              func(r *result) { r.failed = 1 },
		"2 errors surfaced, the first: oh": func(r *result) {
			r.add(news{Errors: 2, First: "oh", Report: &idempotency.Report{Handled: 0}})
			r.idle = 0
		},
		"1 processes handled nothing": func(r *result) { r.add(news{}) },
	} {
		r := good()
		fault(r)
		var out bytes.Buffer
		err := r.print(&out, plan{store: "postgres"}, "15")
		if want == "" {
			require.NoError(t, err)
			assert.Contains(t, out.String(), "KEPT")
			continue
		}
		require.ErrorIs(t, err, errVerdict, want)
		require.Len(t, r.complaints(), 1, "%s: %q", want, r.complaints())
		assert.Contains(t, out.String(), "BROKEN: "+want)
	}
}

func TestAReportIsAdded(t *testing.T) {
	t.Parallel()
	r := &result{}
	for range 2 {
		r.add(news{Report: &idempotency.Report{
			Handled: 1, Replayed: 2, Failed: 3, Returned: 4, Contention: 5,
			Batches: idempotency.Batches{Transactions: 6, Largest: 7},
		}, Errors: 1, First: "first"})
	}
	assert.Equal(t, &result{
		handled: 2, replayed: 4, failed: 6, returned: 8, contention: 10, transactions: 12, largest: 7, errors: 2, first: "first",
	}, r)
}

func TestErrorsAreCounted(t *testing.T) {
	t.Parallel()
	var log errorLog
	log.With(watermill.LogFields{"a": 1}).Error("it broke", errors.New("why"), nil)
	log.Error("again", errors.New("why not"), nil)
	log.Info("no error", nil)
	count, first := log.logged()
	assert.Equal(t, 2, count)
	assert.Equal(t, "it broke: why", first)
}

func TestParse(t *testing.T) {
	t.Parallel()
	p, err := parse(nil)
	require.NoError(t, err)
	assert.Equal(t, plan{messages: 100_000, duplicates: 30, processes: 8, window: 256, seed: 1}, p)
	p, err = parse(strings.Fields("-n 5 -duplicates 10 -processes 2 -window 9 -store mysql -seed 4"))
	require.NoError(t, err)
	assert.Equal(t, plan{messages: 5, duplicates: 10, processes: 2, window: 9, seed: 4, store: "mysql"}, p)
	for args, want := range map[string]string{
		"x": "unexpected argument", "-n 0": "at least one message", "-duplicates 91": "between 0 and 90", "-processes 0": "between 1 and 32", "-window 0": "between 1 and 4096",
		"-store oracle": `one of ["mysql" "pgxstore" "postgres"]`, "-y": "-help lists the flags",
	} {
		_, err := parse(strings.Fields(args))
		require.ErrorContains(t, err, want, args)
	}
	var out, errs bytes.Buffer
	require.Zero(t, run([]string{"-help"}, &out, &errs))
	assert.Contains(t, out.String(), "-duplicates per cent")
	require.Equal(t, 2, run([]string{"-y"}, &out, &errs))
}

func TestAConsumerThatEndsByItselfIsAnError(t *testing.T) {
	database := servers.Postgres(t)
	c := &member{ready: make(chan struct{})}
	c.hear([]byte("no JSON"))
	c.hear([]byte(`{"Ready": true}`))
	<-c.ready
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := runCrowd(ctx, plan{messages: 1, processes: 1, window: 1, store: "postgres"}, database.DSN(), &bytes.Buffer{})
	require.ErrorIs(t, err, context.Canceled)
}

func TestTheCommandNamesWhatIsMissing(t *testing.T) {
	t.Setenv(backends.Postgres.Variable(), "mysql://nobody@127.0.0.1/")
	var out, errs bytes.Buffer
	require.Equal(t, 1, run([]string{"-n", "10", "-store", "pgxstore"}, &out, &errs))
	assert.Contains(t, errs.String(), "crowd: pgxstore: PENSTOCK_POSTGRES_URL has to begin with postgres://")
}
