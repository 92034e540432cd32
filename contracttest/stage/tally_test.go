package stage

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/sdk"
)

func TestTally(t *testing.T) {
	t.Parallel()
	counts := NewTally()
	_, _, changed := counts.Counts()
	source := talliedSource{Source: fakeSource{}, tally: counts}
	deliveries, err := source.Receive(t.Context(), 10)
	require.NoError(t, err)
	require.Len(t, deliveries, 2)
	require.Error(t, source.Settle(t.Context(), []sdk.Settlement{
		{Token: "stale", Verdict: sdk.Ack}, {Token: "a", Verdict: sdk.Ack}, {Token: "b", Verdict: sdk.Requeue, Delay: time.Second},
	}))
	select {
	case <-changed:
	default:
		t.Error("the change was not told")
	}
	delivered, acks, _ := counts.Counts()
	assert.Equal(t, []int{2, 1}, []int{delivered, acks}, "a failed ack and a requeue are no acks")
}

// fakeSource hands out two deliveries, and fails the first entry of each batch.
type fakeSource struct{ sdk.Source }

func (fakeSource) Receive(context.Context, int) ([]sdk.Delivery, error) {
	return make([]sdk.Delivery, 2), nil
}

func (fakeSource) Settle(context.Context, []sdk.Settlement) error {
	return &sdk.BatchError{Entries: map[int]error{0: errors.New("stale")}}
}

func TestDisplayPrintsPlainLinesWithoutATerminal(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	d := NewDisplay(&out, 50)
	for acks := range 51 {
		d.Progress(acks)
		d.Progress(acks) // no line twice
		if acks == 12 {
			d.Killed(acks, AtRandom)
		}
	}
	d.End()
	assert.Equal(t, 11, bytes.Count(out.Bytes(), []byte("\n")), out.String())
	assert.Contains(t, out.String(), "kill 1  at random, 12 acknowledged\n")
	assert.Contains(t, out.String(), "100 %  50 of 50 acknowledged\n")
}
