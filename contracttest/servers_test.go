package contracttest_test

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/backends"
)

// servers are the database servers of these tests.
var servers *backends.Set

// TestMain turns this binary into the consumer of a kill clause where one has started it.
func TestMain(m *testing.M) {
	contracttest.TxChild(txStores()...)
	contracttest.TxChild(postgresNative(told(nativeName)), bouncedNative(told(bouncedNativeName)))
	if err := overlap(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var err error
	if servers, err = backends.Open(backends.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(servers.Around(m))
}

// overlap has twice as many tests run at a time as there are processors, where -parallel does not say otherwise: those that do
// wait for servers and child processes more than they work.
func overlap() error {
	flag.Parse()
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "test.parallel" })
	if chosen {
		return nil
	}
	return flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0)))
}

// unbubbled is the memory driver as it is to databases that are somewhere else: no bubble, and patience for a machine that
// does other things, too.
func unbubbled() contracttest.Harness {
	return contracttest.Harness{Name: "memory", Fresh: memoryHarness, Patience: 20 * time.Second}
}

// serverVariable hands the address of a harness's server down to child processes.
func serverVariable(harness string) string {
	return "PENSTOCK_CONTRACTTEST_" + strings.ToUpper(harness)
}

// tell has child processes find a harness's server at this address.
func tell(t *testing.T, harness, at string) string {
	t.Helper()
	must(t, os.Setenv(serverVariable(harness), at)) // t.Setenv is not for tests that run in parallel
	return at
}

// told is the address that tell was called with, here or in the parent process.
func told(harness string) string { return os.Getenv(serverVariable(harness)) }
