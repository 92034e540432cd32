package contracttest_test

import (
	"testing"

	"github.com/penstock-mq/penstock/contracttest"
)

func TestStoreModernc(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, modernc())
}

func TestStoreUnguarded(t *testing.T) {
	t.Parallel()
	contracttest.RunStore(t, unguarded())
}

func TestStoreMattn(t *testing.T) {
	t.Parallel()
	stores := cgoStores()
	if len(stores) == 0 {
		t.Skip("github.com/mattn/go-sqlite3 needs cgo, which this build is without")
	}
	for _, s := range stores {
		t.Run(s.Name, func(t *testing.T) { contracttest.RunStore(t, s) })
	}
}

func TestStoreMemstore(t *testing.T) {
	for _, s := range append(memKinds(), memHarness()) {
		t.Run(s.Name, func(t *testing.T) { contracttest.RunStore(t, s) })
	}
}
