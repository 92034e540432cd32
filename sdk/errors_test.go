package sdk

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

func TestOutcomeOf(t *testing.T) {
	rejected := &OutcomeError{Kind: OutcomeRejected, Err: errCut}
	for name, c := range map[string]struct {
		err  error
		want Outcome
	}{
		"plain":         {errCut, OutcomeUnknown},
		"rejected":      {rejected, OutcomeRejected},
		"wrapped":       {fmt.Errorf("send: %w", rejected), OutcomeRejected},
		"no kind":       {&OutcomeError{Err: errCut}, OutcomeUnknown},
		"permanent":     {&OutcomeError{Kind: OutcomePermanent, Err: errCut}, OutcomePermanent},
		"explicit":      {&OutcomeError{Kind: OutcomeUnknown, Err: errCut}, OutcomeUnknown},
		"stale is none": {ErrStaleToken, OutcomeUnknown},
	} {
		if got := OutcomeOf(c.err); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	if !errors.Is(rejected, errCut) {
		t.Error("the driver's error is lost")
	}
}

func TestBatchErrors(t *testing.T) {
	be := &BatchError{Entries: map[int]error{7: ErrStaleToken, 2: errCut, 99: ErrTooLarge, -1: ErrUnroutable}}
	if got := be.Indexes(); !slices.Equal(got, []int{-1, 2, 7, 99}) {
		t.Errorf("indexes %v", got)
	}
	if !errors.Is(be, ErrStaleToken) || !errors.Is(be, errCut) || errors.Is(be, ErrClosed) {
		t.Error("errors.Is does not see the entries")
	}
	errs := EntryErrors(fmt.Errorf("settle: %w", be), 8) // what is out of range is ignored
	for i, err := range errs {
		if want := map[int]error{7: ErrStaleToken, 2: errCut}[i]; !errors.Is(err, want) {
			t.Errorf("entry %d: %v", i, err)
		}
	}
	for _, err := range EntryErrors(errCut, 3) {
		if !errors.Is(err, errCut) {
			t.Errorf("an error for the whole batch gives %v", err)
		}
	}
	if errs := EntryErrors(nil, 2); errs[0] != nil || errs[1] != nil {
		t.Error("nil gives errors")
	}
	if (&BatchError{}).Error() == "" || be.Error() == "" {
		t.Error("no text")
	}
}

func TestBackoffStaysInItsBounds(t *testing.T) {
	for name, c := range map[string]struct {
		b       Backoff
		attempt int
		lo, hi  time.Duration
	}{
		"default, first": {Backoff{}, 1, DefaultBackoffMin, 2 * DefaultBackoffMin},
		"default, late":  {Backoff{}, 1000, DefaultBackoffMin, DefaultBackoffMax},
		"zero attempt":   {Backoff{}, 0, DefaultBackoffMin, DefaultBackoffMin},
		"negative":       {Backoff{}, -5, DefaultBackoffMin, DefaultBackoffMin},
		"fixed":          {Backoff{Min: time.Second, Max: time.Second}, 5, time.Second, time.Second},
		"maximum below":  {Backoff{Min: time.Hour}, 5, time.Hour, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			seen := map[time.Duration]bool{}
			for range 1000 {
				d := c.b.Delay(c.attempt)
				seen[d] = true
				if d < c.lo || d > c.hi {
					t.Fatalf("%v is not within %v and %v", d, c.lo, c.hi)
				}
			}
			if c.lo < c.hi && len(seen) < 100 {
				t.Errorf("only %d different delays: no jitter", len(seen))
			}
		})
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		Ack.String(): "ack", Requeue.String(): "requeue", Reject.String(): "reject", Verdict(0).String(): "invalid",
		SettleOutcomeConfirmed.String(): "confirmed", SettleOutcomeSent.String(): "sent",
		SettleOutcomeFailed.String(): "failed", SettleOutcomeUnknown.String(): "unknown",
		EventPublishRetried.String(): "publish retried", EventSettled.String(): "settled",
		EventDrainTimeout.String(): "drain timeout", EventPoison.String(): "poison",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if EventKind(0).String() != "invalid" || EventKind(200).String() != "invalid" || SettleOutcome(9).String() != "invalid" {
		t.Error("a value that is none has a name")
	}
}
