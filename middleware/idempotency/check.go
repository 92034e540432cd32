package idempotency

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

const (
	defaultTxBudget          = 10 * time.Second
	defaultContentionRetries = 8
	defaultBatchSize         = 256
	defaultBatchTime         = 20 * time.Millisecond
	defaultMaxPending        = 4096
	// minTxBudget is the shortest time in which a database can be asked something and answer.
	minTxBudget = time.Millisecond
	// maxConsumer leaves room for handler name and topic in the scope.
	maxConsumer = 200
)

// withDefaults fills in what zero stands for, and cuts the ties to the caller's maps and slices.
func (c Config) withDefaults() Config {
	if c.TxBudget == 0 {
		c.TxBudget = defaultTxBudget
	}
	if c.ContentionRetries == 0 {
		c.ContentionRetries = defaultContentionRetries
	}
	if isNil(c.Logger) {
		c.Logger = watermill.NopLogger{}
	}
	if c.BatchSize == 0 {
		c.BatchSize = defaultBatchSize
	}
	if c.BatchTime == 0 {
		c.BatchTime = min(defaultBatchTime, c.TxBudget/2)
	}
	if c.MaxPending == 0 {
		c.MaxPending = defaultMaxPending
	}
	c.Aliases = maps.Clone(c.Aliases)
	c.Inside = slices.Clone(c.Inside)
	return c
}

// check refuses what cannot work. Each error says what to change.
func (c Config) check() error {
	return errors.Join(c.checkNames(), c.checkBounds(), c.checkOutputs())
}

func (c Config) checkNames() error {
	switch {
	case c.Consumer == "":
		return errors.New("config: Consumer is empty: name the application that consumes")
	case len(c.Consumer) > maxConsumer:
		return fmt.Errorf("config: Consumer has %d bytes: use at most %d", len(c.Consumer), maxConsumer)
	case len(appendPart(nil, c.Scope)) > receipts.MaxScope:
		return fmt.Errorf("config: Scope has %d bytes: use at most %d", len(c.Scope), receipts.MaxScope-4)
	}
	written := make(map[string]string, len(c.Aliases))
	for _, now := range slices.Sorted(maps.Keys(c.Aliases)) {
		before := c.Aliases[now]
		if now == "" || before == "" {
			return fmt.Errorf("config: Aliases maps %q to %q: neither may be empty", now, before)
		}
		if other, taken := written[before]; taken {
			return fmt.Errorf("config: Aliases gives handlers %q and %q the same old name %q: they would share receipts; use Config.Scope if they should",
				other, now, before)
		}
		written[before] = now
	}
	return nil
}

