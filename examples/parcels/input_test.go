package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/stage"
)

func TestEventsOfTheRepositoryAreUsed(t *testing.T) {
	t.Parallel()
	kept, err := events(keptEvents, keptSeed)
	require.NoError(t, err)
	require.Len(t, kept, keptEvents)
	others, err := events(keptEvents, keptSeed+1)
	require.NoError(t, err)
	require.Len(t, others, keptEvents)
	assert.NotEqual(t, kept, others)
	few, err := events(7, 1)
	require.NoError(t, err)
	require.Len(t, few, 7)
	for _, in := range few {
		assert.Contains(t, string(in.payload), fmt.Sprintf("%q", in.id))
		assert.False(t, strings.HasSuffix(string(in.payload), "\n"))
	}
}

func TestDisturb(t *testing.T) {
	t.Parallel()
	clean := make([]input, 2000)
	for i := range clean {
		clean[i] = input{id: fmt.Sprint(i), payload: fmt.Append(nil, i)}
	}
	sent := disturb(clean, 5)
	assert.Equal(t, sent, disturb(clean, 5), "same seed")
	assert.NotEqual(t, sent, disturb(clean, 6), "other seed")
	copies := map[string]int{}
	inverted := 0
	highest := -1
	for _, in := range sent {
		copies[in.id]++
		var n int
		_, err := fmt.Sscan(in.id, &n)
		require.NoError(t, err)
		if copies[in.id] == 1 && n < highest {
			inverted++
		}
		highest = max(highest, n)
	}
	assert.Len(t, copies, len(clean), "none is lost")
	assert.InDelta(t, len(clean)/5, len(sent)-len(clean), 80, "a fifth is there twice")
	assert.Positive(t, inverted, "some are reordered")
}

func TestExpect(t *testing.T) {
	t.Parallel()
	event := func(id, status string, weight int) input {
		return input{id: id, payload: fmt.Appendf(nil,
			`{"id":%q,"parcel":"RR473124829DE","status":%q,"depot":"BER2","weight_g":%d,"at":"2026-03-02T05:30:00Z"}`,
			id, status, weight)}
	}
	tests := map[string]struct {
		sent                         []input
		distinct, conflicts, refused int
	}{
		"nothing":            {},
		"one":                {sent: []input{event("a", "sorted", 1)}, distinct: 1},
		"a duplicate":        {sent: []input{event("a", "sorted", 1), event("a", "sorted", 1)}, distinct: 1},
		"two":                {sent: []input{event("a", "sorted", 1), event("b", "sorted", 1)}, distinct: 2},
		"another payload":    {sent: []input{event("a", "sorted", 1), event("a", "customs", 1), event("a", "customs", 1)}, distinct: 1, conflicts: 1},
		"a third payload":    {sent: []input{event("a", "sorted", 1), event("a", "customs", 1), event("a", "sorted", 2)}, distinct: 1, conflicts: 2},
		"invalid":            {sent: []input{event("a", "sorted", -1), event("a", "sorted", -1)}, refused: 1},
		"corrected":          {sent: []input{event("a", "sorted", -1), event("a", "sorted", 1)}, distinct: 1, refused: 1},
		"invalid afterwards": {sent: []input{event("a", "sorted", 1), event("a", "lost", 1)}, distinct: 1, refused: 1},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 2 { // the order of sending does not matter
				want := expect(test.sent)
				assert.Equal(t, len(test.sent), want.sent)
				assert.Len(t, want.valid, test.distinct)
				assert.Equal(t, test.conflicts, want.conflicts)
				assert.Equal(t, test.refused, want.refused)
				slices.Reverse(test.sent)
			}
		})
	}
}

func TestPlanKills(t *testing.T) {
	t.Parallel()
	for _, size := range []struct{ kills, events int }{{0, 1}, {1, 50}, {5, 250}, {10, 3000}, {60, 3000}} {
		for seed := range uint64(20) {
			kills := stage.Plan(points(), size.kills, size.events, seed)
			require.Len(t, kills, size.kills)
			assert.Equal(t, kills, stage.Plan(points(), size.kills, size.events, seed))
			total := 0
			for i, k := range kills {
				assert.Equal(t, points()[i%len(points())], k.Point)
				assert.Positive(t, k.After)
				total += k.After + window // a victim may have done as much without an ack
			}
			assert.Less(t, total, size.events, "%d kills, %d events: the last one may come too late", size.kills, size.events)
		}
	}
}

func TestParseOptions(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		args    string
		want    options
		wantErr string
	}{
		"none":         {want: options{events: 3000, seed: 1, kills: 10}},
		"all":          {args: "-n 400 -seed 9 -kills 2 -dir d -bare", want: options{events: 400, seed: 9, kills: 2, dir: "d", bare: true}},
		"few events":   {args: "-n 120", want: options{events: 120, seed: 1, kills: 2}},
		"very few":     {args: "-n 1", want: options{events: 1, seed: 1}},
		"no kills":     {args: "-kills 0", want: options{events: 3000, seed: 1}},
		"too many":     {args: "-n 100 -kills 3", wantErr: "choose at most 2 kills, or -n 150"},
		"no events":    {args: "-n 0", wantErr: "between 1 and"},
		"negative":     {args: "-kills -1", wantErr: "cannot be negative"},
		"no number":    {args: "-n many", wantErr: "-help lists the flags"},
		"unknown flag": {args: "-fast", wantErr: "-help lists the flags"},
		"argument":     {args: "fast", wantErr: `unexpected argument "fast"`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := parseOptions(strings.Fields(test.args))
			if test.wantErr != "" {
				require.ErrorContains(t, err, test.wantErr)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, test.want, got)
		})
	}
}

func TestRunExitCodes(t *testing.T) {
	t.Parallel()
	var out, errs strings.Builder
	assert.Equal(t, 0, run([]string{"-help"}, &out, &errs))
	assert.Contains(t, out.String(), "-kills")
	assert.Empty(t, errs.String())
	assert.Equal(t, exitUsage, run([]string{"-n", "0"}, &out, &errs))
	assert.Equal(t, 1, strings.Count(errs.String(), "\n"), "one line: %s", errs.String())
}
