package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// batchClauses are about messages that share a transaction.
func batchClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T12", Name: "batch, per message",
				Text: "batch, per message: one bad message leaves the others committed and acked once",
			},
			check: oneBad[T],
		},
		{
			Clause: Clause{
				ID: "T12/permanent", Name: "batch, one message given up",
				Text: "batch, per message: one message that its handler gives up is diverted; the others are committed and acked once",
			},
			check: oneGivenUp[T],
		},
		{
			Clause: Clause{
				ID: "T12/slow", Name: "batch of slow handlers",
				Text: "a batch takes up no more messages once its handlers ran BatchTime: slow handlers do not wait for each other's " +
					"commit",
			},
			check: slowHandlers[T],
		},
		{
			Clause: Clause{
				ID: "T12/batch", Name: "HandleBatch, per message",
				Text: "a batch handler that fails because of one message: rolled back, halved, repeated; only a message that failed " +
					"alone is charged",
			},
			check: oneBadTogether[T],
		},
		{
			Clause: Clause{
				ID: "T13", Name: "batch, all or nothing",
				Text: "batch, all or nothing: one bad message, nothing of that batch acked or applied; earlier batches stay",
			},
			check: allOrNothing[T],
		},
		{
			Clause: Clause{
				ID: "T13/batch", Name: "HandleBatch, all or nothing",
				Text: "a batch handler that fails where all messages stand or fall together: nothing of it acked or applied, and only " +
					"a message that failed alone is charged",
			},
			check: allOrNothingTogether[T],
		},
	}
}

// badWays are the ways in which one message of a batch is bad: it does its work, and then this.
func (e *txEnv[T]) badWays() map[string]func(ctx context.Context, tx T, msg *message.Message) error {
	ways := map[string]func(ctx context.Context, tx T, msg *message.Message) error{
		"error":  func(context.Context, T, *message.Message) error { return errors.New("a bad message") },
		"panic":  func(context.Context, T, *message.Message) error { panic("a bad message") },
		"goexit": func(context.Context, T, *message.Message) error { runtime.Goexit(); return nil },
		"nack":   func(_ context.Context, _ T, msg *message.Message) error { msg.Nack(); return nil },
	}
	if e.s.Violate == nil {
		e.note("no message whose statement violates a constraint: the store harness has no hook Violate")
		return ways
	}
	ways["constraint"] = func(ctx context.Context, tx T, _ *message.Message) error { return e.violate(ctx, tx) }
	return ways
}

// violate is the hook, which has to do what it is for.
func (e *txEnv[T]) violate(ctx context.Context, tx T) error {
	if err := e.s.Violate(ctx, tx); err != nil {
		return err
	}
	return idempotency.Permanent(errors.New("the hook Violate has violated nothing")) // fails the clause: a dead letter
}

// batchSize is the number of messages in a batch of these clauses.
const batchSize = 5

// trouble is a batch with one bad message: one that fails throughout its first delivery.
type trouble struct {
	ids  []string
	bad  string
	once sync.Once
	seen error // what the first run of the bad message's second delivery, or of anybody's, saw
}

// oneBad has a batch for each way to be bad. When the bad message comes again, its neighbours have to be committed, and
// nothing of itself.
func oneBad[T any](ctx context.Context, e *txEnv[T]) error {
	ways := e.badWays()
	parts, err := e.parts(ctx)
	if err != nil {
		return err
	}
	out := &sink{}
	var tried attempts
	var now *trouble
	var c *crowd[T]
	var way func(ctx context.Context, tx T, msg *message.Message) error
	c, err = e.crowd(ctx, plan[T]{
		config: idempotency.Config{Outputs: out}, to: "anywhere",
		produce: func(ctx context.Context, tx T, msg *message.Message) ([]*message.Message, error) {
			tried.next(msg.UUID)
			if msg.UUID == now.bad && handedOut(ctx) > 1 {
				now.once.Do(func() { now.seen = e.neighboursOnly(ctx, c, now) })
			}
			if err := e.apply(ctx, tx, msg); err != nil {
				return nil, err
			}
			outputs := []*message.Message{message.NewMessage("", []byte(outputOf(msg.UUID)))}
			if msg.UUID == now.bad && handedOut(ctx) == 1 {
				return outputs, way(ctx, tx, msg)
			}
			return outputs, nil
		},
	})
	if err != nil {
		return err
	}
	names := slices.Sorted(maps.Keys(ways))
	var all []string
	for i, name := range names {
		ids := e.ids(batchSize)
		now, way = &trouble{ids: ids, bad: ids[(i+2)%batchSize]}, ways[name]
		if err := e.inTrouble(ctx, c, now); err != nil {
			return fmt.Errorf("bad by %s: %w", name, err)
		}
		all = append(all, ids...)
		if parts {
			if err := ranOnce(&tried, now); err != nil {
				return fmt.Errorf("bad by %s: %w", name, err)
			}
		}
	}
	if r := c.m.Report(); r.Failed != uint64(len(names)) || r.Returned != 0 {
		return fmt.Errorf("%d attempts were charged and %d deliveries returned; want %d and none", r.Failed, r.Returned, len(names))
	}
	if err := e.balance(ctx, once(c.with(all...)...)); err != nil {
		return err
	}
	return out.holds(all)
}

