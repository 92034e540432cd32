package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// display shows the progress in rounds: a bar on a terminal, a line for each study elsewhere.
type display struct {
	out  io.Writer
	bar  *progressbar.ProgressBar // nil elsewhere
	last string
}

func newDisplay(out io.Writer, list []study, rounds int) *display {
	d := &display{out: out}
	total := 0
	for _, s := range list {
		total += len(s.contenders) * (rounds + 1)
	}
	if file, ok := out.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		d.bar = progressbar.NewOptions(total,
			progressbar.OptionSetWriter(out),
			progressbar.OptionShowCount(),
			progressbar.OptionSetWidth(30),
			progressbar.OptionThrottle(50*time.Millisecond),
			progressbar.OptionSetPredictTime(false),
			progressbar.OptionClearOnFinish(),
		)
	}
	return d
}

// begin tells which round begins.
func (d *display) begin(s study, c contender) {
	name := s.name
	if s.window > 0 {
		name += fmt.Sprintf(", window %d", s.window)
	}
	if s.batch > 0 {
		name += fmt.Sprintf(", batch %d", s.batch)
	}
	if d.bar != nil {
		d.bar.Describe(fmt.Sprintf("%-34s %-14s", name, c.name))
		return
	}
	if name != d.last {
		say(d.out, "%s\n", name)
	}
	d.last = name
}

// done tells that a round is over.
func (d *display) done() {
	if d.bar != nil {
		_ = d.bar.Add(1) // a terminal that cannot be written to is nobody's concern
	}
}

// end leaves the terminal clean for what follows.
func (d *display) end() {
	if d.bar != nil {
		_ = d.bar.Clear()
	}
}
