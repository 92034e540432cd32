// Parcels shows the promise kept on a carrier's scan events: a fifth of them is duplicated, some are reordered, some reuse
// an identity, and the process that applies them to a database is killed again and again. In the end every event with a
// valid payload has had its effect once.
//
// This process owns the broker and serves it over a socket; a child process consumes, and dies. The verdict is worked out
// here, from the input and with plain SQL on the application's own tables.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

//go:generate go run ./generate -n 3000 -seed 1 -o events.jsonl

const usage = `Sends scan events of a parcel carrier to a consumer process that is killed again and again,
and checks that each event takes effect once.

  parcels [flags]

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
		fmt.Fprintln(stderr, "parcels:", err)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := runDemo(ctx, opts, stdout, stderr); {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "parcels: interrupted")
		return exitInterrupted
	default:
		fmt.Fprintln(stderr, "parcels:", err)
		return exitFailed
	}
}

// options are the command line's.
type options struct {
	events int
	seed   uint64
	kills  int
	dir    string
	bare   bool
}

// defaultKills is twice each kind; fewer events get fewer.
const defaultKills = 10

func (o *options) flags() *flag.FlagSet {
	flags := flag.NewFlagSet("parcels", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // run prints the error, once
	flags.IntVar(&o.events, "n", keptEvents, "how many `events`; a fifth more messages are sent")
	flags.Uint64Var(&o.seed, "seed", keptSeed, "the `number` that events, disturbance and kills depend on")
	flags.IntVar(&o.kills, "kills", defaultKills, "how many `times` the consumer process is killed; each takes 50 events")
	flags.StringVar(&o.dir, "dir", "", "the `folder` to keep the database in; without it nothing is kept")
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
		opts.kills = min(defaultKills, max(0, opts.events/killRoom))
	}
	return opts, opts.validate()
}

// killRoom is the number of events a kill needs, so that all kills happen before the work is done.
const killRoom = 50

func (o options) validate() error {
	switch {
	case o.events < 1 || o.events > 1_000_000:
		return fmt.Errorf("-n is %d; it has to be between 1 and 1,000,000", o.events)
	case o.kills < 0:
		return fmt.Errorf("-kills is %d; it cannot be negative", o.kills)
	case o.kills*killRoom > o.events:
		return fmt.Errorf("-kills %d is too many for %d events: choose at most %d kills, or -n %d",
			o.kills, o.events, o.events/killRoom, o.kills*killRoom)
	}
	return nil
}

// databasePath gives the file of the database and a function that removes what was made for it.
func (o options) databasePath() (path string, clean func(), err error) {
	if o.dir == "" {
		dir, err := os.MkdirTemp("", "parcels-")
		if err != nil {
			return "", nil, fmt.Errorf("make a folder for the database (-dir names one): %w", err)
		}
		return filepath.Join(dir, "parcels.db"), func() { _ = os.RemoveAll(dir) }, nil
	}
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return "", nil, fmt.Errorf("make the folder of -dir: %w", err)
	}
	path = filepath.Join(o.dir, "parcels.db")
	if _, err := os.Stat(path); err == nil {
		return "", nil, fmt.Errorf("%s is there already, from an earlier run: remove it or give another -dir", path)
	}
	return path, func() {}, nil
}
