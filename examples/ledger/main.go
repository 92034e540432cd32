// Ledger shows the promise kept by several processes on one database: transfers of money between a hundred accounts, a
// third of them sent twice, are applied to PostgreSQL by three consumer processes, which are killed again and again. In the
// end every transfer was applied once, every balance is the sum of its transfers, and no cent was made or lost.
//
// This process owns the broker and serves it over a socket; its children consume, and die. The verdict is worked out here,
// from the input and with plain SQL on the application's own tables.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

const usage = `Sends transfers of money to consumer processes that are killed again and again, and checks in PostgreSQL that
each of them was applied once. PostgreSQL is the one of PENSTOCK_POSTGRES_URL, else one on the usual port of this
machine, else a private one that is started for the run. The database is made for the run and dropped after it.

  ledger [flags]

`

// The exit codes besides 0.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// errVerdict: the run went through and the database does not hold what it must.
var errVerdict = errors.New("the promise was not kept")

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	if os.Getenv(consumerEnv) != "" {
		if err := runConsumer(); err != nil {
			fmt.Fprintln(stderr, "consumer:", err)
			return exitFailed
		}
		return 0
	}
	opts, err := parseOptions(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		printUsage(stdout)
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "ledger:", err)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := runOnServer(ctx, opts, stdout, stderr); {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "ledger: interrupted")
		return exitInterrupted
	default:
		fmt.Fprintln(stderr, "ledger:", err)
		return exitFailed
	}
}

// runOnServer finds or starts PostgreSQL, and leaves it as it was.
func runOnServer(ctx context.Context, opts options, stdout, stderr io.Writer) (err error) {
	servers, err := backends.Open(backends.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, servers.Close()) }()
	at, source, err := servers.Server(ctx, backends.Postgres)
	if err != nil {
		return err // where there is no server it names the command that installs one
	}
	fmt.Fprintf(stderr, "PostgreSQL %s: %s\n", at.Version, source)
	database, err := servers.Database(ctx, backends.Postgres)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, servers.Drop(context.WithoutCancel(ctx), database)) }()
	return runDemo(ctx, opts, database.URL(), stdout, stderr)
}

// options are the command line's.
type options struct {
	transfers int
	accounts  int
	processes int
	kills     int
	seed      uint64
	single    bool
	bare      bool
}

const (
	// defaultKills is twice each kind; fewer transfers get fewer.
	defaultKills = 10
	// killRoom is the number of transfers a kill needs: they are what its victim dies over.
	killRoom = 100
)

func (o *options) flags() *flag.FlagSet {
	flags := flag.NewFlagSet("ledger", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // run prints the error, once
	flags.IntVar(&o.transfers, "n", 6000, "how many `transfers`; a third more messages are sent")
	flags.IntVar(&o.accounts, "accounts", 100, "how many `accounts` the money goes between; few are contended for")
	flags.IntVar(&o.processes, "processes", 3, "how many consumer `processes` there are at a time")
	flags.IntVar(&o.kills, "kills", defaultKills, "how many `times` one of them is killed; each takes 100 transfers")
	flags.Uint64Var(&o.seed, "seed", 1, "the `number` that transfers, duplicates and kills depend on")
	flags.BoolVar(&o.single, "single", false, "apply the transfers of a transaction one by one, not all at once")
	flags.BoolVar(&o.bare, "bare", false, "leave the middleware out, to see the verdict fail")
	return flags
}

func printUsage(out io.Writer) {
	fmt.Fprint(out, usage)
	flags := new(options).flags()
	flags.SetOutput(out)
	flags.PrintDefaults()
}

// parseOptions gives flag.ErrHelp where the usage is asked for.
func parseOptions(args []string) (options, error) {
	var opts options
	flags := opts.flags()
	if err := flags.Parse(args); err != nil {
		return opts, fmt.Errorf("%w; -help lists the flags", err)
	}
	if flags.NArg() > 0 {
		return opts, fmt.Errorf("unexpected argument %q; -help lists the flags", flags.Arg(0))
	}
	killsGiven := false
	flags.Visit(func(f *flag.Flag) { killsGiven = killsGiven || f.Name == "kills" })
	if !killsGiven {
		opts.kills = min(defaultKills, max(0, opts.transfers/killRoom))
	}
	return opts, opts.validate()
}

func (o options) validate() error {
	switch {
	case o.transfers < 1 || o.transfers > 1_000_000:
		return fmt.Errorf("-n is %d; it has to be between 1 and 1,000,000", o.transfers)
	case o.accounts < 2 || o.accounts > 100_000:
		return fmt.Errorf("-accounts is %d; it has to be between 2 and 100,000", o.accounts)
	case o.processes < 1 || o.processes > 16:
		return fmt.Errorf("-processes is %d; it has to be between 1 and 16", o.processes)
	case o.kills < 0:
		return fmt.Errorf("-kills is %d; it cannot be negative", o.kills)
	case o.kills*killRoom > o.transfers:
		return fmt.Errorf("-kills %d is too many for %d transfers: choose at most %d kills, or -n %d",
			o.kills, o.transfers, o.transfers/killRoom, o.kills*killRoom)
	}
	return nil
}
