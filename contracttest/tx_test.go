package contracttest_test

import (
	"database/sql"
	"testing"

	"github.com/penstock-mq/penstock/contracttest"
)

// txStores are the store harnesses that a child process may be asked for.
func txStores() []contracttest.StoreHarness[*sql.Tx] {
	stores := append(cgoStores(), modernc(), unguarded(),
		postgresPgx(told(pgxName)), postgresLibPq(told(libPqName)), bouncedPgx(told(bouncedPgxName)), mysqlHarness("mariadb"), mysqlSavepoints())
	for _, f := range killFaults() {
		stores = append(stores, withFault(f.fault))
	}
	return stores
}

func modernc() contracttest.StoreHarness[*sql.Tx] {
	return sqliteHarness("modernc", "sqlite", moderncDSN)
}

// bubbled is the memory driver, in a bubble wherever no process is killed.
func bubbled() contracttest.Harness {
	return contracttest.Harness{Name: "memory", Bubble: true, Fresh: memoryHarness}
}

func TestTxMemoryModernc(t *testing.T) {
	t.Parallel()
	contracttest.RunTx(t, bubbled(), modernc())
}

// TestTxMemoryUnguarded is about handlers that end the transaction where nothing hinders them.
func TestTxMemoryUnguarded(t *testing.T) {
	t.Parallel()
	failing(t, contracttest.ExamineTx(t, bubbled(), unguarded(), "T04", "T12", "T16", "T25", "T30", "T30/kill"), "")
}
