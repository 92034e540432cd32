package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// shutdownClauses are about the end of a consumer that has work in hand.
func shutdownClauses[T any]() []txClause[T] {
	return []txClause[T]{{
		Clause: Clause{
			ID: "T20", Name: "shutdown while handlers run",
			Text: "shutdown while handlers run: committed and acked, or neither; nothing diverted, no attempt charged",
		},
		// Router.Close waits for handlers with a mutex locked that the router's own loop wants: time in a bubble stands
		// still meanwhile.
		realTime: true,
		check:    shutdown[T],
	}}
}

// shutdown ends a consumer with a handler running and messages waiting, in each way there is.
func shutdown[T any](ctx context.Context, e *txEnv[T]) error {
	var all []string
	for _, way := range []struct {
		name  string
		plain bool
		end   func(c *consumer[T]) error
	}{
		{"Router.Close", true, func(c *consumer[T]) error { return c.router.Close() }},
		{"the context of sdk.Run", false, func(c *consumer[T]) error {
			c.cancel()
			err := <-c.done
			c.done <- err
			return err
		}},
		{"Subscriber.Stop", false, func(c *consumer[T]) error { return c.subs[0].Stop(ctx) }},
	} {
		ids := e.ids(5)
		all = append(all, ids...)
		before := len(e.w.acked())
		if err := e.endWhile(ctx, way.plain, way.end, ids); err != nil {
			return fmt.Errorf("ended by %s: %w", way.name, err)
		}
		if err := e.ackedIsApplied(ctx, before); err != nil {
			return fmt.Errorf("ended by %s: %w", way.name, err)
		}
	}
	if _, err := e.consume(ctx, plan[T]{}); err != nil {
		return err
	}
	return e.balance(ctx, once(all...))
}

// endWhile ends a consumer while one of its handlers runs and returns when it has ended.
func (e *txEnv[T]) endWhile(ctx context.Context, plain bool, end func(c *consumer[T]) error, ids []string) error {
	running := make(chan struct{}, len(ids))
	release := make(chan struct{})
	c, err := e.consume(ctx, plan[T]{plain: plain, window: 4, handle: func(ctx context.Context, tx T, msg *message.Message) error {
		running <- struct{}{}
		select {
		case <-release:
			return e.apply(ctx, tx, msg)
		case <-ctx.Done():
			return ctx.Err()
		}
	}})
	if err != nil {
		return err
	}
	if err := e.send(ctx, ids...); err != nil {
		return err
	}
	select {
	case <-running:
	case <-ctx.Done():
		return fmt.Errorf("no handler ran: %w", ctx.Err())
	}
	ended := make(chan error, 1)
	go func() { ended <- end(c) }()
	if err := pause(ctx, 50*time.Millisecond); err != nil { // the shutdown is under way before a handler goes on
		return err
	}
	close(release)
	return errors.Join(ends(ended, 2*e.h.Patience, "the shutdown"), c.stop())
}

// ackedIsApplied fails unless the same messages are acked and have taken effect, more than before, because one handler
// ran and had time, and nothing is diverted.
func (e *txEnv[T]) ackedIsApplied(ctx context.Context, before int) error {
	got, err := e.effects(ctx)
	if err != nil {
		return err
	}
	applied, acked := slices.Sorted(maps.Keys(got)), e.w.acked()
	if !slices.Equal(applied, acked) {
		return fmt.Errorf("committed %v, acked %v", applied, acked)
	}
	if len(applied) <= before {
		return errors.New("the handler that ran was not let to its end")
	}
	return e.compare(ctx, once(applied...))
}
