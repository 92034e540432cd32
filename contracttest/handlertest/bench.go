package handlertest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// plan is what a scenario does to the attempts of the handler, which are counted from 1. Each func may be nil.
type plan struct {
	// kill ends the transaction before the handler runs.
	kill func(attempt int) bool
	// before runs before the handler, inside its transaction.
	before func(attempt int) error
	// after runs after the handler returned nil, inside its transaction. It may panic.
	after func(attempt int) error
	// commit is the answer to a COMMIT that is not carried out; nil carries it out.
	commit func(attempt int) error
	// together: several deliveries are under way at once, so that the database may see contention, and nobody can read its
	// state at a moment when nothing runs.
	together bool
}

// bench is the world of one scenario: a case on a database of its own, a broker, and what was seen.
type bench[T any] struct {
	c      Case[T]
	plan   plan
	before any  // State, before anything ran
	writes bool // a clean run changes State
	store  *spy[T]
	driver sdk.Driver
	pub    *sdk.Publisher
	acked  chan struct{}
	found  chan struct{} // closed at the first finding

	mu         sync.Mutex
	finding    error
	attempts   int
	deliveries int
	planted    bool // the present attempt fails because the scenario wants it to
	committed  bool
	outputs    []string // topics of committed outputs
	stopping   bool
}

// newBench opens broker and database. The driver's Close is the caller's, by close.
func newBench[T any](ctx context.Context, c Case[T], writes bool) (*bench[T], error) {
	b := &bench[T]{c: c, writes: writes, acked: make(chan struct{}, 64), found: make(chan struct{})}
	b.store = &spy[T]{Store: c.Store, ended: b.transactionEnded, commit: b.commitFault}
	if err := c.Store.Migrate(ctx); err != nil {
		return nil, fmt.Errorf("bringing the store's tables into the database: %w", err)
	}
	stats, err := c.Store.Stats(ctx)
	if err != nil {
		return nil, fmt.Errorf("looking into the store: %w", err)
	}
	if n := stats.Done + stats.Diverted + stats.Torn; n > 0 {
		return nil, fmt.Errorf("the database holds %d receipts already: give each case a database of its own", n)
	}
	if b.before, err = b.state(ctx); err != nil {
		return nil, err
	}
	b.driver, err = memory.NewNetwork(memory.Options{Lease: b.lease()}).Driver("handlertest")
	if err != nil {
		return nil, err
	}
	b.pub, err = sdk.NewPublisher(b.driver, sdk.PublisherConfig{Timeout: c.Patience})
	return b, err
}

// lease leaves room for the longest transaction.
func (b *bench[T]) lease() time.Duration { return max(sdk.DefaultLease, 2*b.c.Config.TxBudget) }

func (b *bench[T]) close() error {
	return errors.Join(b.pub.Close(), b.driver.Close(context.Background()))
}

func (b *bench[T]) state(ctx context.Context) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, b.c.Patience)
	defer cancel()
	state, err := b.c.State(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading State: %w", err)
	}
	return state, nil
}

// find notes why the scenario has failed; the first reason stays.
func (b *bench[T]) find(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.finding == nil && err != nil {
		b.finding = err
		close(b.found)
	}
}

// outside is the outermost middleware of the router: it sees every delivery from its arrival to its verdict.
func (b *bench[T]) outside(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (outputs []*message.Message, err error) {
		b.mu.Lock()
		b.deliveries++
		b.mu.Unlock()
		returned := false
		defer func() {
			if !returned {
				value := recover()
				b.deliveryFailed(panicked(value))
				panic(value)
			}
		}()
		outputs, err = h(msg)
		returned = true
		b.deliveryFailed(explain(err))
		return outputs, err
	}
}

// deliveryFailed notes an error that the scenario did not plant.
func (b *bench[T]) deliveryFailed(err error) {
	b.mu.Lock()
	planted, stopping := b.planted, b.stopping
	b.planted = false
	b.mu.Unlock()
	if err != nil && !planted && !stopping {
		b.find(err)
	}
}

