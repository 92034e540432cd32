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
)

// storeCaught is the golden matrix of the clauses for stores, over memstore. A question mark: it depends on who is faster.
func storeCaught() map[string]string {
	return map[string]string{
		"mark-before-work":         "S01 S02 S03 S04 S05 S06 S07 S08 S12 S13 S14 S15 S16 S17 S18 S19 S20 S21 S25 S26 S27 S30",
		"mark-after-work":          "S01 S02 S03 S04 S05 S06 S07 S08 S09? S13 S15 S16 S17 S18 S20 S25 S26 S32?",
		"commit-on-rollback":       "S03 S04 S07 S08 S12 S14 S15 S16 S17 S19 S20 S21 S26 S27 S30",
		"rollback-late":            "S03",
		"commit-forgotten":         "S01 S02 S03 S04 S05 S06 S07 S08 S09 S10 S11 S13 S14 S15 S16 S17 S18 S19 S20 S21 S22 S23 S24 S25 S26 S27 S29 S32",
		"commit-error-ignored":     "S03 S14 S16 S17 S18 S19 S21 S25 S26 S29",
		"unknown-is-committed":     "S18",
		"held-as-fresh":            "S01 S02 S03 S04 S05 S06 S07 S08 S09 S11 S13 S15 S17 S18 S20 S32",
		"torn-as-held":             "S16 S25",
		"fingerprint-ignored":      "S02",
		"keys-folded":              "S11 S22",
		"scope-ignored":            "S11 S12 S13 S15 S16 S25",
		"divert-forgotten":         "S04 S13 S15 S24 S25 S27",
		"sent-mark-forgotten":      "S23 S27",
		"outage-unseen":            "S04 S08 S19 S29",
		"outputs-forgotten":        "S04 S13 S22 S23 S25 S27",
		"undo-keeps":               "S13",
		"undo-takes-neighbours":    "S13 S14",
		"keep-commits":             "S13 S16 S17",
		"unclaim-forgotten":        "S13 S14 S15 S27",
		"unclaim-takes-neighbours": "S13 S15",
		"many-held-as-fresh":       "S02 S04 S05 S09 S11 S13 S15 S17 S32",
		"answers-out-of-order":     "S02 S04 S05 S11 S13 S15 S17 S32?",
		"claim-wait-ignored":       "S04 S08",
		"contention-unseen":        "S04 S08",
		"migrate-afresh":           "S01 S11 S13 S15 S16 S25",
		"claims-one-by-one":        "S09 S12",
		"lanes-overstated":         "S10 S24",
		"refusals-forgotten":       "S12 S21",
		"parts-unordered":          "S14",
		"resolve-hopes":            "S15 S16 S17 S18 S19 S20",
		"rollback-forgotten":       "S03 S07 S14 S17 S19 S20 S21 S27",
		"kill-unseen":              "S19 S29",
		"outputs-reversed":         "S22 S23",
		"sent-mark-spreads":        "S23",
		"letters-repeated":         "S24",
		"torn-counted-as-done":     "S25",
		"budget-ignored":           "S26",
		"begin-context-rules":      "S27",
		"begin-waits":              "S27",
		"everything-is-contention": "S12 S19 S29 S30",
	}
}

// storeCaughtOnSQLite are the faults that memstore cannot have: it has no tables, and parks nothing.
func storeCaughtOnSQLite() map[string]string {
	return map[string]string{
		"migrate-forgotten":       "S01/empty",
		"park-forgotten":          "S31 S31/crowd",
		"park-reversed":           "S31",
		"park-repeats":            "S31 S31/crowd",
		"unpark-takes-neighbours": "S31",
	}
}

// TestStoreFaults plants each fault and wants exactly the named clauses to fail.
func TestStoreFaults(t *testing.T) {
	golden := storeCaught()
	for _, fault := range slices.Concat(faulty.StoreFaults[*memstore.Tx](), faulty.StoreCallFaults[*memstore.Tx]()) {
		if storeCaughtOnSQLite()[fault.Name] != "" {
			continue
		}
		t.Run(fault.Name, func(t *testing.T) {
			t.Parallel()
			want := golden[fault.Name]
			if want == "" {
				t.Errorf("no clause sees that %s", fault.Breaks)
			}
			s := memHarness()
			s.Wrap = fault.Wrap
			rep := contracttest.ExamineStore(t, s)
			failing(t, rep, certain(want, rep))
		})
	}
}

