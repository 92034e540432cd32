package main

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRunPrintsWhatItPromises(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out))
	assert.Equal(t, "acknowledged 2  replayed 1  failed 0\n", out.String())
	left, err := os.ReadDir(os.Getenv("TMPDIR"))
	require.NoError(t, err)
	assert.Empty(t, left, "temporary files")
}

func TestRunEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out bytes.Buffer
	require.ErrorIs(t, run(ctx, &out), context.Canceled)
	assert.Empty(t, out.String())
}

// step is one message and what the database holds after it: the counter n, receipts by state, dead letters by kind.
func TestMessagesThatCannotBeApplied(t *testing.T) {
	t.Parallel()
	inc := func(id string, by int64) *message.Message {
		return message.NewMessage(id, fmt.Appendf(nil, `{"counter": "n", "by": %d}`, by))
	}
	raw := func(id, payload string) *message.Message { return message.NewMessage(id, []byte(payload)) }
	tests := map[string]struct {
		messages []*message.Message
		value    int64
		done     int // receipts that say "effect committed"
		diverted int // receipts that say "taken out of the flow"
		letters  map[string]int
	}{
		"up to the largest value": {
			messages: []*message.Message{inc("a", math.MaxInt64-1), inc("b", 1)},
			value:    math.MaxInt64, done: 2,
		},
		"one above the largest": {
			messages: []*message.Message{inc("a", math.MaxInt64), inc("b", 1)},
			value:    math.MaxInt64, done: 1, diverted: 1, letters: map[string]int{"permanent": 1},
		},
		"down to the smallest value": {
			messages: []*message.Message{inc("a", math.MinInt64+1), inc("b", -1)},
			value:    math.MinInt64, done: 2,
		},
		"one below the smallest": {
			messages: []*message.Message{inc("a", math.MinInt64), inc("b", -1)},
			value:    math.MinInt64, done: 1, diverted: 1, letters: map[string]int{"permanent": 1},
		},
		"an overflow that comes again": {
			messages: []*message.Message{inc("a", math.MaxInt64), inc("b", 1), inc("b", 1)},
			value:    math.MaxInt64, done: 1, diverted: 1, letters: map[string]int{"permanent": 1},
		},
		"the same id with another payload": {
			messages: []*message.Message{inc("a", 5), inc("a", 7), inc("a", 7)},
			value:    5, done: 1, letters: map[string]int{"conflict": 1},
		},
		"malformed JSON": {
			messages: []*message.Message{inc("a", 5), raw("b", `{"counter": "n", "by": `)},
			value:    5, done: 1, letters: map[string]int{"refused": 1},
		},
		"larger than int64": {
			messages: []*message.Message{inc("a", 5), raw("b", `{"counter": "n", "by": 9223372036854775808}`)},
			value:    5, done: 1, letters: map[string]int{"refused": 1},
		},
		"no counter": {
			messages: []*message.Message{inc("a", 5), raw("b", `{"by": 1}`), raw("c", ``)},
			value:    5, done: 1, letters: map[string]int{"refused": 2},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, err := openDatabase(t.Context(), filepath.Join(t.TempDir(), "counter.db"))
			require.NoError(t, err)
			defer db.Close()
			// One after the other: several at once come in any order.
			for _, msg := range test.messages {
				done, err := consume(t.Context(), db, msg)
				require.NoError(t, err)
				assert.Len(t, done.tokens, 1, "acknowledged")
				assert.Zero(t, done.report.Failed, "failed")
			}
			assert.Equal(t, test.value, number(t, db, `SELECT value FROM counters WHERE name = 'n'`))
			assert.EqualValues(t, test.done, number(t, db, `SELECT count(*) FROM penstock_receipts WHERE state = 1`))
			assert.EqualValues(t, test.diverted, number(t, db, `SELECT count(*) FROM penstock_receipts WHERE state = 2`))
			for _, kind := range []string{"permanent", "conflict", "refused", "torn"} {
				assert.EqualValues(t, test.letters[kind],
					number(t, db, `SELECT count(*) FROM penstock_dead_letters WHERE kind = ?`, kind), kind)
			}
		})
	}
}

func TestManyCopiesAtOnce(t *testing.T) {
	t.Parallel()
	db, err := openDatabase(t.Context(), filepath.Join(t.TempDir(), "counter.db"))
	require.NoError(t, err)
	defer db.Close()
	var copies []*message.Message
	for range 20 {
		copies = append(copies, message.NewMessage("same", []byte(`{"counter": "n", "by": 3}`)))
	}
	done, err := consume(t.Context(), db, copies...)
	require.NoError(t, err)
	assert.Len(t, done.tokens, 20)
	assert.EqualValues(t, 19, done.report.Replayed)
	assert.EqualValues(t, 3, number(t, db, `SELECT value FROM counters WHERE name = 'n'`))
}

func number(t *testing.T, db *sql.DB, query string, args ...any) int64 {
	t.Helper()
	var n int64
	require.NoError(t, db.QueryRowContext(t.Context(), query, args...).Scan(&n))
	return n
}
