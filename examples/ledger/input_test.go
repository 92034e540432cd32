package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTransfers(t *testing.T) {
	t.Parallel()
	made, err := transfers(2000, 3, 1)
	require.NoError(t, err)
	again, err := transfers(2000, 3, 1)
	require.NoError(t, err)
	assert.Equal(t, made, again, "same seed")
	others, err := transfers(2000, 3, 2)
	require.NoError(t, err)
	assert.NotEqual(t, made, others)
	pairs := map[[2]int32]int{}
	for _, in := range made {
		parsed, err := parse(in.payload)
		require.NoError(t, err)
		assert.Equal(t, in.transfer, parsed)
		pairs[[2]int32{in.Debit, in.Credit}]++
	}
	assert.Len(t, pairs, 6, "every account with every other, and none with itself")
}

func TestParseRefusesWhatIsNoTransfer(t *testing.T) {
	t.Parallel()
	for _, payload := range []string{
		``, `{`, `{}`, `{"debit":1,"credit":1,"cents":1}`, `{"debit":1,"credit":2,"cents":0}`, `{"debit":1,"credit":2,"cents":-1}`,
		`{"debit":0,"credit":2,"cents":1}`, `{"debit":1,"credit":-2,"cents":1}`, `{"debit":1,"credit":3000000000,"cents":1}`,
	} {
		_, err := parse([]byte(payload))
		require.ErrorContains(t, err, "transfer", payload)
		assert.Empty(t, lockKeys(message.NewMessage("m", []byte(payload))))
	}
	assert.Equal(t, []string{"000020", "000003"}, lockKeys(message.NewMessage("m", []byte(`{"debit":20,"credit":3,"cents":1}`))))
}

func TestDisturb(t *testing.T) {
	t.Parallel()
	clean, err := transfers(3000, 10, 1)
	require.NoError(t, err)
	sent := disturb(clean, 5)
	assert.Equal(t, sent, disturb(clean, 5), "same seed")
	assert.NotEqual(t, sent, disturb(clean, 6), "other seed")
	copies := map[string]int{}
	beside := 0
	for i, in := range sent {
		copies[in.id]++
		if i > 0 && sent[i-1].id == in.id {
			beside++
		}
	}
	assert.Len(t, copies, 3000, "none is lost")
	assert.InDelta(t, 1000, len(sent)-3000, 100, "a third is there twice")
	assert.InDelta(t, 500, beside, 100, "half of the copies come at once")
}

func TestExpect(t *testing.T) {
	t.Parallel()
	want := expect([]input{
		{id: "a", transfer: transfer{Debit: 1, Credit: 2, Cents: 5}}, {id: "b", transfer: transfer{Debit: 2, Credit: 3, Cents: 7}},
	}, 3)
	assert.Equal(t, map[int32]int64{1: opening - 5, 2: opening - 2, 3: opening + 7}, want.balances)
	assert.Len(t, want.transfers, 2)
}

func TestParseOptions(t *testing.T) {
	t.Parallel()
	usual := options{transfers: 6000, accounts: 100, processes: 3, kills: 10, seed: 1}
	with := func(change func(*options)) options {
		o := usual
		change(&o)
		return o
	}
	tests := map[string]struct {
		args    string
		want    options
		wantErr string
	}{
		"none": {want: usual},
		"all": {
			args: "-n 900 -accounts 7 -processes 2 -kills 3 -seed 9 -single -bare",
			want: options{transfers: 900, accounts: 7, processes: 2, kills: 3, seed: 9, single: true, bare: true},
		},
		"few transfers":     {args: "-n 250", want: with(func(o *options) { o.transfers, o.kills = 250, 2 })},
		"very few":          {args: "-n 1", want: with(func(o *options) { o.transfers, o.kills = 1, 0 })},
		"no kills":          {args: "-kills 0", want: with(func(o *options) { o.kills = 0 })},
		"too many kills":    {args: "-n 100 -kills 3", wantErr: "choose at most 1 kills, or -n 300"},
		"no transfers":      {args: "-n 0", wantErr: "between 1 and"},
		"one account":       {args: "-accounts 1", wantErr: "between 2 and"},
		"no process":        {args: "-processes 0", wantErr: "between 1 and 16"},
		"negative kills":    {args: "-kills -1", wantErr: "cannot be negative"},
		"unknown flag":      {args: "-x", wantErr: "-help lists the flags"},
		"an argument":       {args: "x", wantErr: `unexpected argument "x"`},
		"not even a number": {args: "-n x", wantErr: "invalid value"},
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

func TestUsage(t *testing.T) {
	t.Parallel()
	var out, errs bytes.Buffer
	require.Zero(t, run([]string{"-help"}, &out, &errs))
	for _, flag := range []string{"-n transfers", "-accounts accounts", "-processes processes", "-kills times", "-seed number", "-single", "-bare", "PENSTOCK_POSTGRES_URL"} {
		assert.Contains(t, out.String(), flag)
	}
	assert.Empty(t, errs.String())
	require.Equal(t, exitUsage, run([]string{"-x"}, &out, &errs))
	assert.Equal(t, 1, strings.Count(errs.String(), "\n"), "one line")
}
