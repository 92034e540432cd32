package contracttest

import (
	"context"
	"fmt"
	"runtime/debug"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// clauseTime bounds one clause, in units of the harness's patience; hangGrace is what a clause gets to notice it.
// bubbleTime bounds, in real time, one that runs in a bubble.
const (
	clauseTime = 12
	hangGrace  = 10 * time.Second
	bubbleTime = 2 * time.Minute
)

// Run checks every clause in a subtest of its own. A clause that is not run is a skip that names what is missing; a
// waived one passes when it fails. It must not run in parallel with other tests: L03 looks at the whole process.
func Run(t *testing.T, h Harness) {
	t.Helper()
	clauses := Clauses()
	if err := h.check(clauses); err != nil {
		t.Fatal(err)
	}
	for _, c := range clauses {
		t.Run(c.ID, func(t *testing.T) { judge(t, examine(t, h, c)) })
	}
}

// judge turns a result into the verdict of a subtest.
func judge(t *testing.T, res Result) {
	t.Helper()
	for _, note := range res.Notes {
		t.Log("note: " + note)
	}
	switch res.Status {
	case Failed:
		t.Errorf("%s %s: %s", res.ID, res.Name, res.Reason)
	case NotRun:
		t.Skipf("%s %s: %s", res.ID, res.Name, res.Reason)
	case Waived:
		t.Logf("%s %s: waived: %s", res.ID, res.Name, res.Reason)
	case Passed:
	}
}

// Examine checks every clause like [Run], in bubbles where the harness asks for them, but leaves the judgement to the
// caller: a failing clause does not fail t. It is for tests that assert which clauses pass, fail and are not run.
func Examine(t *testing.T, h Harness) Report {
	t.Helper()
	return collect(h, func(c Clause) Result { return examine(t, h, c) })
}

// Check checks every clause in real time, outside of any test, one after the other, and reports. Clauses that were not
// started when ctx ended are reported as failed. It does not return an error: a harness that cannot be used fails each
// clause and the report says why.
func Check(ctx context.Context, h Harness) Report {
	return collect(h, func(c Clause) Result {
		if err := ctx.Err(); err != nil {
			return Result{ID: c.ID, Name: c.Name, Status: Failed, Reason: "not started: " + err.Error()}
		}
		start := time.Now()
		res := runClause(ctx, h, c, false)
		res.Duration = time.Since(start)
		return res
	})
}

func collect(h Harness, one func(Clause) Result) Report {
	start := time.Now()
	rep := Report{Harness: h.Name}
	clauses := Clauses()
	waivers := h.check(clauses)
	for _, c := range clauses {
		res := Result{ID: c.ID, Name: c.Name, Status: Failed}
		if waivers != nil {
			res.Reason = waivers.Error()
		} else {
			res = one(c)
		}
		rep.Results = append(rep.Results, res)
	}
	rep.Duration = time.Since(start)
	return rep
}

// examine runs one clause, in a bubble where the harness asks for it.
func examine(t *testing.T, h Harness, c Clause) (res Result) {
	t.Helper()
	start := time.Now()
	if h.Bubble {
		// Virtual time stands still while a goroutine waits for a mutex, so no deadline inside ends a deadlock over one.
		watchdog := time.AfterFunc(bubbleTime, func() {
			panic(fmt.Sprintf("clause %s over %s made no progress in a bubble for %s: run it without", c.ID, h.Name, bubbleTime))
		})
		defer watchdog.Stop()
		synctest.Test(t, func(t *testing.T) {
			res = runClause(t.Context(), h, c, true)
			outlast()
		})
	} else {
		res = runClause(t.Context(), h, c, false)
	}
	res.Duration = time.Since(start)
	return res
}

// outlast gives goroutines that a broken driver left behind an hour of virtual time to end: a bubble cannot end before
// them, and panics on those that never do.
func outlast() {
	if e := (&Env{h: Harness{Bubble: true}}); len(e.holding().goroutines) > 0 {
		time.Sleep(time.Hour)
	}
}

// runClause runs one clause on its own environment and applies the waiver.
func runClause(ctx context.Context, h Harness, c Clause, bubbled bool) Result {
	res := Result{ID: c.ID, Name: c.Name}
	used, err := h.begin(bubbled)
	if err != nil {
		res.Status, res.Reason = Failed, err.Error()
		return res
	}
	e := newEnv(used, c.ID)
	missing, err := e.missing(ctx, c)
	if err == nil && missing == "" {
		err = e.guarded(ctx, c)
	}
	res.Notes = e.noted()
	res.Status, res.Reason = verdict(missing, err, h.Waive[c.ID])
	return res
}

// verdict decides on a clause from what it lacked, how it ended, and whether it is waived.
func verdict(missing string, err error, waived string) (Status, string) {
	switch {
	case missing != "" && waived != "":
		return Failed, fmt.Sprintf("waived (%s) but not run, %s: remove the waiver", waived, missing)
	case missing != "" && err == nil:
		return NotRun, missing
	case err != nil && waived != "":
		return Waived, fmt.Sprintf("%s; it fails with: %v", waived, err)
	case err != nil:
		return Failed, err.Error()
	case waived != "":
		return Failed, fmt.Sprintf("waived (%s) but it passes: remove the waiver", waived)
	default:
		return Passed, ""
	}
}

// guarded runs the check with a deadline, turns a panic into a failure, and gives up on a check that does not return.
func (e *Env) guarded(ctx context.Context, c Clause) error {
	ctx, cancel := context.WithTimeout(ctx, clauseTime*e.h.Patience)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		err := recovered(ctx, e, c)
		if cleanup := e.close(); err == nil {
			err = cleanup
		}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	hang := time.NewTimer(hangGrace)
	defer hang.Stop()
	select {
	case err := <-done:
		return err
	case <-hang.C:
		return fmt.Errorf("a call did not return although its context ended %s ago", hangGrace)
	}
}

func recovered(ctx context.Context, e *Env, c Clause) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return c.Check(ctx, e)
}

// missing names the capability or the hooks that the clause lacks; empty: it can run.
func (e *Env) missing(ctx context.Context, c Clause) (string, error) {
	var hooks []string
	for _, name := range c.Hooks {
		if !e.h.hook(name) {
			hooks = append(hooks, name)
		}
	}
	if len(hooks) > 0 {
		return "the harness has no hook " + strings.Join(hooks, ", "), nil
	}
	if c.Capability == "" {
		return "", nil
	}
	caps, err := e.probe(ctx)
	if err != nil {
		return "", err
	}
	if !declares(caps, c.Capability) {
		return "capability " + c.Capability + " is not declared", nil
	}
	return "", nil
}