func (c Config) checkBounds() error {
	switch {
	case c.Guarantee > AtMostOnce:
		return fmt.Errorf("config: Guarantee is %d: use EffectivelyOnce, AtLeastOnce or AtMostOnce", c.Guarantee)
	case c.Conflict > HoldConflicts:
		return fmt.Errorf("config: Conflict is %d: use DivertConflicts or HoldConflicts", c.Conflict)
	case c.Guarantee == AtLeastOnce && c.Conflict == HoldConflicts:
		return errors.New("config: Conflict is HoldConflicts, but AtLeastOnce has no receipts to find conflicts with: drop one of them")
	case c.OrderPolicy > ParkKeys:
		return fmt.Errorf("config: OrderPolicy is %d: use StandStill or ParkKeys", c.OrderPolicy)
	case c.OrderPolicy != StandStill && c.OrderKey == nil:
		return errors.New("config: OrderPolicy is ParkKeys, but there is no OrderKey: set it, or leave OrderPolicy out")
	case c.MaxAttempts != 0:
		return fmt.Errorf("config: MaxAttempts is %d: attempts are not counted yet, leave it 0", c.MaxAttempts)
	case c.ContentionRetries < 0:
		return fmt.Errorf("config: ContentionRetries is %d: use 0 for %d, or a positive number", c.ContentionRetries, defaultContentionRetries)
	case c.Atomicity > PerBatch:
		return fmt.Errorf("config: Atomicity is %d: use PerMessage or PerBatch", c.Atomicity)
	case c.Atomicity == PerBatch && c.Guarantee == AtMostOnce:
		return errors.New("config: Atomicity is PerBatch, but with AtMostOnce one failure would lose all messages of its batch: use PerMessage")
	case c.BatchSize < 0:
		return fmt.Errorf("config: BatchSize is %d: use 0 for %d, or a positive number", c.BatchSize, defaultBatchSize)
	case c.Lanes < 0:
		return fmt.Errorf("config: Lanes is %d: use 0 for what the store says, or a positive number", c.Lanes)
	case c.MaxPending < 0:
		return fmt.Errorf("config: MaxPending is %d: use 0 for %d, or a positive number", c.MaxPending, defaultMaxPending)
	case c.BatchTime < 0:
		return fmt.Errorf("config: BatchTime is %v: use 0 for %v, or a positive duration", c.BatchTime, defaultBatchTime)
	case c.TxBudget < minTxBudget:
		return fmt.Errorf("config: TxBudget is %v: use 0 for %v, or at least %v, or no transaction could end in time", c.TxBudget, defaultTxBudget, minTxBudget)
	case c.BatchTime >= c.TxBudget:
		return fmt.Errorf("config: BatchTime %v is not below TxBudget %v, so that a batch could not end in time: lower BatchTime or raise TxBudget",
			c.BatchTime, c.TxBudget)
	case c.Limits.Lease < 0 || c.Limits.Horizon < 0 || c.Limits.MaxInFlight < 0:
		return errors.New("config: Limits has a negative limit: use 0 where it is unknown")
	case c.Limits.Lease > 0 && c.TxBudget >= c.Limits.Lease:
		return fmt.Errorf("config: TxBudget %v is not below Limits.Lease %v, so the message could be taken away while its transaction is open: "+
			"lower TxBudget or raise the subscriber's Lease", c.TxBudget, c.Limits.Lease)
	case c.RetryBackoff.Min < 0 || c.RetryBackoff.Max < 0:
		return errors.New("config: RetryBackoff is negative: use 0 for 100 ms to 1 min, or positive durations")
	case c.RetryBackoff.Max > 0 && c.RetryBackoff.Max < c.RetryBackoff.Min:
		return fmt.Errorf("config: RetryBackoff.Max %v is below Min %v: swap them", c.RetryBackoff.Max, c.RetryBackoff.Min)
	}
	return nil
}

func (c Config) checkOutputs() error {
	switch {
	case c.Outputs != nil && isNil(c.Outputs):
		return fmt.Errorf("config: Outputs is a nil %T: leave it out, or give a publisher", c.Outputs)
	case c.Outputs != nil && c.OutputsThroughRouter:
		return errors.New("config: Outputs and OutputsThroughRouter exclude each other: use one of them")
	}
	for i, inside := range c.Inside {
		if inside == nil {
			return fmt.Errorf("config: Inside[%d] is nil: leave it out", i)
		}
	}
	return nil
}

// lanesFor gives the number of lanes: as many as make sense and leave one connection of the pool for everything else. A
// single writer may share its only connection, because nothing here holds one while it asks for another.
func lanesFor(cfg Config, info receipts.Info) (int, error) {
	n := max(info.Lanes, 1)
	if cfg.Lanes > 0 {
		n = min(n, cfg.Lanes)
	}
	if info.Pool <= 0 {
		return n, nil
	}
	if info.Pool == 1 && info.Dialect != "sqlite" {
		return 0, errors.New("the database handle has a pool of 1 connection, but a lane and the relay need one each: raise SetMaxOpenConns to 2 or more")
	}
	return max(1, min(n, info.Pool-1)), nil
}

// isNil also finds a nil pointer inside an interface.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	switch r := reflect.ValueOf(v); r.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Func, reflect.Chan, reflect.Interface, reflect.Slice:
		return r.IsNil()
	default:
		return false
	}
}
