package contracttest_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/backends"
)

// servers are the database servers of these tests.
var servers *backends.Set

// TestMain turns this binary into the consumer of a kill clause where one has started it.
func TestMain(m *testing.M) {
	contracttest.TxChild(txStores()...)
	var err error
	if servers, err = backends.Open(backends.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(servers.Around(m))
}
