package contracttest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// contentionClauses are about other transactions that are in the way.
func contentionClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T15", Name: "contention is nobody's attempt",
				Text: "40001, 40P01, 1213, 1205, SQLITE_BUSY and a read-then-write SQLite handler: retried, counted as " +
					"contention, not as attempts",
			},
			check: contentionAnywhere[T],
		},
		{
			Clause: Clause{
				ID: "T15/held", Name: "another writer holds what a handler needs",
				Text: "while another transaction holds a row that the handlers write: retried, counted as contention, not as " +
					"attempts",
			},
			check: heldRow[T],
		},
		{
			Clause: Clause{
				ID: "T15/read", Name: "handlers that read, then write",
				Text: "handlers that read a row and then write it, in two consumers at once: each effect is there once",
			},
			store: []string{"Read"}, check: readThenWrite[T],
		},
	}
}

// errBusy is contention that a clause makes. The store that makes it knows it.
var errBusy = errors.New("another transaction is in the way, says the clause")

// step is a call of a transaction at which contention can be met.
type step string

// The steps, in the order of a transaction.
const (
	stepBegin     step = "begin"
	stepClaim     step = "claim"
	stepPart      step = "part"
	stepStatement step = "a handler's statement"
	stepOutputs   step = "outputs"
	stepKeep      step = "keep"
	stepCommit    step = "commit"
)

// busy says at which step contention is met, and how often.
type busy struct {
	mu    sync.Mutex
	at    step
	left  int
	fired int
}

func (b *busy) arm(at step, times int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.at, b.left, b.fired = at, times, 0
}

// met is errBusy where it is time for it.
func (b *busy) met(at step) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if at != b.at || b.left == 0 {
		return nil
	}
	b.left--
	b.fired++
	return fmt.Errorf("%s: %w", at, errBusy)
}

func (b *busy) hits() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.fired
}

// busyStore is a store whose transactions meet contention.
type busyStore[T any] struct {
	receipts.Store[T]
	b *busy
}

// Begin begins, unless somebody is in the way.
func (s busyStore[T]) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
	if err := s.b.met(stepBegin); err != nil {
		return nil, err
	}
	tx, err := s.Store.Begin(ctx, opts)
	if err != nil {
		return nil, err
	}
	return busyTx[T]{Tx: tx, b: s.b}, nil
}

// Classify knows errBusy.
func (s busyStore[T]) Classify(err error) receipts.Class {
	if errors.Is(err, errBusy) {
		return receipts.ClassContention
	}
	return s.Store.Classify(err)
}

type busyTx[T any] struct {
	receipts.Tx[T]
	b *busy
}

