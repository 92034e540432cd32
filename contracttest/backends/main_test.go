package backends_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

var servers *backends.Set

func TestMain(m *testing.M) {
	if dir := os.Getenv(folderVariable); dir != "" {
		fmt.Fprintln(os.Stderr, untilKilled(dir))
		os.Exit(1)
	}
	if dir := os.Getenv(engineVariable); dir != "" {
		if err := fakeEngine(dir, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	var err error
	if servers, err = backends.Open(backends.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(servers.Around(m))
}
