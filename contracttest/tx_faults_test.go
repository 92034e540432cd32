package contracttest_test

import (
	"context"
	"database/sql"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/faulty"
	"github.com/penstock-mq/penstock/contracttest/memstore"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// inProcess are the transaction clauses that start no process.
func inProcess() []string {
	return slices.DeleteFunc(contracttest.TxClauseIDs(), func(id string) bool { return slices.Contains(withProcesses(), id) })
}

func withProcesses() []string {
	return []string{"T01", "T01/batch", "T02", "T02/batch", "T03/kill", "T05/processes", "T30/kill", "T32/least", "T32/most"}
}

// caught is the golden matrix: which clauses fail under each planted fault. A question mark: it depends on who is faster.
func caught() map[string]string {
	return map[string]string{
		"mark-before-work":         "T04 T07 T08 T10 T12 T12/batch T12/permanent T12/slow T13 T13/batch T14 T15 T15/held T16 T21 T23 T23/inside T24 T24/batch T24/full T24/shutdown T25 T28 T30 T31",
		"mark-after-work":          "T04 T05 T12 T12/permanent T12/slow T14 T15 T24? T24/batch T28 T30",
		"commit-on-rollback":       "T07 T08 T10 T12 T12/batch T13 T13/batch T14 T15 T21 T23 T23/inside T24 T24/batch T24/full T24/shutdown T25 T31",
		"rollback-late":            "T21",
		"commit-forgotten":         "T03 T04 T05 T06 T07 T08 T09 T10 T12 T12/batch T12/permanent T12/slow T13 T13/batch T14 T15 T15/held T15/read T16 T20 T21 T23 T23/inside T24 T24/batch T24/full T24/shutdown T25 T26 T27 T28 T29 T30 T31 T33",
		"commit-error-ignored":     "T04 T15 T16 T26 T30",
		"unknown-is-committed":     "T04",
		"held-as-fresh":            "T03 T05 T06 T10 T14 T25 T27 T29 T31 T33",
		"torn-as-held":             "T30",
		"fingerprint-ignored":      "T06 T14 T25",
		"keys-folded":              "T09",
		"scope-ignored":            "T09 T12 T12/permanent T12/slow T15 T24? T24/batch T27",
		"divert-forgotten":         "T06 T09 T12/permanent T14 T25 T30",
		"sent-mark-forgotten":      "T10 T12 T15 T27 T31",
		"outage-unseen":            "T15 T15/held T26",
		"outputs-forgotten":        "T10 T12 T15 T31",
		"undo-keeps":               "T12 T12/permanent T15 T24? T24/batch",
		"undo-takes-neighbours":    "T12 T12/permanent T24? T24/batch",
		"keep-commits":             "T12 T12/permanent T12/slow T15 T16 T24? T24/batch T30",
		"unclaim-forgotten":        "T12 T12/permanent T12/slow T15 T24? T24/batch",
		"unclaim-takes-neighbours": "T12 T12/permanent T12/slow T15 T24? T24/batch",
		"many-held-as-fresh":       "T14",
		"answers-out-of-order":     "T14",
		"claim-wait-ignored":       "T29",
		"contention-unseen":        "T15 T15/held",
	}
}

// TestTxFaults plants each fault and wants exactly the named clauses to fail.
func TestTxFaults(t *testing.T) {
	golden := caught()
	for _, fault := range faulty.StoreFaults[*memstore.Tx]() {
		t.Run(fault.Name, func(t *testing.T) {
			t.Parallel() // what runs in no bubble waits more than it works
			want := golden[fault.Name]
			if want == "" {
				t.Errorf("no clause sees that %s", fault.Breaks)
			}
			s := memHarness()
			s.Wrap = fault.Wrap
			h := bubbled()
			h.Patience = 10 * time.Second // of real time where a clause runs in no bubble
			rep := contracttest.ExamineTx(t, h, s, inProcess()...)
			failing(t, rep, certain(want, rep))
		})
	}
}

// TestTxOutputsBeforeCommit plants the one fault of a store that needs a publisher.
func TestTxOutputsBeforeCommit(t *testing.T) {
	var broker sdk.Driver
	h := bubbled()
	h.Patience = 10 * time.Second
	h.Fresh = func() contracttest.Harness {
		fresh := memoryHarness()
		broker, _ = fresh.Open(t.Context()) // it has no error to give: see memoryHarness
		return fresh
	}
	s := memHarness()
	s.Wrap = func(inner receipts.Store[*memstore.Tx]) receipts.Store[*memstore.Tx] {
		return faulty.OutputsBeforeCommit(inner, func(o receipts.Output) error {
			msg := sdk.Message{ID: o.UUID, Metadata: o.Metadata, Payload: o.Payload}
			_ = broker.Send(context.Background(), o.Topic, []sdk.Message{msg}) // not every clause's outputs have a topic there
			return nil
		})
	}
	failing(t, contracttest.ExamineTx(t, h, s, inProcess()...), "T10 T31")
}

// backwards is a driver that hands out every batch from its end.
type backwards struct{ sdk.Driver }

// Open opens a source that does.
func (d backwards) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	src, err := d.Driver.Open(ctx, b)
	if err != nil {
		return nil, err
	}
	lease, _ := src.(sdk.LeaseExtender)
	return struct {
		sdk.Source
		sdk.LeaseExtender
	}{backwardsSource{src}, lease}, nil
}