// middle picks the message of a batch that is handled in the middle, whatever the order in which they arrive.
type middle struct {
	mu   sync.Mutex
	runs int
	id   string
}

// is tells whether the message, whose handler runs, is the one.
func (m *middle) is(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.runs++; m.runs == batchSize/2+1 {
		m.id = id
	}
	return m.id == id
}

// oneGivenUp has one message of a batch that its handler gives up: it is diverted, and the others are committed.
func oneGivenUp[T any](ctx context.Context, e *txEnv[T]) error {
	ids := e.ids(batchSize)
	bad := &middle{}
	c, err := e.crowd(ctx, plan[T]{handle: func(ctx context.Context, tx T, msg *message.Message) error {
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		if bad.is(msg.UUID) {
			return idempotency.Permanent(errors.New("a message that can never be handled"))
		}
		return nil
	}})
	if err != nil {
		return err
	}
	place, err := c.gather(ctx, ids...)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	if err := c.ledger.together(place, ids...); err != nil {
		return err
	}
	if r := c.m.Report(); r.Failed+r.Returned > 0 || r.Diverted != 1 {
		return fmt.Errorf("%d failed, %d returned, %d diverted; want none but one diverted", r.Failed, r.Returned, r.Diverted)
	}
	good := slices.DeleteFunc(ids, bad.is)
	want := once(c.with(good...)...)
	want.dead = map[receipts.DeadLetterKind]int{receipts.KindPermanent: 1}
	return e.balance(ctx, want)
}

// slowHandlers has a batch's handlers each take longer than a batch may take up messages: each has to be committed on its
// own, as where there are no batches.
func slowHandlers[T any](ctx context.Context, e *txEnv[T]) error {
	const batchTime = 50 * time.Millisecond
	ids := e.ids(batchSize)
	c, err := e.crowd(ctx, plan[T]{
		config: idempotency.Config{BatchTime: batchTime},
		handle: func(ctx context.Context, tx T, msg *message.Message) error {
			return errors.Join(e.apply(ctx, tx, msg), pause(ctx, batchTime+batchTime/10))
		},
	})
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
	in := c.ledger.committed()
	alone := map[int]bool{}
	for _, id := range ids {
		alone[in[id]] = true
	}
	if len(alone) != len(ids) {
		return fmt.Errorf("%d messages with slow handlers were committed in %d transactions", len(ids), len(alone))
	}
	return e.balance(ctx, once(c.with(ids...)...))
}

// parts tells whether the store can undo one message's work alone.
func (e *txEnv[T]) parts(ctx context.Context) (bool, error) {
	info, err := e.db.Store.Check(ctx)
	if err != nil {
		return false, fmt.Errorf("checking the store: %w", err)
	}
	if !info.Parts {
		e.note("the store has no parts: a good message may run again because of a bad one")
	}
	return info.Parts, nil
}

// inTrouble makes the batch and waits until all of it is acked, each once.
func (e *txEnv[T]) inTrouble(ctx context.Context, c *crowd[T], now *trouble) error {
	place, err := c.gather(ctx, now.ids...)
	if err != nil {
		return err
	}
	for _, id := range now.ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	if err := errors.Join(c.ledger.together(place, now.ids...), now.seen); err != nil {
		return err
	}
	for _, id := range now.ids {
		if n := e.w.ackCount(id); n != 1 {
			return fmt.Errorf("%q was acked %d times", id, n)
		}
	}
	return e.quiet(ctx)
}

