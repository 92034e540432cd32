package idempotency

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

func TestNewRefuses(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Config, *fakeStore)
		want   string
	}{
		{"no consumer", func(c *Config, _ *fakeStore) { c.Consumer = "" }, "Consumer is empty"},
		{"long consumer", func(c *Config, _ *fakeStore) { c.Consumer = strings.Repeat("c", 201) }, "use at most 200"},
		{"long scope", func(c *Config, _ *fakeStore) { c.Scope = strings.Repeat("s", 509) }, "use at most 508"},
		{"empty alias", func(c *Config, _ *fakeStore) { c.Aliases = map[string]string{"a": ""} }, "neither may be empty"},
		{"one old name twice", func(c *Config, _ *fakeStore) { c.Aliases = map[string]string{"a": "x", "b": "x"} }, "they would share receipts"},
		{"guarantee", func(c *Config, _ *fakeStore) { c.Guarantee = 9 }, "use EffectivelyOnce"},
		{"conflict policy", func(c *Config, _ *fakeStore) { c.Conflict = 9 }, "use DivertConflicts"},
		{"conflicts at least once", func(c *Config, _ *fakeStore) { c.Guarantee, c.Conflict = AtLeastOnce, HoldConflicts }, "drop one of them"},
		{"MaxAttempts", func(c *Config, _ *fakeStore) { c.MaxAttempts = 3 }, "leave it 0"},
		{"ContentionRetries", func(c *Config, _ *fakeStore) { c.ContentionRetries = -1 }, "positive number"},
		{"TxBudget", func(c *Config, _ *fakeStore) { c.TxBudget = -1 }, "use 0 for 10s"},
		{"tiny TxBudget", func(c *Config, _ *fakeStore) { c.TxBudget = 1 }, "at least 1ms"},
		{"BatchSize", func(c *Config, _ *fakeStore) { c.BatchSize = -1 }, "BatchSize is -1: use 0 for 256"},
		{"Lanes", func(c *Config, _ *fakeStore) { c.Lanes = -1 }, "Lanes is -1"},
		{"MaxPending", func(c *Config, _ *fakeStore) { c.MaxPending = -1 }, "MaxPending is -1"},
		{"BatchTime", func(c *Config, _ *fakeStore) { c.BatchTime = -1 }, "BatchTime is -1ns"},
		{"BatchTime at the budget", func(c *Config, _ *fakeStore) { c.TxBudget, c.BatchTime = time.Second, time.Second }, "lower BatchTime or raise"},
		{"all or nothing at most once", func(c *Config, _ *fakeStore) { c.Guarantee, c.Atomicity = AtMostOnce, PerBatch }, "use PerMessage"},
		{"negative limit", func(c *Config, _ *fakeStore) { c.Limits.Horizon = -1 }, "use 0 where it is unknown"},
		{"budget at the lease", func(c *Config, _ *fakeStore) { c.Limits.Lease = 10 * time.Second }, "lower TxBudget or raise"},
		{"negative backoff", func(c *Config, _ *fakeStore) { c.RetryBackoff.Min = -1 }, "positive durations"},
		{"backoff upside down", func(c *Config, _ *fakeStore) { c.RetryBackoff = sdk.Backoff{Min: 2, Max: 1} }, "swap them"},
		{"outputs twice", func(c *Config, _ *fakeStore) { c.Outputs, c.OutputsThroughRouter = &recording{}, true }, "exclude each other"},
		{"nil publisher", func(c *Config, _ *fakeStore) { c.Outputs = (*recording)(nil) }, "nil *idempotency.recording"},
		{"nil middleware inside", func(c *Config, _ *fakeStore) { c.Inside = []message.HandlerMiddleware{nil} }, "Inside[0] is nil"},
		{"pool of one", func(_ *Config, s *fakeStore) { s.info = receipts.Info{Dialect: "postgres", Lanes: 8, Pool: 1} }, "SetMaxOpenConns to 2"},
		{"unhealthy store", func(_ *Config, s *fakeStore) { s.checkErr = receipts.ErrSchemaMissing }, "receipt tables are missing"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			store, cfg := newFakeStore(), Config{Consumer: "billing"}
			tt.change(&cfg, store)
			m, err := New(store, cfg)
			if err == nil || m != nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
	t.Run("nil store", func(t *testing.T) {
		for _, store := range []receipts.Store[*fakeTx]{nil, (*fakeStore)(nil)} {
			if _, err := New(store, Config{Consumer: "billing"}); err == nil || !strings.Contains(err.Error(), "the store is nil") {
				t.Errorf("%T: %v", store, err)
			}
		}
	})
	t.Run("several reasons at once", func(t *testing.T) {
		_, err := New(newFakeStore(), Config{MaxAttempts: 1})
		if err == nil || !strings.Contains(err.Error(), "Consumer is empty") || !strings.Contains(err.Error(), "MaxAttempts") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("the store's own error is found", func(t *testing.T) {
		store := newFakeStore()
		store.checkErr = receipts.ErrSchemaNewer
		if _, err := New(store, Config{Consumer: "billing"}); !errors.Is(err, receipts.ErrSchemaNewer) {
			t.Errorf("got %v", err)
		}
	})
}

// A nil handler is found where the program is put together, not when its first message comes.
func TestNilHandler(t *testing.T) {
	m, err := New(newFakeStore(), Config{Consumer: "billing"})
	if err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]func(){
		"Wrap":          func() { m.Wrap(nil) },
		"Handle":        func() { m.Handle(nil) },
		"HandleOutputs": func() { m.HandleOutputs("topic", nil) },
		"HandleBatch":   func() { m.HandleBatch(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if value := recover(); value != nilHandler {
					t.Errorf("it panicked with %v, want %q", value, nilHandler)
				}
			}()
			do()
		})
	}
}

// A short budget makes BatchTime shorter, where nobody has set it.
func TestBatchTimeFollowsTxBudget(t *testing.T) {
	for budget, want := range map[time.Duration]time.Duration{0: 20 * time.Millisecond, 10 * time.Millisecond: 5 * time.Millisecond} {
		if got := (Config{TxBudget: budget}).withDefaults().BatchTime; got != want {
			t.Errorf("TxBudget %v: BatchTime %v, want %v", budget, got, want)
		}
	}
}

func TestLanes(t *testing.T) {
	tests := []struct {
		info receipts.Info
		want int
	}{
		{receipts.Info{Dialect: "sqlite", Lanes: 1, Pool: 1}, 1},
		{receipts.Info{Dialect: "sqlite", Lanes: 1, Pool: 0}, 1},
		{receipts.Info{Dialect: "sqlite", Lanes: 1, Pool: 8}, 1},
		{receipts.Info{Dialect: "postgres", Lanes: 8, Pool: 0}, 8},
		{receipts.Info{Dialect: "postgres", Lanes: 8, Pool: 4}, 3},
		{receipts.Info{Dialect: "postgres", Lanes: 8, Pool: 2}, 1},
		{receipts.Info{Dialect: "postgres", Lanes: 0, Pool: 9}, 1},
	}
	for _, tt := range tests {
		if got, err := lanesFor(Config{}, tt.info); err != nil || got != tt.want {
			t.Errorf("%+v: %d lanes, %v, want %d", tt.info, got, err, tt.want)
		}
	}
}

func TestReportNamesWhatIsNotChecked(t *testing.T) {
	e := newEnv(t, func(c *Config, s *fakeStore) {
		c.Limits.Lease = time.Minute
		s.info.Warnings = []string{"synchronous is OFF"}
	})
	if got := strings.Join(e.m.Report().Unchecked, " "); got != "MaxInFlight Horizon" {
		t.Errorf("unchecked: %s", got)
	}
	if e.m.Report().Store.Dialect != "sqlite" || e.m.Report().Health.Lanes != 1 {
		t.Errorf("report %+v", e.m.Report())
	}
	found := false
	for _, lines := range e.log.Captured() {
		for _, line := range lines {
			found = found || strings.Contains(line.Msg, "synchronous is OFF")
		}
	}
	if !found {
		t.Error("the store's warning was not logged")
	}
}
