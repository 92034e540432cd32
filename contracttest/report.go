package contracttest

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Status is what became of one clause.
type Status string

// The statuses of a clause.
const (
	// Passed: the rule was seen to hold.
	Passed Status = "pass"
	// Failed: it was seen broken, or could not be seen to hold, or a waived clause did not fail.
	Failed Status = "fail"
	// NotRun: a capability is not declared or a hook is missing; the reason names it.
	NotRun Status = "not run"
	// Waived: the harness waives the clause, and it failed as it has to.
	Waived Status = "waived"
)

// Result is the outcome of one clause.
type Result struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Reason says why a clause failed, was not run or is waived. Empty for one that passed.
	Reason string `json:"reason,omitempty"`
	// Notes are things declared by the driver that the clause could not observe.
	Notes []string `json:"notes,omitempty"`
	// Duration is real time, also for a clause that ran in a bubble.
	Duration time.Duration `json:"duration_ns"`
}

// Report is the outcome of a whole run.
type Report struct {
	Harness  string        `json:"harness"`
	Results  []Result      `json:"results"`
	Duration time.Duration `json:"duration_ns"`
}

// OK tells whether no clause failed.
func (r Report) OK() bool { return len(r.IDs(Failed)) == 0 }

// IDs lists the clauses with that status in the order of the report.
func (r Report) IDs(s Status) []string {
	var ids []string
	for _, res := range r.Results {
		if res.Status == s {
			ids = append(ids, res.ID)
		}
	}
	return ids
}

// Result gives the result of one clause; false: it is not in the report.
func (r Report) Result(id string) (Result, bool) {
	for _, res := range r.Results {
		if res.ID == id {
			return res, true
		}
	}
	return Result{}, false
}

// String gives the report as an aligned table with a summary line.
func (r Report) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 4, 2, ' ', 0)
	for _, res := range r.Results {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", res.ID, res.Status, res.Duration.Round(time.Millisecond), remark(res))
	}
	_ = w.Flush() // a strings.Builder takes everything
	fmt.Fprintf(&b, "%s: %d passed, %d failed, %d not run, %d waived in %s\n", r.Harness,
		len(r.IDs(Passed)), len(r.IDs(Failed)), len(r.IDs(NotRun)), len(r.IDs(Waived)), r.Duration.Round(time.Millisecond))
	return b.String()
}

// WriteJSON writes the report as indented JSON. It returns the writer's error.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(r); err != nil {
		return fmt.Errorf("writing the conformance report of %q: %w", r.Harness, err)
	}
	return nil
}

// remark is the last column: the name, why, and what was only declared. It stays on one line.
func remark(res Result) string {
	text := res.Name
	if res.Reason != "" {
		text += ": " + res.Reason
	}
	for _, note := range res.Notes {
		text += " [" + note + "]"
	}
	return strings.Join(strings.Fields(text), " ")
}
