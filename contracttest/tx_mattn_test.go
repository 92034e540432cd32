//go:build cgo

package contracttest_test

import (
	"database/sql"
	"testing"

	_ "github.com/mattn/go-sqlite3"

	"github.com/penstock-mq/penstock/contracttest"
)

// cgoStores are the store harnesses that need a C compiler.
func cgoStores() []contracttest.StoreHarness[*sql.Tx] {
	return []contracttest.StoreHarness[*sql.Tx]{sqliteHarness("mattn", "sqlite3", mattnDSN)}
}

// TestTxMemoryMattn leaves out what does not depend on the SQLite driver: how messages take their way through a router,
// and what needs many processes.
func TestTxMemoryMattn(t *testing.T) {
	t.Parallel()
	for _, s := range cgoStores() {
		rep := contracttest.ExamineTx(t, bubbled(), s,
			"T01", "T01/batch", "T02", "T02/batch", "T03", "T04", "T05", "T06", "T07", "T09", "T10", "T12", "T12/permanent", "T13", "T14",
			"T15", "T15/held", "T15/read", "T16", "T21", "T25", "T26", "T30", "T30/kill")
		failing(t, rep, "")
	}
}
