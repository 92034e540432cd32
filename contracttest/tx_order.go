package contracttest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// orderKeyClauses are about order keys.
func orderKeyClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T24", Name: "order keys", Capability: "ordered",
				Text: "order key, also under outer middleware that filters, delays or limits: a failing message holds back later " +
					"ones of its key, not those of other keys, while the held fit into half the window; no deadlock, none at " +
					"shutdown",
			},
			check: keysInOrder[T],
		},
		{
			Clause: Clause{
				ID: "T24/batch", Name: "order keys inside batches", Capability: "ordered",
				Text: "order key, with several messages of a key in one batch, and in batches that follow each other: when one fails, " +
					"no later one of its key runs before it has succeeded",
			},
			check: keysInBatches[T],
		},
		{
			Clause: Clause{
				ID: "T24/full", Name: "more held than half the window", Capability: "ordered",
				Text: "when a failing message holds back more than half the window, the subscription stands still and says so; nothing " +
					"overtakes, and when the message succeeds everything goes on, in order",
			},
			check: keysFull[T],
		},
		{
			Clause: Clause{
				ID: "T24/shutdown", Name: "order keys at shutdown", Capability: "ordered",
				Text: "shutdown while a failing message holds back others of its key: it ends in time, and what was held comes again",
			},
			check: keysAtShutdown[T],
		},
	}
}

// The metadata of an ordered message: its key, and whether the filter drops it.
const (
	keyField  = "key"
	dropField = "drop"
)

// The shape of the messages of T24. The failing key's messages fit into half the window.
const (
	orderWindow = 32
	orderKeys   = 4
	orderEach   = 6
	orderSlots  = 4
)

// errHoldsBack is the error of the failing message.
var errHoldsBack = errors.New("the message that holds back its key")

// procession is a run of messages of several keys, and what was seen of it.
type procession struct {
	mu    sync.Mutex
	place map[string]int    // of a message among those of its key that reach the handler
	key   map[string]string // of a message
	order map[string][]string
	done  map[string]bool // its handler has returned nil
	ran   attempts
	wrong error // the first message that ran before its turn
	// failing is the message whose handler fails until it is told otherwise, or for that many times, where this is set.
	failing string
	healed  atomic.Bool
	times   int
	err     error // errHoldsBack, unless it is set
	// takes is how long each handler takes.
	takes time.Duration
}

func newProcession() *procession {
	return &procession{place: map[string]int{}, key: map[string]string{}, order: map[string][]string{}, done: map[string]bool{}}
}

// add makes the next message of a key, "" for one without.
func (p *procession) add(id, key string, n int) sdk.Message {
	p.key[id], p.place[id] = key, len(p.order[key])
	p.order[key] = append(p.order[key], id)
	return ordered(id, key, n)
}

func ordered(id, key string, n int) sdk.Message {
	msg := sdk.Message{ID: id, Payload: fmt.Appendf(nil, "message %d of %q", n, key), Metadata: map[string]string{}}
	if key != "" {
		msg.Metadata[keyField] = key
	}
	return msg
}

// procession makes messages of some keys in turns, and some without a key. Some are for the filter to drop.
func (e *txEnv[T]) procession(filtered bool) (*procession, []sdk.Message) {
	p := newProcession()
	var msgs []sdk.Message
	for i := range orderEach {
		for k := range orderKeys + 1 {
			key := ""
			if k < orderKeys {
				key = fmt.Sprintf("key-%d", k)
			}
			if filtered && (i+k)%3 == 0 {
				drop := ordered(e.messageID(), key, i)
				drop.Metadata[dropField] = "yes"
				msgs = append(msgs, drop)
				continue
			}
			msgs = append(msgs, p.add(e.messageID(), key, i))
		}
	}
	p.failing = p.order["key-1"][1]
	return p, msgs
}

// handle applies effects, notes who runs before his turn, and lets one message fail.
func (p *procession) handle(ctx context.Context, id string, apply func() error) error {
	run := p.ran.next(id)
	p.begin(id)
	if err := errors.Join(apply(), pause(ctx, p.takes)); err != nil {
		return err
	}
	if id == p.failing && !p.healed.Load() && (p.times == 0 || run <= p.times) {
		return cmp.Or(p.err, errHoldsBack)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done[id] = true
	return nil
}

// begin notes it if an earlier message of the key has not been handled yet.
func (p *procession) begin(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := p.key[id]
	if key == "" {
		return
	}
	for _, earlier := range p.order[key][:p.place[id]] {
		if !p.done[earlier] && p.wrong == nil {
			p.wrong = fmt.Errorf("%s: message %d ran before message %d was handled", key, p.place[id], p.place[earlier])
		}
	}
}

func (p *procession) violation() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.wrong
}