// certain takes the doubt out of an entry of the matrix, by what has happened.
func certain(want string, rep contracttest.Report) string {
	var ids []string
	for _, id := range strings.Fields(want) {
		id, doubtful := strings.CutSuffix(id, "?")
		if !doubtful || slices.Contains(rep.IDs(contracttest.Failed), id) {
			ids = append(ids, id)
		}
	}
	return strings.Join(ids, " ")
}

// TestStoreFaultWithOneWriter plants the fault for which somebody has to wait in Begin.
func TestStoreFaultWithOneWriter(t *testing.T) {
	s := memHarnessOf("one writer", memstore.Options{Serial: true})
	s.Wrap = faulty.BeginWaits[*memstore.Tx]
	failing(t, contracttest.ExamineStore(t, s), beginWaitsWithOneWriter)
}

// beginWaitsWithOneWriter are the clauses that see it.
const beginWaitsWithOneWriter = "S27 S28"

// TestStoreFaultsOnSQLite plants what only a database with tables can have.
func TestStoreFaultsOnSQLite(t *testing.T) {
	golden := storeCaughtOnSQLite()
	for _, fault := range slices.Concat(faulty.StoreCallFaults[*sql.Tx](), faulty.ParkerFaults[*sql.Tx]()) {
		want := golden[fault.Name]
		if want == "" {
			continue
		}
		t.Run(fault.Name, func(t *testing.T) {
			t.Parallel()
			s := modernc()
			s.Wrap, s.Patience = fault.Wrap, 3*time.Second
			failing(t, contracttest.ExamineStore(t, s, "S01", "S01/empty", "S02", "S31", "S31/crowd"), want)
		})
	}
}

// TestEveryStoreClauseCatches wants each clause for stores to fail under at least one planted fault.
func TestEveryStoreClauseCatches(t *testing.T) {
	seen := strings.Fields(beginWaitsWithOneWriter)
	for _, golden := range []map[string]string{storeCaught(), storeCaughtOnSQLite()} {
		for _, ids := range golden {
			seen = append(seen, strings.Fields(ids)...)
		}
	}
	for _, id := range contracttest.StoreClauseIDs() {
		if !slices.Contains(seen, id) {
			t.Errorf("no fault makes %s fail", id)
		}
	}
}

// TestStoreNotRun wants a clause whose hook or capability is missing to be left out by name, and no other.
func TestStoreNotRun(t *testing.T) {
	s := memHarnessOf("one writer without parts", memstore.Options{Serial: true, WithoutParts: true})
	s.End, s.OpenFaulty, s.Errors, s.Violate, s.Kill = nil, nil, nil, nil, nil
	rep := contracttest.ExamineStore(t, s)
	failing(t, rep, "")
	lacking := map[string]string{
		"S01/empty": "Empty", "S08": "lanes", "S09": "lanes", "S10": "lanes", "S13": "parts", "S14": "parts", "S16": "End", "S17": "Errors",
		"S18": "OpenFaulty", "S19": "Kill", "S29": "OpenFaulty", "S30": "Violate", "S31": "parker", "S31/crowd": "parker",
	}
	for _, res := range rep.Results {
		why, lacks := lacking[res.ID]
		if lacks != (res.Status == contracttest.NotRun) || !strings.Contains(res.Reason, why) {
			t.Errorf("%s: %s (%s), want it to lack %q", res.ID, res.Status, res.Reason, why)
		}
	}
}

// TestStoreWaivers plants a fault that fails S11 alone among the clauses run, and waives.
func TestStoreWaivers(t *testing.T) {
	for waive, want := range map[string]contracttest.Status{
		"S11": contracttest.Waived, "S12": contracttest.Failed, "S99": contracttest.Failed, "T09": contracttest.Failed,
	} {
		s := memHarness()
		s.Waive, s.Wrap = map[string]string{waive: "it is known"}, faulty.KeysFolded[*memstore.Tx]
		if res, _ := contracttest.ExamineStore(t, s, "S11").Result("S11"); res.Status != want {
			t.Errorf("waiving %s: %s (%s), want %s", waive, res.Status, res.Reason, want)
		}
	}
}

// TestStoreUseless wants every clause to fail over a harness that cannot work, and after the end of the context.
func TestStoreUseless(t *testing.T) {
	all := len(contracttest.StoreClauseIDs())
	rep := contracttest.CheckStore(t.Context(), contracttest.StoreHarness[*memstore.Tx]{Name: "nothing"})
	if got := len(rep.IDs(contracttest.Failed)); got != all {
		t.Errorf("without Open %d of %d clauses failed", got, all)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	rep = contracttest.CheckStore(ctx, memHarness())
	if got := len(rep.IDs(contracttest.Failed)); got != all {
		t.Errorf("after the context's end %d of %d clauses failed", got, all)
	}
}
