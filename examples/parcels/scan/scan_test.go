package scan_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/examples/parcels/scan"
)

func TestTrackingNumber(t *testing.T) {
	t.Parallel()
	tests := map[string]bool{
		"RR473124829DE":  true, // the standard's own example of digits
		"RR473124828DE":  false,
		"rr473124829DE":  false,
		"RR473124829D":   false,
		"RR473124829DE1": false,
		"RR4731248A9DE":  false,
		"R1473124829DE":  false,
		"":               false,
	}
	for number, valid := range tests {
		assert.Equal(t, valid, scan.ValidTracking(number), "tracking number %q", number)
	}
}

func TestParseSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		spoil func(e map[string]any)
		want  string
	}{
		"valid":         {func(map[string]any) {}, ""},
		"no id":         {func(e map[string]any) { delete(e, "id") }, "no id"},
		"check digit":   {func(e map[string]any) { e["parcel"] = "RR473124820DE" }, "check digit"},
		"status":        {func(e map[string]any) { e["status"] = "???" }, "unknown status"},
		"no depot":      {func(e map[string]any) { e["depot"] = "" }, "no depot"},
		"weight":        {func(e map[string]any) { e["weight_g"] = -1 }, "weight"},
		"heavy":         {func(e map[string]any) { e["weight_g"] = 31_501 }, "weight"},
		"no time":       {func(e map[string]any) { delete(e, "at") }, "no time"},
		"type":          {func(e map[string]any) { e["weight_g"] = "12" }, "cannot unmarshal"},
		"unreadable at": {func(e map[string]any) { e["at"] = "yesterday" }, "parsing time"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			event := map[string]any{
				"id": "BER2-01-000001", "parcel": "RR473124829DE", "status": "sorted", "depot": "BER2",
				"weight_g": 120, "at": "2026-03-02T05:30:00Z",
			}
			test.spoil(event)
			line, err := json.Marshal(event)
			require.NoError(t, err)
			_, err = scan.Parse(line)
			if test.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, test.want)
		})
	}
}

func TestParseRefusesWhatIsNotJSON(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"", "null garbage", "{", "[]", "\x00"} {
		_, err := scan.Parse([]byte(line))
		require.Error(t, err, "line %q", line)
	}
}

func TestGenerateIsDeterministic(t *testing.T) {
	t.Parallel()
	generate := func(n int, seed uint64) string {
		var out bytes.Buffer
		require.NoError(t, scan.Generate(&out, n, seed))
		return out.String()
	}
	for _, n := range []int{1, 2, 179, 1000} {
		first := generate(n, 7)
		assert.Equal(t, n, strings.Count(first, "\n"), "lines")
		assert.Equal(t, first, generate(n, 7), "same seed")
		assert.NotEqual(t, first, generate(n, 8), "other seed")
	}
}

// The demo proves nothing unless its input holds every kind of trouble.
func TestGenerateMakesEveryKindOfTrouble(t *testing.T) {
	t.Parallel()
	events := scan.Events(3000, 1)
	payloads := map[string]map[string]bool{} // id -> parcel and status of its valid copies
	invalid := map[string]bool{}
	statuses := map[string]bool{}
	for _, e := range events {
		if e.Validate() != nil {
			invalid[e.ID] = true
			continue
		}
		statuses[e.Status] = true
		if payloads[e.ID] == nil {
			payloads[e.ID] = map[string]bool{}
		}
		payloads[e.ID][fmt.Sprint(e.Parcel, e.Status, e.At)] = true
	}
	conflicts, corrected := 0, 0
	for id, copies := range payloads {
		conflicts += len(copies) - 1
		if invalid[id] {
			corrected++
		}
	}
	assert.Equal(t, 16, conflicts, "ids used again with another payload")
	assert.Len(t, invalid, 11, "ids with an invalid copy")
	assert.Equal(t, 6, corrected, "invalid ones that come again, corrected")
	assert.Len(t, statuses, len(scan.Statuses()), "statuses")
}

func TestGenerateReportsAFailingWriter(t *testing.T) {
	t.Parallel()
	full := errors.New("disk full")
	require.ErrorIs(t, scan.Generate(writerFunc(func([]byte) (int, error) { return 0, full }), 5, 1), full)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
