package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// crowd is a consumer whose messages are made to share a transaction, whatever the timing: a message of its own, the plug,
// holds the only lane until all the others are pending. What is pending when the lane is free is the next batch.
type crowd[T any] struct {
	*consumer[T]
	ledger *ledger
	mu     sync.Mutex
	plugs  map[string]*plug // by identity
	done   []string         // the plugs that were let go
}

// plug is the message that holds the lane.
type plug struct {
	run     func()        // closes running
	running chan struct{} // closed when its handler has run for the first time
	gate    chan struct{} // closed to let it go
}

// crowdWindow is the window of a crowd, where the clause does not ask for one.
const crowdWindow = 16

// crowdTime is how long the handlers of a batch may run, however slow the machine, and crowdBudget its transaction. Both are
// far more than they take, because the plug, which takes long, counts as one of them.
const (
	crowdTime   = sdk.DefaultLease * 2 / 3
	crowdBudget = sdk.DefaultLease * 5 / 6
)

// crowd starts one. It adds to the plan what makes batches predictable.
func (e *txEnv[T]) crowd(ctx context.Context, p plan[T]) (*crowd[T], error) {
	c := &crowd[T]{ledger: &ledger{}, plugs: map[string]*plug{}}
	if p.window == 0 {
		p.window = crowdWindow
	}
	if p.config.Lanes == 0 {
		p.config.Lanes = 1
	}
	if p.config.BatchTime == 0 && p.config.TxBudget == 0 {
		p.config.BatchTime, p.config.TxBudget = crowdTime, crowdBudget
	}
	own := p.wrap
	p.wrap = func(s receipts.Store[T]) receipts.Store[T] {
		if own != nil {
			s = own(s)
		}
		return ledgerStore[T]{Store: s, l: c.ledger}
	}
	handle := p.handle
	if handle == nil {
		handle = e.apply
	}
	p.handle = func(ctx context.Context, tx T, msg *message.Message) error {
		if p := c.isPlug(msg); p != nil {
			return c.hold(ctx, tx, msg, p)
		}
		return handle(ctx, tx, msg)
	}
	if produce := p.produce; produce != nil {
		p.produce = func(ctx context.Context, tx T, msg *message.Message) ([]*message.Message, error) {
			if p := c.isPlug(msg); p != nil {
				return nil, c.hold(ctx, tx, msg, p)
			}
			return produce(ctx, tx, msg)
		}
	}
	if together := p.together; together != nil {
		p.together = func(ctx context.Context, tx T, msgs []*message.Message) error {
			if p := c.isPlug(msgs[0]); p != nil {
				return c.hold(ctx, tx, msgs[0], p)
			}
			return together(ctx, tx, msgs)
		}
	}
	started, err := e.consume(ctx, p)
	c.consumer = started
	return c, err
}

func (c *crowd[T]) isPlug(msg *message.Message) *plug {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.plugs[msg.UUID]
}

// hold is the plug's handler.
func (c *crowd[T]) hold(ctx context.Context, tx T, msg *message.Message, p *plug) error {
	if err := c.e.apply(ctx, tx, msg); err != nil {
		return err
	}
	p.run()
	select {
	case <-p.gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// gather sends messages and makes them one batch. It returns when the batch can begin, with the place in the ledger before
// which nothing of it has happened.
func (c *crowd[T]) gather(ctx context.Context, ids ...string) (place int, err error) {
	return c.gatherAll(ctx, messagesOf(ids...)...)
}

// messagesOf makes messages as send does.
func messagesOf(ids ...string) []sdk.Message {
	msgs := make([]sdk.Message, len(ids))
	for i, id := range ids {
		msgs[i] = sdk.Message{ID: id, Payload: []byte("effect of " + id)}
	}
	return msgs
}

// gatherAll is gather for messages of any kind.
func (c *crowd[T]) gatherAll(ctx context.Context, msgs ...sdk.Message) (place int, err error) {
	return c.gatherThen(ctx, func() {}, msgs...)
}

// gatherThen calls then when all are pending, before the batch begins. The plug still has to commit then.
func (c *crowd[T]) gatherThen(ctx context.Context, then func(), msgs ...sdk.Message) (place int, err error) {
	let, err := c.plug(ctx)
	defer let()
	if err != nil {
		return 0, err
	}
	if err := c.e.used[0].sendAll(ctx, msgs...); err != nil {
		return 0, err
	}
	err = c.e.eventually(ctx, func() error {
		if n := c.m.Report().Health.Pending; n != len(msgs)+1 {
			return fmt.Errorf("%d messages are pending, want %d", n, len(msgs)+1)
		}
		return nil
	})
	if err == nil {
		err = pause(ctx, settling)
	}
	then()
	return c.ledger.now(), err
}

// settling is the time for a message that is counted as pending to get into the queue. In a bubble it is exact: no time
// passes before everybody waits.
const settling = 20 * time.Millisecond

// plug occupies the lane until let is called, which may be called again.
func (c *crowd[T]) plug(ctx context.Context) (let func(), err error) {
	id := c.e.messageID()
	p := &plug{running: make(chan struct{}), gate: make(chan struct{})}
	p.run = sync.OnceFunc(func() { close(p.running) })
	c.mu.Lock()
	c.plugs[id] = p
	c.mu.Unlock()
	let = sync.OnceFunc(func() { close(p.gate) })
	if err := c.e.send(ctx, id); err != nil {
		return let, err
	}
	timer := time.NewTimer(c.e.h.Patience)
	defer timer.Stop()
	select {
	case <-p.running:
		c.done = append(c.done, id)
		return let, nil
	case <-timer.C:
		return let, errors.New("the message that has to hold the lane was not handled")
	case <-ctx.Done():
		return let, ctx.Err()
	}
}

// with gives those identities and the plugs let go so far: all that has taken effect.
func (c *crowd[T]) with(ids ...string) []string { return append(slices.Clone(c.done), ids...) }

// handedOut gives the number of the attempt, as the engine counts it for this message.
func handedOut(ctx context.Context) int {
	info, ok := sdk.DeliveryFrom(ctx)
	if !ok {
		return 1
	}
	return info.Attempt
}
