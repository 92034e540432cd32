package contracttest

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// plain is a harness with no hook over a memory broker that declares what caps leaves.
func plain(caps func(*sdk.Capabilities)) Harness {
	return Harness{Name: "plain", Fresh: func() Harness {
		net := memory.NewNetwork(memory.Options{})
		return Harness{Open: func(context.Context) (sdk.Driver, error) {
			d, err := net.Driver("b")
			return declaring{d, caps}, err
		}}
	}}
}

type declaring struct {
	sdk.Driver
	change func(*sdk.Capabilities)
}

func (d declaring) Capabilities() sdk.Capabilities {
	caps := d.Driver.Capabilities()
	if d.change != nil {
		d.change(&caps)
	}
	return caps
}

func (d declaring) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	s, err := d.Driver.Open(ctx, b)
	return declaringSource{s, d}, err
}

type declaringSource struct {
	sdk.Source
	d declaring
}

func (s declaringSource) Capabilities() sdk.Capabilities { return s.d.Capabilities() }

func TestVerdicts(t *testing.T) {
	broken := errors.New("the rule is broken")
	passes := func(context.Context, *Env) error { return nil }
	fails := func(context.Context, *Env) error { return broken }
	tests := map[string]struct {
		clause Clause
		waive  map[string]string
		want   Status
		reason string
	}{
		"passes":              {Clause{ID: "X1", Check: passes}, nil, Passed, ""},
		"fails":               {Clause{ID: "X1", Check: fails}, nil, Failed, "the rule is broken"},
		"declared":            {Clause{ID: "X1", Check: passes, Capability: "groups"}, nil, Passed, ""},
		"undeclared":          {Clause{ID: "X1", Check: fails, Capability: "reject"}, nil, NotRun, "reject"},
		"unknown capability":  {Clause{ID: "X1", Check: fails, Capability: "magic"}, nil, NotRun, "magic"},
		"no hook":             {Clause{ID: "X1", Check: fails, Hooks: []string{"Stall", "Cut"}}, nil, NotRun, "Stall, Cut"},
		"waived and fails":    {Clause{ID: "X1", Check: fails}, map[string]string{"X1": "known"}, Waived, "known"},
		"waived and passes":   {Clause{ID: "X1", Check: passes}, map[string]string{"X1": "known"}, Failed, "remove the waiver"},
		"waived and not run":  {Clause{ID: "X1", Check: fails, Hooks: []string{"Cut"}}, map[string]string{"X1": "known"}, Failed, "not run"},
		"another is waived":   {Clause{ID: "X1", Check: fails}, map[string]string{"X2": "known"}, Failed, "broken"},
		"panics":              {Clause{ID: "X1", Check: func(context.Context, *Env) error { panic("oh") }}, nil, Failed, "panic: oh"},
		"returns at deadline": {Clause{ID: "X1", Check: func(ctx context.Context, _ *Env) error { <-ctx.Done(); return ctx.Err() }}, nil, Failed, "deadline"},
		"never returns": {
			Clause{ID: "X1", Check: func(context.Context, *Env) error { time.Sleep(time.Hour); return nil }}, nil, Failed, "did not return",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := plain(func(c *sdk.Capabilities) { c.Reject = false })
				h.Waive = tc.waive
				res := runClause(t.Context(), h, tc.clause, true)
				outlast()
				if res.Status != tc.want || !strings.Contains(res.Reason, tc.reason) {
					t.Errorf("%s: %q, want %s because of %q", res.Status, res.Reason, tc.want, tc.reason)
				}
			})
		})
	}
}