type backwardsSource struct{ sdk.Source }

// Receive reverses.
func (s backwardsSource) Receive(ctx context.Context, limit int) ([]sdk.Delivery, error) {
	got, err := s.Source.Receive(ctx, limit)
	slices.Reverse(got)
	return got, err
}

// TestTxOrderLost plants the one fault that no store can have: a driver that loses the order which it declares.
func TestTxOrderLost(t *testing.T) {
	h := bubbled()
	h.Patience = 10 * time.Second
	h.Fresh = func() contracttest.Harness {
		fresh := memoryHarness()
		open := fresh.Open
		fresh.Open = func(ctx context.Context) (sdk.Driver, error) {
			d, err := open(ctx)
			return backwards{d}, err
		}
		return fresh
	}
	failing(t, contracttest.ExamineTx(t, h, memHarness(), inProcess()...), "T24 T24/batch T24/full T24/shutdown")
}

// TestTxKillFaults plants faults under consumers that are processes of their own, on a database that outlives them.
func TestTxKillFaults(t *testing.T) {
	for _, f := range killFaults() {
		t.Run(f.fault, func(t *testing.T) {
			t.Parallel() // they wait for processes more than they work
			rep := contracttest.ExamineTx(t, bubbled(), withFault(f.fault), strings.Fields(f.caughtBy)...)
			failing(t, rep, f.caughtBy)
			if strings.Contains(rep.String(), "did not reach its point") {
				t.Error("a clause failed because its child was not killed, not because of the fault")
			}
		})
	}
}

// killFault is a fault and the clauses with processes that have to see it.
type killFault struct{ fault, caughtBy string }

func killFaults() []killFault {
	return []killFault{
		{"mark-before-work", "T01"},
		{"mark-after-work", "T02"},
		{"keep-commits", "T01/batch"},
		{"held-as-fresh", "T03/kill T05/processes T32/most"},
		{"torn-as-held", "T30/kill"},
		{"commit-forgotten", "T02/batch T32/least"},
	}
}

// withFault plants a fault into modernc's harness, under a name by which a child process finds it. Nothing keeps its
// handlers from ending the transaction: else no receipt would be torn, and no fault about that could show.
func withFault(name string) contracttest.StoreHarness[*sql.Tx] {
	s := unguarded()
	for _, f := range faulty.StoreFaults[*sql.Tx]() {
		if f.Name == name {
			s.Name += " with " + name
			s.Wrap = f.Wrap
		}
	}
	return s
}

// failing compares the clauses that failed.
func failing(t *testing.T, rep contracttest.Report, want string) {
	t.Helper()
	t.Log("\n" + rep.String())
	if got := strings.Join(rep.IDs(contracttest.Failed), " "); got != want {
		t.Errorf("failed: %q, want %q", got, want)
	}
}
