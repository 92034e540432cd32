// Bench compares Penstock with what people write without it: a plain Watermill handler with a transaction of its own for
// each message, and a loop written by hand that commits many messages at once. Contenders do the same work in turns, on the
// same machine, broker and database; every round's result is checked. docs/performance.md says how to read it.
//
//	main.go     flags                     broker.go      a loaded broker, a consumer
//	studies.go  what is compared          place.go, sqlite.go, servers.go: the databases
//	runner.go   turns, medians, checks    contenders.go  handlers; loop.go: the loop by hand
//	report.go   table and JSON            latency.go, sleeping.go, overhead.go
//	chart.go    SVG                       display.go     progress
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
	"regexp"
	"syscall"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

const usage = `Compares Penstock with a plain Watermill handler and with a loop written by hand.
Prints a table and writes bench.json and plots. Takes about a quarter of an hour.

  bench [flags]

`

// The exit codes besides 0.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) (code int) {
	servers, err := backends.Open(backends.Options{})
	if err != nil {
		say(stderr, "bench: %v\n", err)
		return exitUsage
	}
	defer func() {
		if err := servers.Close(); err != nil {
			say(stderr, "bench: %v\n", err)
			code = max(code, exitFailed)
		}
	}()
	opts, err := parseOptions(args)
	opts.servers = servers
	switch {
	case errors.Is(err, flag.ErrHelp):
		printUsage(stdout)
		return 0
	case err != nil:
		say(stderr, "bench: %v\n", err)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := bench(ctx, opts, studies(opts), stdout, stderr); {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		say(stderr, "bench: interrupted\n")
		return exitInterrupted
	default:
		say(stderr, "bench: %v\n", err)
		return exitFailed
	}
}

// say prints to a terminal, whose errors nobody can be told about.
func say(out io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(out, format, args...) }

// options are the command line's.
type options struct {
	rounds   int
	messages int
	quick    bool
	only     *regexp.Regexp
	out      string
	servers  *backends.Set
	large    bool
}

const (
	defaultRounds = 5
	mostMessages  = 100_000
)

func (o *options) flags() *flag.FlagSet {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // run prints the error, once
	flags.IntVar(&o.rounds, "rounds", defaultRounds, "how many measured `rounds` each contender gets, after one that warms up")
	flags.IntVar(&o.messages, "messages", 0, "how many `messages` a round of a throughput has; 0: as many as take about a second")
	flags.BoolVar(&o.quick, "quick", false, "see that everything works, in less than a minute: one round of few messages, no numbers to go by")
	flags.BoolVar(&o.large, "large", false, "also measure with 10 million receipts in the table: takes some minutes and 3 GB more")
	flags.StringVar(&o.out, "o", "out", "the `folder` for bench.json and plots; the databases are in it, too, while it runs")
	flags.Func("only", "run only the studies whose name matches this `regexp`: throughput, unprepared, batch-size, window, latency, sleeping, overhead, postgres, pgx, mariadb, distance, receipts",
		func(text string) (err error) {
			o.only, err = regexp.Compile(text)
			return err
		})
	return flags
}

func printUsage(out io.Writer) {
	say(out, usage)
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
	given := map[string]bool{}
	flags.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if opts.quick && !given["rounds"] {
		opts.rounds = 1
	}
	switch {
	case opts.rounds < 1:
		return opts, fmt.Errorf("-rounds is %d; it has to be at least 1", opts.rounds)
	case opts.messages < 0 || opts.messages > mostMessages:
		return opts, fmt.Errorf("-messages is %d; it has to be between 1 and %d, or 0", opts.messages, mostMessages)
	case len(studies(opts)) == 0:
		return opts, fmt.Errorf("-only %s matches no study; -help lists them", opts.only)
	}
	return opts, nil
}

// bench runs the studies and reports. The folder for databases is inside the output folder, because the usual place for
// temporary files may be memory, where a flush costs nothing. Without a complete run nothing is written.
func bench(ctx context.Context, opts options, list []study, stdout, stderr io.Writer) (err error) {
	if err := os.MkdirAll(opts.out, 0o755); err != nil {
		return fmt.Errorf("make the folder of -o: %w", err)
	}
	dir, err := os.MkdirTemp(opts.out, "bench-")
	if err != nil {
		return fmt.Errorf("make a folder for the databases: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	where, err := lookAtMachine(dir)
	if err != nil {
		return err
	}
	r := runner{opts: opts, dir: dir, show: newDisplay(stderr, list, opts.rounds)}
	rows, err := r.all(ctx, list)
	r.show.end()
	if err != nil {
		return err
	}
	result := report{Machine: where, Rounds: opts.rounds, Quick: opts.quick, Rows: rows}
	result.print(stdout)
	for _, why := range r.left {
		say(stdout, "%s\n", why)
	}
	file := filepath.Join(opts.out, "bench.json")
	if err := result.write(file); err != nil {
		return err
	}
	say(stdout, "%s\n", file)
	drawn, err := draw(opts.out, rows)
	for _, file := range drawn {
		say(stdout, "%s\n", file)
	}
	return err
}