// TestEveryGuardIsKnown: a clause with a misspelt capability or hook would never run, and nobody would see it.
func TestEveryGuardIsKnown(t *testing.T) {
	all := sdk.Capabilities{
		Durable: true, UnroutableDetected: true, Redelivers: true, DeliveryCount: true, DelayedRequeue: true, Reject: true,
		TxSettle: true, Ordered: true, KeyOrdered: true, OrderAfterRequeue: true, Groups: true, Settle: sdk.SettleConfirmed,
		Lease: time.Second, MaxPayload: 1,
	}
	full := Harness{
		Restart: func(context.Context) error { return nil }, Cut: func(context.Context) error { return nil },
		Stall:           func(context.Context) (func(), error) { return nil, nil },
		Refuse:          func(context.Context, string) (func(), error) { return nil, nil },
		DropTopology:    func(context.Context, string) error { return nil },
		Undecodable:     func(context.Context, string, []byte) error { return nil },
		DeadLetterTopic: func(string) string { return "" },
		KillConsumer:    func(context.Context, string, string, int) error { return nil },
		Signal:          func(context.Context) error { return nil },
		Unsettled:       func(context.Context, string, string) (int, error) { return 0, nil },
	}
	var seen []string
	for _, c := range Clauses() {
		if !declares(all, c.Capability) {
			t.Errorf("%s needs the capability %q, which nothing can declare", c.ID, c.Capability)
		}
		for _, hook := range c.Hooks {
			if !full.hook(hook) {
				t.Errorf("%s needs the hook %q, which no harness can have", c.ID, hook)
			}
		}
		if slices.Contains(seen, c.ID) {
			t.Errorf("%s is there twice", c.ID)
		}
		if c.Name == "" || c.Text == "" || c.Check == nil {
			t.Errorf("%s lacks its name, text or check", c.ID)
		}
		seen = append(seen, c.ID)
	}
	for _, c := range Clauses() {
		if c.Capability != "" && declares(sdk.Capabilities{}, c.Capability) {
			t.Errorf("%s: the zero value declares %q", c.ID, c.Capability)
		}
	}
}

// TestWeakestBroker: what is not declared is not asked for, and the rest still holds.
func TestWeakestBroker(t *testing.T) {
	h := plain(func(c *sdk.Capabilities) { *c = sdk.Capabilities{} })
	h.Bubble = true
	h.Many = 500
	rep := Examine(t, h)
	// The broker can do what its driver denies, so it does not answer unsupported.
	if got, want := rep.IDs(Failed), []string{"H01"}; !slices.Equal(got, want) {
		t.Errorf("failed %q, want %q\n%s", got, want, rep)
	}
	for _, id := range []string{"D06", "D11", "D13", "D18", "G02", "O01", "O02", "O03", "P04", "P05", "P07"} {
		if res, ok := rep.Result(id); !ok || res.Status != NotRun || !strings.Contains(res.Reason, "is not declared") {
			t.Errorf("%s: %+v, want not run for a missing capability", id, res)
		}
	}
}

func TestUselessHarness(t *testing.T) {
	refused := errors.New("no broker here")
	tests := map[string]struct {
		h    Harness
		want string
	}{
		"no Open":        {Harness{Name: "x"}, "Open"},
		"Open fails":     {Harness{Name: "x", Open: func(context.Context) (sdk.Driver, error) { return nil, refused }}, "no broker here"},
		"unknown waiver": {Harness{Name: "x", Waive: map[string]string{"Z99": "?"}}, "Z99"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			rep := Check(t.Context(), tc.h)
			if rep.OK() || len(rep.IDs(Passed)) > 0 {
				t.Errorf("passed: %q", rep.IDs(Passed))
			}
			for _, res := range rep.Results {
				if res.Status == Failed && !strings.Contains(res.Reason, tc.want) {
					t.Errorf("%s: %q lacks %q", res.ID, res.Reason, tc.want)
				}
			}
		})
	}
}

func TestCheckStopsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	rep := Check(ctx, plain(nil))
	if got := len(rep.IDs(Failed)); got != len(Clauses()) {
		t.Errorf("%d clauses failed, want all: none was run", got)
	}
}

func TestReport(t *testing.T) {
	rep := Report{Harness: "demo", Results: []Result{
		{ID: "P01", Name: "first", Status: Passed, Duration: 12 * time.Millisecond},
		{ID: "P02", Name: "second", Status: Failed, Reason: "two\nlines", Notes: []string{"a note"}},
		{ID: "P03", Name: "third", Status: NotRun, Reason: "no hook"},
	}, Duration: time.Second}
	want := "P01  pass     12ms  first\n" +
		"P02  fail     0s    second: two lines [a note]\n" +
		"P03  not run  0s    third: no hook\n" +
		"demo: 1 passed, 1 failed, 1 not run, 0 waived in 1s\n"
	if got := rep.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if rep.OK() {
		t.Error("a report with a failure is OK")
	}
	var b strings.Builder
	if err := rep.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal([]byte(b.String()), &back); err != nil {
		t.Fatal(err)
	}
	if back.String() != rep.String() {
		t.Errorf("after JSON:\n%s", back)
	}
}
