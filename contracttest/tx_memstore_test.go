package contracttest_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/memstore"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// memStoreHarness is a store harness over memstore.
type memStoreHarness = contracttest.StoreHarness[*memstore.Tx]

// memHarness is the store without a database, as a server with many writers: fast enough to run every clause under every
// fault.
func memHarness() memStoreHarness { return memHarnessOf("memstore", memstore.Options{}) }

// memKinds are the other kinds of databases that memstore can be.
func memKinds() []memStoreHarness {
	return []memStoreHarness{
		memHarnessOf("one writer", memstore.Options{Serial: true}),
		memHarnessOf("without parts", memstore.Options{WithoutParts: true}),
		memHarnessOf("one writer without parts", memstore.Options{Serial: true, WithoutParts: true}),
	}
}

// memDatabases are databases by the folder that they would be in.
type memDatabases struct {
	opts memstore.Options
	mu   sync.Mutex
	by   map[string]*memstore.Database
}

func (d *memDatabases) of(dir string) *memstore.Database {
	d.mu.Lock()
	defer d.mu.Unlock()
	db, ok := d.by[dir]
	if !ok {
		db = memstore.NewDatabaseWith(d.opts)
		d.by[dir] = db
		if !d.opts.Serial {
			lock(db)
		}
	}
	return db
}

// locked is a counter that another transaction has written and never lets go.
const locked = "locked"

func lock(db *memstore.Database) {
	tx, err := db.Store().Begin(context.Background(), receipts.TxOptions{})
	if err == nil {
		err = tx.Raw().Add(locked, 1)
	}
	if err != nil {
		panic(err) // an empty database without faults
	}
}

func (d *memDatabases) open(dir string) (*memstore.Store, contracttest.Database[*memstore.Tx]) {
	db := d.of(dir)
	store := db.Store()
	return store, contracttest.Database[*memstore.Tx]{
		Store: store, Close: func() error { return nil },
		Effects: func(context.Context) (map[string]int64, error) { return db.Counters(), nil },
	}
}

func memHarnessOf(name string, opts memstore.Options) memStoreHarness {
	opts.LockWait = 100 * time.Millisecond
	dbs := &memDatabases{opts: opts, by: map[string]*memstore.Database{}}
	return memStoreHarness{
		Name: name, Bubble: true,
		Open: func(_ context.Context, dir string) (contracttest.Database[*memstore.Tx], error) {
			_, db := dbs.open(dir)
			return db, nil
		},
		Apply: func(_ context.Context, tx *memstore.Tx, counter string, by int64) error { return tx.Add(counter, by) },
		Read:  func(_ context.Context, tx *memstore.Tx, counter string) (int64, error) { return tx.Get(counter) },
		End: func(_ context.Context, tx *memstore.Tx, how contracttest.Ending) error {
			if how == contracttest.EndRollback {
				return tx.Rollback()
			}
			return tx.Commit()
		},
		Violate: func(context.Context, *memstore.Tx) error { return errors.New("a constraint is violated") },
		Newer:   func(context.Context, string) error { return nil }, // it has no tables
		Limited: func(_ context.Context, dir string) (contracttest.Database[*memstore.Tx], error) {
			_, db := dbs.open(dir)
			return db, nil
		},
		Kill: func(_ context.Context, tx *memstore.Tx) error {
			tx.Kill()
			return nil
		},
		Errors: memErrors(opts),
		OpenFaulty: func(_ context.Context, dir string) (contracttest.Database[*memstore.Tx], contracttest.DatabaseFaults, error) {
			store, db := dbs.open(dir)
			return db, memFaults(store), nil
		},
	}
}

// memErrors are a rollback, as a deadlock's victim meets it on MySQL, and a failure after which only a rollback is left, as
// on PostgreSQL.
func memErrors(opts memstore.Options) map[string]func(ctx context.Context, tx *memstore.Tx) error {
	ways := map[string]func(ctx context.Context, tx *memstore.Tx) error{
		"rolled back": func(_ context.Context, tx *memstore.Tx) error {
			return errors.Join(errors.New("the transaction was rolled back"), tx.Rollback())
		},
	}
	if !opts.Serial {
		ways["failed"] = func(_ context.Context, tx *memstore.Tx) error { return tx.Add(locked, 1) }
	}
	return ways
}

func memFaults(store *memstore.Store) contracttest.DatabaseFaults {
	return contracttest.DatabaseFaults{
		LoseCommit: func(forwarded, _ bool) func() int { return store.LoseCommit(forwarded) },
		Outages: map[string]outage{
			"stopped": func(context.Context) (func(), func() int, error) {
				end, fired := store.Away()
				return end, fired, nil
			},
			"full": func(context.Context) (func(), func() int, error) {
				end, fired := store.Full()
				return end, fired, nil
			},
		},
	}
}

func TestTxMemoryMemstore(t *testing.T) {
	for _, s := range append(memKinds(), memHarness()) {
		t.Run(s.Name, func(t *testing.T) {
			rep := contracttest.ExamineTx(t, bubbled(), s, inProcess()...)
			failing(t, rep, "")
			var want []string
			if info, err := store(t, s).Check(t.Context()); err != nil || info.Lanes == 1 {
				want = []string{"T29"}
			}
			wantNotRun(t, rep, want...)
		})
	}
}

func store(t *testing.T, s memStoreHarness) receipts.Store[*memstore.Tx] {
	t.Helper()
	db, err := s.Open(t.Context(), t.TempDir())
	must(t, err)
	return db.Store
}
