package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// swallowClauses are about handlers that do not look at errors.
func swallowClauses[T any]() []txClause[T] {
	return []txClause[T]{{
		Clause: Clause{
			ID: "T16", Name: "a swallowed SQL error",
			Text: "the handler swallows an SQL error: 25P02 on PostgreSQL; 1213, 1205 and DDL on MySQL/MariaDB; an SQLite error " +
				"that ends the transaction: no effect without its receipt, no receipt without its effect, no neighbour harmed",
		},
		store: []string{"Errors"}, check: swallowed[T],
	}}
}

// carelessness is the message of a batch that meets an error, and what it meets.
type carelessness[T any] struct {
	mu   sync.Mutex
	id   string
	fail func(ctx context.Context, tx T) error
	met  int   // how often
	none error // the hook has met no error
}

// next gives what the handler of a message has to do; nil: the usual.
func (c *carelessness[T]) next(id string) (careless bool, fail func(ctx context.Context, tx T) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if id != c.id {
		return false, nil
	}
	if c.met++; c.met > 2 {
		return true, nil
	}
	return true, c.fail
}

func (c *carelessness[T]) missed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.none = errors.New("the hook has met no error")
}

// swallowed has one message of a batch meet each error on its first attempts, go on writing and return nil.
func swallowed[T any](ctx context.Context, e *txEnv[T]) error {
	ways := maps.Clone(e.s.Errors)
	if e.s.Violate != nil {
		ways["a violated constraint"] = e.s.Violate
	}
	now := &carelessness[T]{}
	c, err := e.crowd(ctx, plan[T]{handle: func(ctx context.Context, tx T, msg *message.Message) error {
		careless, fail := now.next(msg.UUID)
		if !careless {
			return e.apply(ctx, tx, msg)
		}
		_ = e.apply(ctx, tx, msg)
		if fail != nil && fail(ctx, tx) == nil {
			now.missed()
		}
		_ = e.s.Apply(ctx, tx, afterwards(msg.UUID), 1)
		return nil
	}})
	if err != nil {
		return err
	}
	want := account{effects: map[string]int64{}}
	for _, neighbours := range []int{0, batchSize - 1} {
		for _, name := range slices.Sorted(maps.Keys(ways)) {
			ids := e.ids(neighbours + 1)
			now.mu.Lock()
			now.id, now.fail, now.met = ids[neighbours/2], ways[name], 0
			now.mu.Unlock()
			if err := errors.Join(e.swallow(ctx, c, ids), now.none); err != nil {
				return fmt.Errorf("%s, with %d neighbours: %w", name, neighbours, err)
			}
			want.receipts += len(ids) + 1
			want.effects[afterwards(now.id)] = 1
			for _, id := range c.with(ids...) {
				want.effects[id] = 1
			}
			if err := e.effectsAre(ctx, want.effects); err != nil {
				return fmt.Errorf("%s, with %d neighbours: %w", name, neighbours, err)
			}
		}
	}
	return e.balance(ctx, want)
}

// afterwards is what a message writes after the error that it swallowed.
func afterwards(id string) string { return "after-" + id }

// swallow has a batch with the careless one in it. In the end every message has to have taken effect once, and what the careless
// one wrote afterwards, too.
func (e *txEnv[T]) swallow(ctx context.Context, c *crowd[T], ids []string) error {
	if _, err := c.gather(ctx, ids...); err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	return e.quiet(ctx)
}
