package contracttest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// failureClauses are about handlers that do not succeed.
func failureClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T07", Name: "every way to fail",
				Text: "error, panic, runtime.Goexit, context cancelled, deadline passed: nothing is committed, delivery settled, " +
					"slot free",
			},
			check: everyWayToFail[T],
		},
		{
			Clause: Clause{
				ID: "T08", Name: "Ack and Nack inside the handler",
				Text: "Ack inside the handler reaches nobody before commit; Ack then error is still a failure; Nack then nil " +
					"rolls back",
			},
			check: settledInside[T],
		},
		{
			Clause: Clause{
				ID: "T21", Name: "nothing open while waiting",
				Text: "no transaction is open while a message waits for its retry",
			},
			check: nothingOpen[T],
		},
	}
}

// attempts counts how often the handler ran for each identity.
type attempts struct {
	mu sync.Mutex
	n  map[string]int
}

func (a *attempts) next(id string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.n == nil {
		a.n = map[string]int{}
	}
	a.n[id]++
	return a.n[id]
}

func (a *attempts) of(id string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.n[id]
}

// failure is a way in which a first attempt ends after it has applied its effect.
type failure func(ctx context.Context, msg *message.Message) error

// budget is the transaction budget of T07. The handler that overruns it takes half as long again.
const budget = time.Second

// failures are the ways to fail by name.
func failures(w *watch) map[string]failure {
	return map[string]failure{
		"error":  func(context.Context, *message.Message) error { return errors.New("the first attempt fails") },
		"panic":  func(context.Context, *message.Message) error { panic("the first attempt panics") },
		"goexit": func(context.Context, *message.Message) error { runtime.Goexit(); return nil },
		"cancelled": func(ctx context.Context, _ *message.Message) error {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return ctx.Err()
		},
		"deadline": func(ctx context.Context, _ *message.Message) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			<-ctx.Done()
			return ctx.Err()
		},
		"delivery lost": func(ctx context.Context, _ *message.Message) error {
			w.cut()
			<-ctx.Done()
			return ctx.Err()
		},
		"budget overrun": func(ctx context.Context, _ *message.Message) error {
			_ = pause(ctx, budget+budget/2) // whatever ends it, the handler goes on as if nothing had happened
			return nil
		},
	}
}

// everyWayToFail sends one message for each way to a consumer with a window of one: each next one needs the slot.
func everyWayToFail[T any](ctx context.Context, e *txEnv[T]) error {
	ways := failures(e.w)
	names := slices.Sorted(maps.Keys(ways))
	way := map[string]failure{}
	ids := e.ids(len(names) + 1)
	for i, name := range names {
		way[ids[i]] = ways[name]
	}
	var tried attempts
	var kept sync.Map
	handle := func(ctx context.Context, tx T, msg *message.Message) error {
		attempt := tried.next(msg.UUID)
		if attempt > 1 {
			if got, err := e.effects(ctx); err != nil || got[msg.UUID] != 0 {
				kept.Store(msg.UUID, true)
			}
		}
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		if fail := way[msg.UUID]; fail != nil && attempt == 1 {
			return fail(ctx, msg)
		}
		return nil
	}
	_, err := e.consume(ctx, plan[T]{window: 1, handle: handle, config: idempotency.Config{TxBudget: budget}})
	if err != nil {
		return err
	}
	if err := e.send(ctx, ids...); err != nil {
		return err
	}
	for i, name := range names {
		if err := e.ackedTimes(ctx, ids[i], 1); err != nil {
			return fmt.Errorf("first attempt ends with %s: %w", name, err)
		}
		if _, ok := kept.Load(ids[i]); ok {
			return fmt.Errorf("first attempt ended with %s, and its effect was committed", name)
		}
		if n := tried.of(ids[i]); n < 2 {
			return fmt.Errorf("first attempt ended with %s, and there was no second one", name)
		}
	}
	return e.balance(ctx, once(ids...))
}