// inside is the outermost of Config.Inside: it runs in the transaction, around the handler. It counts attempts, and does to
// them what the scenario wants. A function for batches is reached by it, too, because it gets one message at a time here.
func (b *bench[T]) inside(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		b.mu.Lock()
		b.attempts++
		n := b.attempts
		b.mu.Unlock()
		if b.plan.kill != nil && b.plan.kill(n) {
			return nil, b.planting(func() error { return b.withoutTransaction(msg, h) })
		}
		if b.plan.before != nil {
			if err := b.plan.before(n); err != nil {
				return nil, err
			}
		}
		outputs, err := h(msg)
		if err == nil && b.plan.after != nil {
			err = b.planting(func() error { return b.plan.after(n) })
		}
		return outputs, err
	}
}

// planting runs what may fail the attempt on the scenario's behalf, by an error or a panic.
func (b *bench[T]) planting(f func() error) error {
	mark := func(planted bool) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.planted = planted
	}
	mark(true)
	err := f()
	mark(err != nil)
	return err
}

// withoutTransaction runs the handler over a transaction that has ended, and fails the attempt.
func (b *bench[T]) withoutTransaction(msg *message.Message, h message.HandlerFunc) error {
	ctx := context.WithoutCancel(msg.Context())
	if err := b.store.kill(ctx); err != nil {
		return err
	}
	_, err := h(msg)
	now, readErr := b.state(ctx)
	switch {
	case readErr != nil:
		b.find(readErr)
	case !reflect.DeepEqual(now, b.before):
		b.find(fmt.Errorf("%s: its transaction was rolled back before it ran, and yet State changed\n%s",
			anotherHandle, difference("before", b.before, "now", now)))
	case err == nil && b.writes:
		b.find(fmt.Errorf("%s: each statement of its transaction failed, and it returned nil", swallows))
	}
	return errPlanted
}

func (b *bench[T]) commitFault() error {
	if b.plan.commit == nil {
		return nil
	}
	b.mu.Lock()
	n := b.attempts
	b.mu.Unlock()
	return b.planting(func() error { return b.plan.commit(n) })
}

// transactionEnded looks at the state after a rollback, or a commit in which no attempt was kept: it must be as if the
// attempt had never been.
func (b *bench[T]) transactionEnded(ctx context.Context, how ended) {
	b.mu.Lock()
	b.committed = b.committed || how.committed
	if how.committed {
		b.outputs = append(b.outputs, how.outputs...)
	}
	skip := b.committed || b.plan.together || b.finding != nil
	b.mu.Unlock()
	if errors.Is(how.err, receipts.ErrTxEnded) {
		b.find(explain(how.err))
		return
	}
	if skip || errors.Is(how.err, receipts.ErrCommitUnknown) {
		return
	}
	now, err := b.state(ctx)
	switch {
	case err != nil:
		b.find(err)
	case !reflect.DeepEqual(now, b.before):
		b.find(fmt.Errorf("%s: its transaction was rolled back, and yet State changed\n%s",
			anotherHandle, difference("before", b.before, "after the rollback", now)))
	}
}

// effects are State and the topics of the outputs.
type effects struct {
	State   any
	Outputs []string
}

func (b *bench[T]) effects(ctx context.Context) (effects, error) {
	state, err := b.state(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	return effects{State: state, Outputs: slices.Sorted(slices.Values(b.outputs))}, err
}

// config is the middleware's, with this bench inside it.
func (b *bench[T]) config(limits sdk.Limits) idempotency.Config {
	cfg := b.c.Config
	if !cfg.OutputsThroughRouter {
		cfg.Outputs = discard{}
	}
	if cfg.Limits == (sdk.Limits{}) {
		cfg.Limits = limits
	}
	cfg.Inside = append([]message.HandlerMiddleware{b.inside}, cfg.Inside...)
	return cfg
}
