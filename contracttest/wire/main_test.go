package wire_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

var servers *backends.Set

func TestMain(m *testing.M) {
	var err error
	if servers, err = backends.Open(backends.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(servers.Around(m))
}
