// Generate writes the demo's scan events as JSON lines: the same n and seed give the same bytes.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/penstock-mq/penstock/examples/parcels/scan"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func run(args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("generate", flag.ContinueOnError)
	flags.SetOutput(stderr)
	n := flags.Int("n", 3000, "number of events")
	seed := flags.Uint64("seed", 1, "seed; the same n and seed give the same events")
	path := flags.String("o", "", "file to write; standard output without it")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return fmt.Errorf("read the flags: %w", err)
	}
	if *n < 1 {
		return fmt.Errorf("-n is %d; it has to be at least 1", *n)
	}
	if *path == "" {
		return scan.Generate(stdout, *n, *seed)
	}
	return writeFile(*path, *n, *seed)
}

func writeFile(path string, n int, seed uint64) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("create the file of events: %w", err)
	}
	defer func() {
		if closeErr := file.Close(); err == nil && closeErr != nil {
			err = fmt.Errorf("close the file of events: %w", closeErr)
		}
	}()
	out := bufio.NewWriter(file)
	if err := scan.Generate(out, n, seed); err != nil {
		return err
	}
	return out.Flush()
}