// held lists what the failing message holds back, itself included; others is everything else that reaches the handler.
func (p *procession) held() (held, others []string) {
	for _, ids := range p.order {
		if i := slices.Index(ids, p.failing); i >= 0 {
			held = append(held, ids[i:]...)
			ids = ids[:i]
		}
		others = append(others, ids...)
	}
	return held, others
}

// outers are what stands around ours in T24.
func outers() map[string]message.HandlerMiddleware {
	return map[string]message.HandlerMiddleware{
		"nothing": func(h message.HandlerFunc) message.HandlerFunc { return h },
		"a filter": func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				if msg.Metadata.Get(dropField) != "" {
					return nil, nil
				}
				return h(msg)
			}
		},
		"a delay": func(h message.HandlerFunc) message.HandlerFunc {
			var n atomic.Int64
			return func(msg *message.Message) ([]*message.Message, error) {
				_ = pause(msg.Context(), time.Duration(n.Add(1)*7%11)*time.Millisecond) // in no order at all
				return h(msg)
			}
		},
		"a limiter": func(h message.HandlerFunc) message.HandlerFunc {
			slots := make(chan struct{}, orderSlots)
			return func(msg *message.Message) ([]*message.Message, error) {
				slots <- struct{}{}
				defer func() { <-slots }()
				return h(msg)
			}
		},
	}
}

// marching is the plan of a consumer for a procession.
func (e *txEnv[T]) marching(p *procession, l *ledger, outer message.HandlerMiddleware) plan[T] {
	return plan[T]{
		window: orderWindow, outer: []message.HandlerMiddleware{outer}, ordered: true,
		config: idempotency.Config{
			OrderKey:     func(msg *message.Message) string { return msg.Metadata.Get(keyField) },
			OrderPolicy:  idempotency.StandStill,
			RetryBackoff: sdk.Backoff{Min: 10 * time.Millisecond, Max: 50 * time.Millisecond},
		},
		wrap: func(s receipts.Store[T]) receipts.Store[T] {
			return ledgerStore[T]{Store: busyStore[T]{Store: s, b: &busy{}}, l: l} // which knows errBusy
		},
		handle: func(ctx context.Context, tx T, msg *message.Message) error {
			return p.handle(ctx, msg.UUID, func() error { return e.apply(ctx, tx, msg) })
		},
	}
}

// keysInOrder has a message fail under each of the outer middlewares until all that it must not hold back is acked.
func keysInOrder[T any](ctx context.Context, e *txEnv[T]) error {
	var all []string
	ways := outers()
	for _, name := range []string{"nothing", "a filter", "a delay", "a limiter"} {
		ids, err := e.march(ctx, ways[name], name == "a filter")
		if err != nil {
			return fmt.Errorf("under %s: %w", name, err)
		}
		all = append(all, ids...)
		if err := e.compare(ctx, once(all...)); err != nil {
			return fmt.Errorf("under %s: %w", name, err)
		}
	}
	return e.balance(ctx, once(all...))
}

// march is one procession from its start to its end. It returns what reached the handler.
func (e *txEnv[T]) march(ctx context.Context, outer message.HandlerMiddleware, filtered bool) ([]string, error) {
	p, msgs := e.procession(filtered)
	p.takes = time.Millisecond // so that lanes overlap
	l := &ledger{}
	c, err := e.consume(ctx, e.marching(p, l, outer))
	if err != nil {
		return nil, err
	}
	if err := e.used[0].sendAll(ctx, msgs...); err != nil {
		return nil, err
	}
	held, others := p.held()
	for _, id := range others {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return nil, fmt.Errorf("a message that nothing holds back: %w", err)
		}
	}
	err = e.eventually(ctx, func() error { return wantFired(int64(p.ran.of(p.failing)) - 1) }) // it has come again
	if err != nil {
		return nil, err
	}
	for _, id := range held {
		if n := e.w.ackCount(id); n > 0 {
			return nil, fmt.Errorf("%q was acked while it, or one before it, fails", id)
		}
	}
	p.healed.Store(true)
	for _, msg := range msgs {
		if err := e.ackedTimes(ctx, msg.ID, 1); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(p.violation(), p.committed(l), e.quiet(ctx), c.stop()); err != nil {
		return nil, err
	}
	return append(held, others...), nil
}

// committed fails if the transactions that committed a key's messages are not in the order of the key.
func (p *procession) committed(l *ledger) error {
	in := l.committed()
	for key, ids := range p.order {
		if key != "" && !slices.IsSortedFunc(ids, func(a, b string) int { return cmp.Compare(in[a], in[b]) }) {
			return fmt.Errorf("%s was not committed in order", key)
		}
	}
	return nil
}

