package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

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

// swallowed has one message of a batch meet each error on its first attempts, go on writing and return nil.
func swallowed[T any](ctx context.Context, e *txEnv[T]) error {
	ways := maps.Clone(e.s.Errors)
	if e.s.Violate != nil {
		ways["a violated constraint"] = e.s.Violate
	}
	for _, neighbours := range []int{0, batchSize - 1} {
		for _, name := range slices.Sorted(maps.Keys(ways)) {
			if err := e.swallow(ctx, ways[name], neighbours); err != nil {
				return fmt.Errorf("%s, with %d neighbours: %w", name, neighbours, err)
			}
		}
	}
	got, err := e.effects(ctx)
	if err != nil {
		return err
	}
	want := account{effects: got}
	for name := range got {
		if _, after := isAfter(name); !after {
			want.receipts++
		}
	}
	return e.balance(ctx, want)
}

// afterwards is what a message writes after the error that it swallowed.
func afterwards(id string) string { return "after-" + id }

func isAfter(name string) (id string, ok bool) {
	return name, len(name) > 6 && name[:6] == "after-"
}

// swallow has the middle one of a batch meet the error twice. In the end every message has to have taken effect once, and
// what the careless one wrote afterwards, too.
func (e *txEnv[T]) swallow(ctx context.Context, fail func(ctx context.Context, tx T) error, neighbours int) error {
	ids := e.ids(neighbours + 1)
	careless := ids[neighbours/2]
	var met attempts
	var noError error
	c, err := e.crowd(ctx, plan[T]{handle: func(ctx context.Context, tx T, msg *message.Message) error {
		if msg.UUID != careless {
			return e.apply(ctx, tx, msg)
		}
		_ = e.apply(ctx, tx, msg)
		if met.next(msg.UUID) <= 2 {
			if err := fail(ctx, tx); err == nil {
				noError = errors.New("the hook has met no error")
			}
		}
		_ = e.s.Apply(ctx, tx, afterwards(msg.UUID), 1)
		return nil
	}})
	if err != nil {
		return err
	}
	before, err := e.effects(ctx)
	if err != nil {
		return err
	}
	if _, err := c.gather(ctx, ids...); err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	if err := errors.Join(noError, e.quiet(ctx), c.stop()); err != nil {
		return err
	}
	want := before
	for _, id := range c.with(ids...) {
		want[id] = 1
	}
	want[afterwards(careless)] = 1
	return e.effectsAre(ctx, want)
}
