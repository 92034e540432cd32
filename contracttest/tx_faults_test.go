package contracttest_test

import (
	"context"
	"database/sql"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/faulty"
	"github.com/penstock-mq/penstock/contracttest/memstore"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// memHarness is the store without a database: fast enough to run every clause under every fault.
func memHarness() contracttest.StoreHarness[*memstore.Tx] {
	var mu sync.Mutex
	databases := map[string]*memstore.Database{}
	open := func(dir string) (*memstore.Store, contracttest.Database[*memstore.Tx]) {
		mu.Lock()
		defer mu.Unlock()
		db, ok := databases[dir]
		if !ok {
			db = memstore.NewDatabase()
			databases[dir] = db
		}
		store := db.Store()
		return store, contracttest.Database[*memstore.Tx]{
			Store: store, Close: func() error { return nil },
			Effects: func(context.Context) (map[string]int64, error) { return db.Counters(), nil },
		}
	}
	return contracttest.StoreHarness[*memstore.Tx]{
		Name: "memstore",
		Open: func(_ context.Context, dir string) (contracttest.Database[*memstore.Tx], error) {
			_, db := open(dir)
			return db, nil
		},
		Apply: func(_ context.Context, tx *memstore.Tx, counter string, by int64) error { return tx.Add(counter, by) },
		End: func(_ context.Context, tx *memstore.Tx, how contracttest.Ending) error {
			if how == contracttest.EndRollback {
				return tx.Rollback()
			}
			return tx.Commit()
		},
		OpenFaulty: func(_ context.Context, dir string) (contracttest.Database[*memstore.Tx], contracttest.DatabaseFaults, error) {
			store, db := open(dir)
			return db, contracttest.DatabaseFaults{
				LoseCommit: func(forwarded, _ bool) func() int { return store.LoseCommit(forwarded) },
				Outages: map[string]func(context.Context) (func(), func() int, error){
					"stopped": func(context.Context) (func(), func() int, error) {
						end, fired := store.Away()
						return end, fired, nil
					},
					"full": func(context.Context) (func(), func() int, error) {
						end, fired := store.Full()
						return end, fired, nil
					},
				},
			}, nil
		},
	}
}

func TestTxMemoryMemstore(t *testing.T) {
	rep := contracttest.ExamineTx(t, bubbled(), memHarness(), inProcess()...)
	failing(t, rep, "")
}

// inProcess are the transaction clauses that start no process.
func inProcess() []string {
	return slices.DeleteFunc(contracttest.TxClauseIDs(), func(id string) bool { return slices.Contains(withProcesses(), id) })
}

func withProcesses() []string {
	return []string{"T01", "T02", "T03/kill", "T05/processes", "T30/kill", "T32/least", "T32/most"}
}

// caught is the golden matrix: which clauses fail under each planted fault.
func caught() map[string]string {
	return map[string]string{
		"mark-before-work":     "T04 T07 T08 T10 T21 T23 T23/inside T25 T28 T30 T31",
		"mark-after-work":      "T04 T05 T28 T30",
		"commit-on-rollback":   "T07 T08 T10 T21 T23 T23/inside T25 T31",
		"rollback-late":        "T21",
		"commit-forgotten":     "T03 T04 T05 T06 T07 T08 T09 T10 T20 T21 T23 T23/inside T25 T26 T27 T28 T30 T31",
		"commit-error-ignored": "T04 T26 T30",
		"unknown-is-committed": "T04",
		"held-as-fresh":        "T03 T05 T06 T10 T25 T27 T31",
		"torn-as-held":         "T30",
		"fingerprint-ignored":  "T06 T25",
		"keys-folded":          "T09",
		"scope-ignored":        "T09 T27",
		"divert-forgotten":     "T06 T09 T25 T30",
		"sent-mark-forgotten":  "T10 T27 T31",
		"outage-unseen":        "T26",
		"outputs-forgotten":    "T10 T31",
	}
}

// TestTxFaults plants each fault and wants exactly the named clauses to fail.
func TestTxFaults(t *testing.T) {
	golden := caught()
	for _, fault := range faulty.StoreFaults[*memstore.Tx]() {
		t.Run(fault.Name, func(t *testing.T) {
			want := golden[fault.Name]
			if want == "" {
				t.Errorf("no clause sees that %s", fault.Breaks)
			}
			s := memHarness()
			s.Wrap = fault.Wrap
			h := bubbled()
			h.Patience = 30 * time.Second
			failing(t, contracttest.ExamineTx(t, h, s, inProcess()...), want)
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
			return broker.Send(context.Background(), o.Topic, []sdk.Message{{ID: o.UUID, Metadata: o.Metadata, Payload: o.Payload}})
		})
	}
	failing(t, contracttest.ExamineTx(t, h, s, inProcess()...), "T10 T31")
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
		{"held-as-fresh", "T03/kill T05/processes T32/most"},
		{"torn-as-held", "T30/kill"},
		{"commit-forgotten", "T32/least"},
	}
}

// withFault plants a fault into modernc's harness, under a name by which a child process finds it.
func withFault(name string) contracttest.StoreHarness[*sql.Tx] {
	s := modernc()
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
