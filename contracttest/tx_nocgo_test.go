//go:build !cgo

package contracttest_test

import (
	"database/sql"
	"testing"

	"github.com/penstock-mq/penstock/contracttest"
)

// cgoStores are none in a build without cgo.
func cgoStores() []contracttest.StoreHarness[*sql.Tx] { return nil }

func TestTxMemoryMattn(t *testing.T) {
	t.Skip("github.com/mattn/go-sqlite3 needs cgo, which this build is without")
}