// Claim claims, unless somebody is in the way.
func (t busyTx[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	if err := t.b.met(stepClaim); err != nil {
		return nil, err
	}
	return t.Tx.Claim(ctx, claims)
}

// Part begins a part, unless somebody is in the way.
func (t busyTx[T]) Part(ctx context.Context) error { return orElse(ctx, t.b.met(stepPart), t.Tx.Part) }

// Keep keeps a part, unless somebody is in the way.
func (t busyTx[T]) Keep(ctx context.Context) error { return orElse(ctx, t.b.met(stepKeep), t.Tx.Keep) }

// AddOutputs stores outputs, unless somebody is in the way.
func (t busyTx[T]) AddOutputs(ctx context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	if err := t.b.met(stepOutputs); err != nil {
		return nil, err
	}
	return t.Tx.AddOutputs(ctx, outputs)
}

// Commit commits, unless somebody is in the way: then nothing is.
func (t busyTx[T]) Commit(ctx context.Context) error {
	if err := t.b.met(stepCommit); err != nil {
		return errors.Join(err, t.Rollback(ctx))
	}
	return t.Tx.Commit(ctx)
}

func orElse(ctx context.Context, err error, call func(context.Context) error) error {
	if err != nil {
		return err
	}
	return call(ctx)
}

// contentionAnywhere has a batch meet contention twice at each step, and once more often than a delivery puts up with.
func contentionAnywhere[T any](ctx context.Context, e *txEnv[T]) error {
	parts, err := e.parts(ctx)
	if err != nil {
		return err
	}
	steps := []step{stepBegin, stepClaim, stepStatement, stepOutputs, stepCommit}
	if parts {
		steps = append(steps, stepPart, stepKeep)
	}
	b, out := &busy{}, &sink{}
	c, err := e.crowd(ctx, plan[T]{
		config: idempotency.Config{Outputs: out, ContentionRetries: 4}, to: "anywhere",
		wrap: func(s receipts.Store[T]) receipts.Store[T] { return busyStore[T]{Store: s, b: b} },
		produce: func(ctx context.Context, tx T, msg *message.Message) ([]*message.Message, error) {
			if err := e.apply(ctx, tx, msg); err != nil {
				return nil, err
			}
			return []*message.Message{message.NewMessage("", []byte(outputOf(msg.UUID)))}, b.met(stepStatement)
		},
	})
	if err != nil {
		return err
	}
	var all []string
	for _, at := range steps {
		ids := e.ids(batchSize)
		all = append(all, ids...)
		if err := e.contended(ctx, c, b, ids, func() { b.arm(at, 2) }); err != nil {
			return fmt.Errorf("contention at %s: %w", at, err)
		}
		if n := c.m.Report().Returned; n > 0 {
			return fmt.Errorf("contention at %s: %d deliveries went back to the broker", at, n)
		}
	}
	ids := e.ids(batchSize)
	all = append(all, ids...)
	const often = 40 // more than a batch, its halves and each message alone are tried within one delivery
	if err := e.contended(ctx, c, b, ids, func() { b.arm(stepStatement, often) }); err != nil {
		return fmt.Errorf("contention %d times: %w", often, err)
	}
	if c.m.Report().Returned == 0 {
		return fmt.Errorf("contention %d times: no delivery went back to the broker", often)
	}
	if err := e.balance(ctx, once(c.with(all...)...)); err != nil {
		return err
	}
	return out.holds(all)
}

// contended has a batch meet contention and waits until all of it is acked.
func (e *txEnv[T]) contended(ctx context.Context, c *crowd[T], b *busy, ids []string, arm func()) error {
	before := c.m.Report()
	_, err := c.gatherThen(ctx, arm, messagesOf(ids...)...)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	if err := errors.Join(wantFired(int64(b.hits())), e.quiet(ctx)); err != nil {
		return err
	}
	switch r := c.m.Report(); {
	case r.Failed > 0:
		return fmt.Errorf("%d attempts were charged", r.Failed)
	case r.Contention == before.Contention:
		return errors.New("it was not counted as contention")
	case r.Outages > 0:
		return errors.New("it was taken for an outage")
	}
	return e.ackedAreApplied(ctx)
}

// hot is a counter that everybody writes.
const hot = "hot"

// heldRow has another transaction write the row that every handler writes, and keep it until that has been noticed.
func heldRow[T any](ctx context.Context, e *txEnv[T]) error {
	c, err := e.consume(ctx, plan[T]{handle: func(ctx context.Context, tx T, msg *message.Message) error {
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		return e.s.Apply(ctx, tx, hot, 1)
	}})
	if err != nil {
		return err
	}
	other, err := e.db.Store.Begin(ctx, receipts.TxOptions{})
	if err != nil {
		return fmt.Errorf("beginning the other transaction: %w", err)
	}
	if err := e.holds(ctx, other.Raw()); err != nil {
		return errors.Join(err, other.Rollback(ctx))
	}
	ids := e.ids(batchSize)
	err = e.send(ctx, ids...)
	if err == nil {
		err = e.eventually(ctx, func() error {
			if c.m.Report().Contention == 0 {
				return errors.New("the other transaction was not noticed as contention")
			}
			return nil
		})
	}
	if err := errors.Join(err, other.Rollback(ctx)); err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	if r := c.m.Report(); r.Failed > 0 || r.Outages > 0 {
		return fmt.Errorf("%d attempts were charged, %d outages seen", r.Failed, r.Outages)
	}
	want := once(ids...)
	want.effects[hot], want.receipts = int64(len(ids)), len(ids)
	return e.balance(ctx, want)
}

// holds writes the row. Where the transaction can be asked for it, it has been written then: what is only queued locks nothing.
func (e *txEnv[T]) holds(ctx context.Context, tx T) error {
	err := e.s.Apply(ctx, tx, hot, 100)
	if err == nil && e.s.Read != nil {
		_, err = e.s.Read(ctx, tx, hot)
	}
	return err
}

// readThenWrite has two consumers, each with batches, count with one counter: what it reads decides what it writes.
func readThenWrite[T any](ctx context.Context, e *txEnv[T]) error {
	handle := func(ctx context.Context, tx T, msg *message.Message) error {
		n, err := e.s.Read(ctx, tx, hot)
		if err != nil {
			return err
		}
		return errors.Join(e.s.Apply(ctx, tx, hot, 1), e.s.Apply(ctx, tx, fmt.Sprintf("%s-%d", hot, n), 1))
	}
	var consumers []*consumer[T]
	for range 2 {
		c, err := e.consume(ctx, plan[T]{handle: handle})
		if err != nil {
			return err
		}
		consumers = append(consumers, c)
	}
	ids := e.ids(8 * batchSize)
	if err := e.send(ctx, ids...); err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	for _, c := range consumers {
		if r := c.m.Report(); r.Failed > 0 {
			return fmt.Errorf("%d attempts were charged", r.Failed)
		}
	}
	want := account{effects: map[string]int64{hot: int64(len(ids))}, receipts: len(ids)}
	for i := range ids { // each has read what the one before it had written
		want.effects[fmt.Sprintf("%s-%d", hot, i)] = 1
	}
	return e.balance(ctx, want)
}
