// Command crowd lets eight processes take one another's messages: 100,000 of them, three in ten a duplicate, into one table of
// a server. Each identity has to take effect once, nothing may be diverted, and nobody may see an error. It is a test that is
// too long for every run; its own tests run a short form.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	if os.Getenv(consumerEnv) != "" {
		if err := runConsumer(); err != nil {
			say(stderr, "consumer: %v\n", err)
			return 1
		}
		return 0
	}
	p, err := parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		say(stdout, "Lets processes take one another's messages, and checks that each takes effect once.\n\n  crowd [flags]\n\n")
		flags := new(plan).flags()
		flags.SetOutput(stdout)
		flags.PrintDefaults()
		return 0
	case err != nil:
		say(stderr, "crowd: %v\n", err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := runStores(ctx, p, stdout, stderr); err != nil {
		say(stderr, "crowd: %v\n", err)
		return 1
	}
	return 0
}

// say writes to a terminal or the like: an error has nobody to go to.
func say(out io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(out, format, args...) }

// plan is what the command line asks for.
type plan struct {
	messages   int
	duplicates int // in per cent
	processes  int
	window     int    // messages that a process has in hand
	store      string // "": all
	seed       uint64
}

func (p *plan) flags() *flag.FlagSet {
	flags := flag.NewFlagSet("crowd", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.IntVar(&p.messages, "n", 100_000, "how many `messages` are sent")
	flags.IntVar(&p.duplicates, "duplicates", 30, "how many of them are duplicates, in `per cent`")
	flags.IntVar(&p.processes, "processes", 8, "how many `processes` consume")
	flags.IntVar(&p.window, "window", 256, "how many `messages` each of them has in hand")
	flags.StringVar(&p.store, "store", "", fmt.Sprintf("the `store`: one of %q; without it one after the other", names()))
	flags.Uint64Var(&p.seed, "seed", 1, "the `number` that the places of duplicates depend on")
	return flags
}

func parse(args []string) (plan, error) {
	var p plan
	flags := p.flags()
	if err := flags.Parse(args); err != nil {
		return p, fmt.Errorf("%w; -help lists the flags", err)
	}
	switch {
	case flags.NArg() > 0:
		return p, fmt.Errorf("unexpected argument %q; -help lists the flags", flags.Arg(0))
	case p.messages < 1:
		return p, fmt.Errorf("-n is %d; at least one message is needed", p.messages)
	case p.duplicates < 0 || p.duplicates > 90:
		return p, fmt.Errorf("-duplicates is %d; it has to be between 0 and 90", p.duplicates)
	case p.processes < 1 || p.processes > 32:
		return p, fmt.Errorf("-processes is %d; it has to be between 1 and 32", p.processes)
	case p.window < 1 || p.window > 4096:
		return p, fmt.Errorf("-window is %d; it has to be between 1 and 4096", p.window)
	case p.store != "" && !slices.Contains(names(), p.store):
		return p, fmt.Errorf("-store is %q; it has to be one of %q", p.store, names())
	}
	return p, nil
}

// names lists the stores.
func names() []string { return slices.Sorted(maps.Keys(stores())) }

// runStores runs the plan on each store.
func runStores(ctx context.Context, p plan, stdout, stderr io.Writer) (err error) {
	servers, err := backends.Open(backends.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, servers.Close()) }()
	list := names()
	if p.store != "" {
		list = []string{p.store}
	}
	for _, p.store = range list {
		if err := onServer(ctx, servers, p, stdout, stderr); err != nil {
			return fmt.Errorf("%s: %w", p.store, err)
		}
	}
	return nil
}

// onServer runs the plan in a database of its own.
func onServer(ctx context.Context, servers *backends.Set, p plan, stdout, stderr io.Writer) (err error) {
	database, err := servers.Database(ctx, stores()[p.store].kind)
	if err != nil {
		return err // where there is no server it names the command that installs one
	}
	defer func() { err = errors.Join(err, servers.Drop(context.WithoutCancel(ctx), database)) }()
	result, err := runCrowd(ctx, p, database.DSN(), stderr)
	if err != nil {
		return err
	}
	return result.print(stdout, p, database.Version)
}