// neighboursOnly fails unless everything but the bad message is committed: effects, receipts and outputs.
func (e *txEnv[T]) neighboursOnly(ctx context.Context, c *crowd[T], now *trouble) error {
	ctx = context.WithoutCancel(ctx)
	got, err := e.effects(ctx)
	if err != nil {
		return err
	}
	if got[now.bad] != 0 {
		return errors.New("the failed attempt of the bad message is committed")
	}
	for _, id := range now.ids {
		if id != now.bad && got[id] != 1 {
			return fmt.Errorf("%q was good, and its effect is committed %d times when the bad one comes again", id, got[id])
		}
	}
	stats, err := e.db.Store.Stats(ctx)
	if err != nil {
		return fmt.Errorf("reading the receipts: %w", err)
	}
	if stats.Done != len(got) {
		return fmt.Errorf("%d receipts for %d effects when the bad one comes again", stats.Done, len(got))
	}
	if n := len(got) - len(c.done); stats.Outputs != n {
		return fmt.Errorf("%d outputs are stored of %d good messages when the bad one comes again", stats.Outputs, n)
	}
	return nil
}

// ranOnce fails if a good message ran more than once because of the bad one, which ran at least once for each delivery.
func ranOnce(tried *attempts, now *trouble) error {
	for _, id := range now.ids {
		switch n := tried.of(id); {
		case id == now.bad && n < 2:
			return fmt.Errorf("the handler of the bad %q ran %d times, want at least 2", id, n)
		case id != now.bad && n != 1:
			return fmt.Errorf("the handler of the good %q ran %d times, want 1", id, n)
		}
	}
	return nil
}

// together is a batch handler's life: who is bad, how it fails, and whether the bad one has failed alone.
type together[T any] struct {
	mu    sync.Mutex
	e     *txEnv[T]
	bad   string
	way   string
	alone bool
	calls []int // how many messages each call got
	early error // what was committed, or acked, before the bad one had failed alone
	watch func() error
}

// handle applies all effects and fails as long as the bad message is among others, and once when it is alone.
func (g *together[T]) handle(ctx context.Context, tx T, msgs []*message.Message) error {
	for _, msg := range msgs {
		if err := g.e.apply(msg.Context(), tx, msg); err != nil {
			return err
		}
	}
	if !g.fails(msgs) {
		return nil
	}
	switch g.way {
	case "panic":
		panic("a batch with a bad message")
	case "goexit":
		runtime.Goexit()
	}
	return errors.New("a batch with a bad message")
}

func (g *together[T]) fails(msgs []*message.Message) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls = append(g.calls, len(msgs))
	bad := slices.ContainsFunc(msgs, func(msg *message.Message) bool { return msg.UUID == g.bad })
	if !bad || g.alone {
		return false
	}
	g.alone = len(msgs) == 1
	if g.watch != nil && g.early == nil {
		g.early = g.watch()
	}
	return true
}

// largest is the most messages that one call got.
func (g *together[T]) largest() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Max(append(g.calls, 0))
}

// oneBadTogether has one bad message in a batch of a batch handler: it has to be found without charging the others.
func oneBadTogether[T any](ctx context.Context, e *txEnv[T]) error {
	g := &together[T]{e: e}
	c, err := e.crowd(ctx, plan[T]{together: g.handle})
	if err != nil {
		return err
	}
	var all []string
	for i, way := range []string{"error", "panic", "goexit"} {
		ids := e.ids(batchSize)
		all = append(all, ids...)
		g.bad, g.way, g.alone, g.calls = ids[i], way, false, nil
		if err := e.batchOf(ctx, c, g, ids); err != nil {
			return fmt.Errorf("bad by %s: %w", way, err)
		}
		if r := c.m.Report(); r.Failed != uint64(i+1) || r.Returned != 0 {
			return fmt.Errorf("bad by %s: %d attempts were charged so far, and %d deliveries returned; want %d and none",
				way, r.Failed, r.Returned, i+1)
		}
	}
	return e.balance(ctx, once(c.with(all...)...))
}

