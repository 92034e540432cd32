package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// report is bench.json.
type report struct {
	Machine machine `json:"machine"`
	Rounds  int     `json:"rounds"`
	Quick   bool    `json:"quick"` // true: the numbers mean nothing
	Rows    []row   `json:"rows"`
}

// row is one contender's metric, compared with one rival. Ratio is Median divided by the rival's; for a time, less is
// better. Rival is empty and Ratio 0 where nothing is compared.
type row struct {
	Study     string  `json:"study"`
	Pair      string  `json:"pair"`
	Window    int     `json:"window"`
	Batch     int     `json:"batch"` // 0: each contender's usual one
	Contender string  `json:"contender"`
	Metric    string  `json:"metric"`
	Unit      string  `json:"unit"`
	Median    float64 `json:"median"`
	Min       float64 `json:"min"`
	Max       float64 `json:"max"`
	Rival     string  `json:"rival"`
	Ratio     float64 `json:"ratio"`
}

// machine is where it ran.
type machine struct {
	Cores int    `json:"cores"`
	CPU   string `json:"cpu"` // empty where the system does not say
	OS    string `json:"os"`
	Arch  string `json:"arch"`
	Go    string `json:"go"`
	Date  string `json:"date"`
	Flush int64  `json:"flush_us"` // median time to append 4 KiB to a file and flush it, where the databases are
	Procs int    `json:"gomaxprocs"`
}

// lookAtMachine collects the facts that numbers depend on.
func lookAtMachine(dir string) (machine, error) {
	flush, err := timeFlush(dir)
	if err != nil {
		return machine{}, fmt.Errorf("measure how long a flush of the disk takes: %w", err)
	}
	return machine{
		Cores: runtime.NumCPU(), CPU: cpuModel(), OS: runtime.GOOS, Arch: runtime.GOARCH, Go: runtime.Version(),
		Date: time.Now().UTC().Format(time.RFC3339), Flush: flush.Microseconds(), Procs: runtime.GOMAXPROCS(0),
	}, nil
}

func timeFlush(dir string) (_ time.Duration, err error) {
	file, err := os.Create(filepath.Join(dir, "flush"))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	block := make([]byte, 4096)
	took := make([]time.Duration, 51)
	for i := range took {
		began := time.Now()
		if _, err := file.Write(block); err != nil {
			return 0, err
		}
		if err := file.Sync(); err != nil {
			return 0, err
		}
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

// cpuModel is what Linux says.
func cpuModel() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	lines := bufio.NewScanner(bytes.NewReader(info))
	for lines.Scan() {
		if name, model, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(model)
		}
	}
	return ""
}

// write writes the report whole or not at all.
func (r report) write(file string) error {
	content, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the report: %w", err)
	}
	return replace(file, append(content, '\n'))
}

// replace puts a new file in the place of an old one in one step.
func replace(file string, content []byte) error {
	if err := os.WriteFile(file+".new", content, 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// print shows the rows as a table, those of one study together.
func (r report) print(out io.Writer) {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Format.Header = text.FormatDefault
	t.AppendHeader(table.Row{"study", "pair", "window", "batch", "contender", "metric", "median", "min", "max", "unit", "ratio"})
	right := func(number int) table.ColumnConfig {
		return table.ColumnConfig{Number: number, Align: text.AlignRight, AlignHeader: text.AlignRight}
	}
	t.SetColumnConfigs([]table.ColumnConfig{right(3), right(4), right(7), right(8), right(9)})
	for i, row := range r.Rows {
		above := row
		if i > 0 {
			above = r.Rows[i-1]
		}
		if above.Study != row.Study || above.Window != row.Window || above.Batch != row.Batch {
			t.AppendSeparator()
		}
		t.AppendRow(row.cells(i > 0 && above.measures() == row.measures()))
	}
	say(out, "%s\n", t.Render())
	m := r.Machine
	say(out, "%d cores, %s, %s/%s, flush %d µs, %s; rounds: %d\n", m.Cores, m.Go, m.OS, m.Arch, m.Flush, m.Date, r.Rounds)
	if r.Quick {
		say(out, "A quick run shows that everything works. Its numbers mean nothing.\n")
	}
}

// measures names what a row measures; rows that differ only in the rival share it.
func (r row) measures() [5]string {
	return [5]string{r.Study, strconv.Itoa(r.Window), strconv.Itoa(r.Batch), r.Contender, r.Metric}
}

// cells gives the row of a table. again: all but the comparison is in the row above.
func (r row) cells(again bool) table.Row {
	ratio := ""
	if r.Rival != "" {
		ratio = fmt.Sprintf("%.2f × %s", r.Ratio, r.Rival)
	}
	if again {
		return table.Row{"", "", "", "", "", "", "", "", "", "", ratio}
	}
	return table.Row{r.Study, r.Pair, unlessZero(r.Window), unlessZero(r.Batch), r.Contender, r.Metric, figure(r.Median), figure(r.Min), figure(r.Max), r.Unit, ratio}
}

func unlessZero(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

// figure shows a number with three digits, or all before the point, in groups of three.
func figure(f float64) string {
	switch size := math.Abs(f); {
	case size < 10:
		return strconv.FormatFloat(f, 'f', 2, 64)
	case size < 100:
		return strconv.FormatFloat(f, 'f', 1, 64)
	}
	digits := strconv.FormatFloat(f, 'f', 0, 64)
	for i := len(digits) - 3; i > 0 && digits[i-1] != '-'; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
