package contracttest_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/faulty"
	"github.com/penstock-mq/penstock/contracttest/memstore"
)

// TestEveryTxClauseCatches wants each transaction clause to fail under at least one planted fault.
func TestEveryTxClauseCatches(t *testing.T) {
	var seen []string
	for _, ids := range caught() {
		seen = append(seen, strings.Fields(ids)...)
	}
	for _, f := range killFaults() {
		seen = append(seen, strings.Fields(f.caughtBy)...)
	}
	for _, id := range contracttest.TxClauseIDs() {
		if !slices.Contains(seen, id) {
			t.Errorf("no fault makes %s fail", id)
		}
	}
}

// TestTxNotRun wants a clause whose hook is missing to be left out by name, and no other.
func TestTxNotRun(t *testing.T) {
	s := memHarness()
	s.End, s.OpenFaulty = nil, nil
	rep := contracttest.ExamineTx(t, bubbled(), s, inProcess()...)
	failing(t, rep, "")
	wantNotRun(t, rep, "T04", "T26", "T30")
	for id, hook := range map[string]string{"T04": "OpenFaulty", "T26": "OpenFaulty", "T30": "End"} {
		if res, _ := rep.Result(id); !strings.Contains(res.Reason, hook) {
			t.Errorf("%s was not run, and the reason %q does not name the hook %s", id, res.Reason, hook)
		}
	}
}

// TestTxWaivers plants a fault that fails T09 alone, and waives.
func TestTxWaivers(t *testing.T) {
	tests := []struct {
		name  string
		fault bool
		waive string
		want  contracttest.Status
	}{
		{"a known breach", true, "T09", contracttest.Waived},
		{"a breach that is none", false, "T09", contracttest.Failed},
		{"a clause that does not exist", false, "T99", contracttest.Failed},
		{"another clause", true, "T10", contracttest.Failed},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := memHarness()
			s.Waive = map[string]string{test.waive: "it is known"}
			if test.fault {
				s.Wrap = faulty.KeysFolded[*memstore.Tx]
			}
			rep := contracttest.ExamineTx(t, bubbled(), s, "T09")
			if res, _ := rep.Result("T09"); res.Status != test.want {
				t.Errorf("T09: %s (%s), want %s", res.Status, res.Reason, test.want)
			}
		})
	}
}

// TestTxUseless wants every clause to fail over a store harness that cannot work, and after the end of the context.
func TestTxUseless(t *testing.T) {
	all := len(contracttest.TxClauseIDs())
	rep := contracttest.CheckTx(t.Context(), memoryHarness(), contracttest.StoreHarness[*memstore.Tx]{Name: "nothing"})
	if got := len(rep.IDs(contracttest.Failed)); got != all {
		t.Errorf("without Open %d of %d clauses failed", got, all)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	rep = contracttest.CheckTx(ctx, memoryHarness(), memHarness())
	if got := len(rep.IDs(contracttest.Failed)); got != all {
		t.Errorf("after the context's end %d of %d clauses failed", got, all)
	}
}