// settledInside has handlers call Ack and Nack themselves.
func settledInside[T any](ctx context.Context, e *txEnv[T]) error {
	ids := e.ids(3)
	ack, ackThenError, nack := ids[0], ids[1], ids[2]
	var tried attempts
	var early atomic.Int64
	e.w.set(func(w *watch) { w.onAck = e.unlessApplied(&early) })
	handle := func(ctx context.Context, tx T, msg *message.Message) error {
		first := tried.next(msg.UUID) == 1
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		switch {
		case msg.UUID == ack:
			msg.Ack()
			return pause(ctx, 100*time.Millisecond) // time for the ack to get through, if it can
		case msg.UUID == ackThenError && first:
			msg.Ack()
			return errors.New("failed after Ack")
		case msg.UUID == nack && first:
			msg.Nack()
		}
		return nil
	}
	if _, err := e.consume(ctx, plan[T]{handle: handle}); err != nil {
		return err
	}
	if err := e.send(ctx, ids...); err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	if early.Load() > 0 {
		return errors.New("an ack reached the broker before the effect was committed")
	}
	if a, b := tried.of(ackThenError), tried.of(nack); a != 2 || b != 2 {
		return fmt.Errorf("the handler ran %d times after Ack and error, %d times after Nack and nil; want 2 each", a, b)
	}
	return e.balance(ctx, once(ids...))
}

// unlessApplied counts acks of messages whose effect is not committed.
func (e *txEnv[T]) unlessApplied(early *atomic.Int64) func(context.Context, string) {
	return func(ctx context.Context, id string) {
		if got, err := e.effects(ctx); err != nil || got[id] == 0 {
			early.Add(1)
		}
	}
}

// retryAfter is how long a failed message waits in T21.
const retryAfter = 2 * time.Second

// nothingOpen looks for a free database while a message waits for its retry: under the engine, and under a subscriber of
// Watermill's, which has no delay of its own.
func nothingOpen[T any](ctx context.Context, e *txEnv[T]) error {
	ids := e.ids(2)
	long := sdk.Backoff{Min: retryAfter, Max: retryAfter}
	engine, failed := e.failsOnce(plan[T]{backoff: long})
	c, err := e.consume(ctx, engine)
	if err != nil {
		return err
	}
	if err := e.send(ctx, ids[0]); err != nil {
		return err
	}
	if err := e.freeWhileWaiting(ctx, failed, ids[0]); err != nil {
		return fmt.Errorf("under the engine: %w", err)
	}
	if err := errors.Join(e.applied(ctx, ids[0]), e.quiet(ctx), c.stop()); err != nil {
		return err
	}
	channel := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
	defer func() { _ = channel.Close() }() // it has no error to give
	foreign, failed := e.failsOnce(plan[T]{config: idempotency.Config{RetryBackoff: long}})
	handle := foreign.handle
	foreign.wire = func(c *consumer[T]) error {
		c.router.AddConsumerHandler("apply", e.topic, channel, c.m.Handle(handle))
		return nil
	}
	if err := channel.Publish(e.topic, message.NewMessage(ids[1], []byte("effect"))); err != nil {
		return err
	}
	if _, err := e.consume(ctx, foreign); err != nil {
		return err
	}
	if err := e.freeWhileWaiting(ctx, failed, ids[1]); err != nil {
		return fmt.Errorf("under GoChannel: %w", err)
	}
	if err := e.applied(ctx, ids[1]); err != nil {
		return err
	}
	return e.balance(ctx, once(ids...))
}

// failsOnce gives the plan a handler whose first attempt fails, and the moment when it did.
func (e *txEnv[T]) failsOnce(p plan[T]) (plan[T], <-chan struct{}) {
	failed := make(chan struct{})
	var tried attempts
	p.handle = func(ctx context.Context, tx T, msg *message.Message) error {
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		if tried.next(msg.UUID) == 1 {
			close(failed)
			return errors.New("the first attempt fails")
		}
		return nil
	}
	return p, failed
}

// freeWhileWaiting writes again and again, during the wait for the retry, what the failed attempt had written: neither the
// database nor that row may be locked. And it sees that the attempt left nothing.
func (e *txEnv[T]) freeWhileWaiting(ctx context.Context, failed <-chan struct{}, id string) error {
	select {
	case <-failed:
	case <-ctx.Done():
		return fmt.Errorf("the handler never ran: %w", ctx.Err())
	}
	const patience = 3 * retryAfter / 10 // less than the wait altogether
	for range 2 {
		if err := pause(ctx, retryAfter/10); err != nil {
			return err
		}
		begin, cancel := context.WithTimeout(ctx, patience)
		tx, err := e.db.Store.Begin(begin, receipts.TxOptions{Budget: patience})
		if err == nil {
			err = errors.Join(e.s.Apply(begin, tx.Raw(), id, 1), tx.Rollback(ctx))
		}
		cancel()
		if err != nil {
			return fmt.Errorf("another writer cannot write while a message waits: %w", err)
		}
		if got, err := e.effects(ctx); err != nil || got[id] != 0 {
			return fmt.Errorf("the failed attempt is committed while its message waits: %w", cmp.Or(err, errTooOften))
		}
	}
	return nil
}
