package stage

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// Display shows the progress: a bar on a terminal, plain lines elsewhere.
type Display struct {
	out   io.Writer
	total int
	bar   *progressbar.ProgressBar // nil elsewhere

	mu     sync.Mutex
	kills  int
	tenths int // printed so far
}

// NewDisplay makes a display of the acknowledgements of total messages. It writes a bar where out is a terminal.
func NewDisplay(out io.Writer, total int) *Display {
	d := &Display{out: out, total: total}
	if file, ok := out.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		d.bar = progressbar.NewOptions(total,
			progressbar.OptionSetWriter(out),
			progressbar.OptionSetDescription(d.label()),
			progressbar.OptionShowCount(),
			progressbar.OptionSetWidth(30),
			progressbar.OptionThrottle(50*time.Millisecond),
			progressbar.OptionSetPredictTime(false),
			progressbar.OptionClearOnFinish(),
		)
	}
	return d
}

func (d *Display) label() string { return fmt.Sprintf("acknowledged, %d kills", d.kills) }

// Progress shows how many messages are acknowledged.
func (d *Display) Progress(acks int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.bar != nil {
		_ = d.bar.Set(acks)
		return
	}
	if tenths := acks * 10 / max(d.total, 1); tenths > d.tenths {
		d.tenths = tenths
		_, _ = fmt.Fprintf(d.out, "%3d %%  %d of %d acknowledged\n", tenths*10, acks, d.total)
	}
}

// Killed tells of a kill.
func (d *Display) Killed(acks int, at Point) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kills++
	if d.bar != nil {
		d.bar.Describe(d.label())
		return
	}
	_, _ = fmt.Fprintf(d.out, "kill %d  %s, %d acknowledged\n", d.kills, at, acks)
}

// End leaves the terminal clean for what follows.
func (d *Display) End() {
	if d.bar != nil {
		_ = d.bar.Finish()
		_, _ = fmt.Fprintln(d.out)
	}
}