// keysInBatches has a message fail twice whose followers are pending with it: all in one batch, in batches of two, and where
// all messages of a batch stand or fall together.
func keysInBatches[T any](ctx context.Context, e *txEnv[T]) error {
	var all []string
	for _, way := range []struct {
		name string
		size int
		idempotency.Atomicity
		err error
	}{
		{"all in one batch", 0, idempotency.PerMessage, nil},
		{"batches of two", 2, idempotency.PerMessage, nil},
		{"all or nothing", 0, idempotency.PerBatch, nil},
		{"all or nothing, batches of two", 2, idempotency.PerBatch, nil},
		{"contention", 0, idempotency.PerMessage, errBusy},
		{"contention, all or nothing", 0, idempotency.PerBatch, errBusy},
	} {
		p, msgs := e.procession(false)
		p.times, p.err = 2, way.err
		l := &ledger{}
		march := e.marching(p, l, outers()["nothing"])
		march.window++ // for the plug
		march.config.BatchSize, march.config.Atomicity = way.size, way.Atomicity
		ids, err := e.marchTogether(ctx, march, msgs)
		if err := errors.Join(err, p.violation()); err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
		if n := p.ran.of(p.failing); n < 3 {
			return fmt.Errorf("%s: the failing message ran %d times", way.name, n)
		}
		if err := p.committed(l); err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
		all = append(all, ids...)
	}
	return e.balance(ctx, once(all...))
}

// marchTogether has messages pending together, waits until all of them are acked, and gives all that took effect.
func (e *txEnv[T]) marchTogether(ctx context.Context, march plan[T], msgs []sdk.Message) ([]string, error) {
	c, err := e.crowd(ctx, march)
	if err != nil {
		return nil, err
	}
	if _, err := c.gatherAll(ctx, msgs...); err != nil {
		return nil, err
	}
	for _, msg := range msgs {
		if err := e.ackedTimes(ctx, msg.ID, 1); err != nil {
			return nil, err
		}
	}
	ids := c.with()
	for _, msg := range msgs {
		ids = append(ids, msg.ID)
	}
	return ids, errors.Join(e.quiet(ctx), c.stop())
}

// keysFull has one key with more messages than half the window, of which the first fails.
func keysFull[T any](ctx context.Context, e *txEnv[T]) error {
	p := newProcession()
	var msgs []sdk.Message
	for i := range orderWindow {
		msgs = append(msgs, p.add(e.messageID(), "the failing key", i))
	}
	for i := range orderWindow {
		msgs = append(msgs, p.add(e.messageID(), "another key", i))
	}
	p.failing = msgs[0].ID
	l := &ledger{}
	c, err := e.consume(ctx, e.marching(p, l, outers()["nothing"]))
	if err != nil {
		return err
	}
	if err := e.used[0].sendAll(ctx, msgs...); err != nil {
		return err
	}
	still := func(want bool) error {
		return e.eventually(ctx, func() error {
			if h := c.m.Report().Health; h.StandsStill != want || h.StandsStillSince.IsZero() == want {
				return fmt.Errorf("health says that the subscription stands still: %t, since %v; want %t", h.StandsStill, h.StandsStillSince, want)
			}
			return nil
		})
	}
	if err := still(true); err != nil {
		return err
	}
	for _, msg := range msgs[:orderWindow] {
		if e.w.ackCount(msg.ID) > 0 {
			return fmt.Errorf("%q was acked while it, or one before it, fails", msg.ID)
		}
	}
	p.healed.Store(true)
	ids := make([]string, len(msgs))
	for i, msg := range msgs {
		ids[i] = msg.ID
		if err := e.ackedTimes(ctx, msg.ID, 1); err != nil {
			return err
		}
	}
	if err := errors.Join(still(false), p.violation(), p.committed(l)); err != nil {
		return err
	}
	return e.balance(ctx, once(ids...))
}

// keysAtShutdown ends a consumer, under a limiter, while one message of a key fails and the others of it wait. What was not
// acked has to come to the next consumer.
func keysAtShutdown[T any](ctx context.Context, e *txEnv[T]) error {
	p, msgs := e.procession(false)
	c, err := e.consume(ctx, e.marching(p, &ledger{}, outers()["a limiter"]))
	if err != nil {
		return err
	}
	if err := e.used[0].sendAll(ctx, msgs...); err != nil {
		return err
	}
	held, others := p.held()
	for _, id := range others {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	start := time.Now()
	if err := c.stop(); err != nil {
		return fmt.Errorf("with %d messages held back: %w", len(held), err)
	}
	if took := time.Since(start); took > e.h.Patience {
		return fmt.Errorf("with %d messages held back the consumer took %v to stop", len(held), took)
	}
	if err := errors.Join(p.violation(), e.compare(ctx, once(others...))); err != nil {
		return err
	}
	p.healed.Store(true)
	next, err := e.consume(ctx, e.marching(p, &ledger{}, outers()["nothing"]))
	if err != nil {
		return err
	}
	for _, id := range held {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return err
		}
	}
	if r := next.m.Report(); r.Replayed > 0 {
		return fmt.Errorf("%d messages came again though they had been acked", r.Replayed)
	}
	var all []string
	for _, msg := range msgs {
		all = append(all, msg.ID)
	}
	return e.balance(ctx, once(all...))
}