// batchOf gathers messages for a batch handler and waits until each is acked.
func (e *txEnv[T]) batchOf(ctx context.Context, c *crowd[T], g *together[T], ids []string) error {
	if _, err := c.gather(ctx, ids...); err != nil {
		return err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	if n := g.largest(); n < len(ids) {
		return fmt.Errorf("the batch handler never got more than %d of %d messages", n, len(ids))
	}
	return errors.Join(g.early, e.quiet(ctx))
}

// allOrNothing has a batch with one bad message for each way to be bad. When the first of it comes again, nothing of it may
// be committed or acked.
func allOrNothing[T any](ctx context.Context, e *txEnv[T]) error {
	ways := e.badWays()
	var now *trouble
	var way func(ctx context.Context, tx T, msg *message.Message) error
	var c *crowd[T]
	c, err := e.crowd(ctx, plan[T]{
		config: idempotency.Config{Atomicity: idempotency.PerBatch},
		handle: func(ctx context.Context, tx T, msg *message.Message) error {
			if handedOut(ctx) > 1 {
				now.once.Do(func() { now.seen = e.nothingOf(ctx, now.ids) })
			}
			if err := e.apply(ctx, tx, msg); err != nil {
				return err
			}
			if msg.UUID == now.bad && handedOut(ctx) == 1 {
				return way(ctx, tx, msg)
			}
			return nil
		},
	})
	if err != nil {
		return err
	}
	var all []string
	for i, name := range slices.Sorted(maps.Keys(ways)) {
		ids := e.ids(batchSize)
		now, way = &trouble{ids: ids, bad: ids[(i+2)%batchSize]}, ways[name]
		place, err := c.gather(ctx, ids...)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if err := e.ackedTimes(ctx, id, 1); err != nil {
				return fmt.Errorf("bad by %s: %w", name, err)
			}
		}
		all = append(all, ids...)
		if err := errors.Join(c.ledger.together(place, ids...), now.seen, e.quiet(ctx)); err != nil {
			return fmt.Errorf("bad by %s: %w", name, err)
		}
		if r := c.m.Report(); r.Failed != uint64(i+1) || r.Returned != uint64((i+1)*(batchSize-1)) {
			return fmt.Errorf("bad by %s: %d attempts were charged so far, and %d deliveries returned; want %d, and the others",
				name, r.Failed, r.Returned, i+1)
		}
		if err := e.compare(ctx, once(c.with(all...)...)); err != nil {
			return fmt.Errorf("bad by %s: %w", name, err)
		}
	}
	return e.balance(ctx, once(c.with(all...)...))
}

// nothingOf fails if one of those messages has taken effect or was acked, or if there are more receipts than effects.
func (e *txEnv[T]) nothingOf(ctx context.Context, ids []string) error {
	got, err := e.effects(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	for _, id := range ids {
		if got[id] != 0 {
			return fmt.Errorf("%q has taken effect though one of its batch failed", id)
		}
		if e.w.ackCount(id) > 0 {
			return fmt.Errorf("%q was acked though one of its batch failed", id)
		}
	}
	return e.compare(context.WithoutCancel(ctx), account{effects: got})
}

// allOrNothingTogether is allOrNothing for a batch handler. Whose failure it is, is known only when one fails alone.
func allOrNothingTogether[T any](ctx context.Context, e *txEnv[T]) error {
	ids := e.ids(batchSize)
	g := &together[T]{e: e, bad: ids[2]}
	c, err := e.crowd(ctx, plan[T]{together: g.handle, config: idempotency.Config{Atomicity: idempotency.PerBatch}})
	if err != nil {
		return err
	}
	g.watch = func() error { return e.ackedAreApplied(ctx) }
	if err := e.batchOf(ctx, c, g, ids); err != nil {
		return err
	}
	if r := c.m.Report(); r.Failed != 1 || r.Returned < batchSize {
		return fmt.Errorf("%d attempts were charged, want 1; %d deliveries returned, want at least the first batch", r.Failed, r.Returned)
	}
	return e.balance(ctx, once(c.with(ids...)...))
}

// ackedAreApplied fails if something is acked that has not taken effect, or something has taken effect twice or without its
// receipt.
func (e *txEnv[T]) ackedAreApplied(ctx context.Context) error {
	got, err := e.effects(ctx)
	if err != nil {
		return err
	}
	for _, id := range e.w.acked() {
		if got[id] != 1 {
			return fmt.Errorf("%q is acked, and its effect was applied %d times", id, got[id])
		}
	}
	return e.compare(ctx, once(slices.Collect(maps.Keys(got))...))
}
