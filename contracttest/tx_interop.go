package contracttest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/sony/gobreaker"

	"github.com/penstock-mq/penstock/middleware/idempotency"
)

// interopClauses are about Watermill's own middlewares on the way of a message.
func interopClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T23", Name: "Watermill's middlewares outside",
				Text: "Watermill's Retry, PoisonQueue, Recoverer, Timeout, CircuitBreaker outside ours: documented result; inside " +
					"ours: no half commit where it can be detected, documented where it cannot",
			},
			check: middlewaresOutside[T],
		},
		{
			Clause: Clause{
				ID: "T23/inside", Name: "Watermill's middlewares inside",
				Text: "Watermill's Retry, PoisonQueue, Recoverer, Timeout, CircuitBreaker inside ours: what failed is not " +
					"committed, whatever they make of it, and comes again",
			},
			check: middlewaresInside[T],
		},
	}
}

// guest is one of Watermill's middlewares, and how the first attempt of its message ends.
type guest struct {
	name string
	make func(poison message.Publisher) (message.HandlerMiddleware, error)
	end  failure
	// oneDelivery: outside, it brings the message to its end in one delivery.
	oneDelivery bool
	// gives: outside, it gives the message to the poison topic after the first attempt.
	gives bool
}

// guestTimeout is the time limit of the Timeout, and how long the CircuitBreaker stays open.
const guestTimeout = 400 * time.Millisecond

// guests are the five that have to do with failures.
func guests() []guest {
	ways := failures(nil)
	ready := func(mw message.HandlerMiddleware) func(message.Publisher) (message.HandlerMiddleware, error) {
		return func(message.Publisher) (message.HandlerMiddleware, error) { return mw, nil }
	}
	untilOver := func(ctx context.Context, _ *message.Message) error {
		<-ctx.Done()
		return ctx.Err()
	}
	return []guest{
		{name: "Retry", end: ways["error"], oneDelivery: true, make: ready(middleware.Retry{
			MaxRetries: 3, InitialInterval: time.Millisecond,
			ShouldRetry: func(p middleware.RetryParams) bool { return idempotency.IsFailure(p.Err) },
		}.Middleware)},
		{name: "PoisonQueue", end: ways["error"], oneDelivery: true, gives: true, make: func(pub message.Publisher) (message.HandlerMiddleware, error) {
			return middleware.PoisonQueueWithFilter(pub, "poison", idempotency.IsFailure)
		}},
		{name: "Recoverer", end: ways["panic"], make: ready(middleware.Recoverer)},
		{name: "Timeout", end: untilOver, make: ready(middleware.Timeout(guestTimeout))},
		{name: "CircuitBreaker", end: ways["error"], make: ready(middleware.NewCircuitBreaker(gobreaker.Settings{
			Timeout: guestTimeout, IsSuccessful: func(err error) bool { return !idempotency.IsFailure(err) },
			ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures > 0 },
		}).Middleware)},
	}
}

// sink is a publisher that takes everything and counts it by payload.
type sink struct {
	mu  sync.Mutex
	got map[string]int
}

// Publish counts.
func (s *sink) Publish(_ string, msgs ...*message.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.got == nil {
		s.got = map[string]int{}
	}
	for _, msg := range msgs {
		s.got[string(msg.Payload)]++
	}
	return nil
}

// Close does nothing.
func (*sink) Close() error { return nil }

// count is how many messages came.
func (s *sink) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, times := range s.got {
		n += times
	}
	return n
}

// holds fails unless there is one output of each of those messages, and nothing else.
func (s *sink) holds(ids []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		if n := s.got[outputOf(id)]; n != 1 {
			return fmt.Errorf("%d outputs of %q were sent, want 1", n, id)
		}
	}
	if len(s.got) != len(ids) {
		return fmt.Errorf("outputs %v of %d messages", s.got, len(ids))
	}
	return nil
}

func outputOf(id string) string { return "output of " + id }

// visit is one message that passed a guest.
type visit struct {
	id         string
	runs       int
	deliveries int64 // as the router sees them
	poison     int
	report     idempotency.Report
}

// receive puts a guest outside or inside, sends one message whose first attempt ends as the guest's says, waits for its
// ack and stops the consumer.
func (e *txEnv[T]) receive(ctx context.Context, g guest, inside bool) (visit, error) {
	poison := &sink{}
	mw, err := g.make(poison)
	if err != nil {
		return visit{}, err
	}
	var tried attempts
	p := plan[T]{window: 1, handle: func(ctx context.Context, tx T, msg *message.Message) error {
		attempt := tried.next(msg.UUID)
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		if attempt == 1 {
			return g.end(ctx, msg)
		}
		return nil
	}}
	var deliveries atomic.Int64
	p.outer = []message.HandlerMiddleware{func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			deliveries.Add(1)
			return h(msg)
		}
	}}
	if inside {
		p.config.Inside = []message.HandlerMiddleware{mw}
	} else {
		p.outer = append(p.outer, mw)
	}
	v := visit{id: e.messageID()}
	c, err := e.consume(ctx, p)
	if err != nil {
		return v, err
	}
	if err := errors.Join(e.send(ctx, v.id), e.ackedTimes(ctx, v.id, 1), e.quiet(ctx), c.stop()); err != nil {
		return v, err
	}
	v.runs, v.deliveries, v.poison, v.report = tried.of(v.id), deliveries.Load(), poison.count(), c.m.Report()
	return v, nil
}

// middlewaresOutside has each of them outside, and compares with what docs/retries.md says.
func middlewaresOutside[T any](ctx context.Context, e *txEnv[T]) error {
	var applied []string
	for _, g := range guests() {
		v, err := e.receive(ctx, g, false)
		if err != nil {
			return fmt.Errorf("%s outside: %w", g.name, err)
		}
		runs, poison := 2, 0
		if g.gives {
			runs, poison = 1, 1
		} else {
			applied = append(applied, v.id)
		}
		if v.runs != runs || v.poison != poison {
			return fmt.Errorf("%s outside: the handler ran %d times, %d messages were poisoned; want %d, %d", g.name, v.runs, v.poison, runs, poison)
		}
		if v.report.Failed != 1 {
			return fmt.Errorf("%s outside: %d attempts were charged, want 1", g.name, v.report.Failed)
		}
		if one := v.deliveries == 1; one != g.oneDelivery {
			return fmt.Errorf("%s outside: it took %d deliveries; want one: %t", g.name, v.deliveries, g.oneDelivery)
		}
		if err := e.compare(ctx, once(applied...)); err != nil {
			return fmt.Errorf("%s outside: %w", g.name, err)
		}
	}
	return e.balance(ctx, once(applied...))
}

// middlewaresInside has each of them inside: the handler's failure counts, whatever they make of it.
func middlewaresInside[T any](ctx context.Context, e *txEnv[T]) error {
	var applied []string
	for _, g := range guests() {
		v, err := e.receive(ctx, g, true)
		if err != nil {
			return fmt.Errorf("%s inside: %w", g.name, err)
		}
		applied = append(applied, v.id)
		if v.runs != 2 {
			return fmt.Errorf("%s inside: the handler ran %d times, want 2: once in a transaction that failed", g.name, v.runs)
		}
		if v.report.Failed == 0 {
			return fmt.Errorf("%s inside: no attempt was charged", g.name)
		}
		if err := e.compare(ctx, once(applied...)); err != nil {
			return fmt.Errorf("%s inside: %w", g.name, err)
		}
	}
	return e.balance(ctx, once(applied...))
}
