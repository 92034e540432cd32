package contracttest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// duplicateClauses are about copies of a message that come at once.
func duplicateClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T14", Name: "duplicates inside a batch",
				Text: "a duplicate inside one batch takes its first copy's outcome; a batch of only duplicates writes nothing " +
					"(TxSettler apart)",
			},
			check: duplicatesInside[T],
		},
	}
}

// duplicatesInside has copies of a message in one batch: of one that succeeds, of one whose first copy fails, with another
// payload, and nothing but copies of what is done.
func duplicatesInside[T any](ctx context.Context, e *txEnv[T]) error {
	ids := e.ids(4)
	good, other, bad, changed := ids[0], ids[1], ids[2], ids[3]
	var tried attempts
	var tokens sync.Map // of the deliveries whose handler failed
	c, err := e.crowd(ctx, plan[T]{handle: func(ctx context.Context, tx T, msg *message.Message) error {
		tried.next(msg.UUID)
		if err := e.apply(ctx, tx, msg); err != nil {
			return err
		}
		if info, ok := sdk.DeliveryFrom(ctx); ok && msg.UUID == bad && info.Attempt == 1 {
			tokens.Store(info.Token, true)
			return errors.New("a bad message")
		}
		return nil
	}})
	if err != nil {
		return err
	}
	if err := e.goodCopies(ctx, c, &tried, good, other); err != nil {
		return fmt.Errorf("copies of good messages: %w", err)
	}
	before := c.m.Report()
	if err := e.copies(ctx, c, map[string]int{bad: 2}, messagesOf(bad, bad)...); err != nil {
		return fmt.Errorf("copies of a bad message: %w", err)
	}
	failing := 0
	tokens.Range(func(any, any) bool { failing++; return true })
	if r := c.m.Report(); failing != 1 || r.Failed != before.Failed+1 || r.Returned != before.Returned+1 {
		return fmt.Errorf("copies of a bad message: %d of its deliveries ran, %d were charged, %d returned; want 1 each",
			failing, r.Failed-before.Failed, r.Returned-before.Returned)
	}
	conflicting := sdk.Message{ID: changed, Payload: []byte("something else")}
	if err := e.copies(ctx, c, map[string]int{changed: 2}, append(messagesOf(changed), conflicting)...); err != nil {
		return fmt.Errorf("copies with different payloads: %w", err)
	}
	if r := c.m.Report(); r.Conflicted != 1 {
		return fmt.Errorf("copies with different payloads: %d conflicts, want 1", r.Conflicted)
	}
	fresh := e.ids(3)
	mixed := []string{fresh[0], good, fresh[1], other, fresh[2]}
	acks := e.onceMore(mixed)
	if err := e.copies(ctx, c, acks, messagesOf(mixed...)...); err != nil {
		return fmt.Errorf("new messages among duplicates: %w", err)
	}
	ids = append(ids, fresh...)
	if err := e.compare(ctx, withConflict(c.with(ids...))); err != nil {
		return fmt.Errorf("new messages among duplicates: %w", err)
	}
	if err := e.nothingNew(ctx, c, good, other, bad); err != nil {
		return fmt.Errorf("nothing but duplicates: %w", err)
	}
	return e.balance(ctx, withConflict(c.with(ids...)))
}

// withConflict is the account of identities one of which came with another payload, too.
func withConflict(ids []string) account {
	want := once(ids...)
	want.dead = map[receipts.DeadLetterKind]int{receipts.KindConflict: 1}
	return want
}

// onceMore gives the number of acks that each of those has when it is acked once more.
func (e *txEnv[T]) onceMore(ids []string) map[string]int {
	acks := map[string]int{}
	for _, id := range ids {
		acks[id] = e.w.ackCount(id) + 1
	}
	return acks
}

// copies gathers messages and waits for that many acks of each identity.
func (e *txEnv[T]) copies(ctx context.Context, c *crowd[T], acks map[string]int, msgs ...sdk.Message) error {
	if _, err := c.gatherAll(ctx, msgs...); err != nil {
		return err
	}
	for id, n := range acks {
		if err := e.ackedTimes(ctx, id, n); err != nil {
			return err
		}
	}
	return e.quiet(ctx)
}

// goodCopies has two and three copies of two messages in one batch: one of each runs, the others are replays.
func (e *txEnv[T]) goodCopies(ctx context.Context, c *crowd[T], tried *attempts, good, other string) error {
	err := e.copies(ctx, c, map[string]int{good: 2, other: 3}, messagesOf(other, good, other, good, other)...)
	if err != nil {
		return err
	}
	if a, b := tried.of(good), tried.of(other); a != 1 || b != 1 {
		return fmt.Errorf("the handlers ran %d and %d times, want once each", a, b)
	}
	if r := c.m.Report(); r.Replayed != 3 || r.Failed+r.Returned != 0 {
		return fmt.Errorf("%d replayed, %d failed, %d returned; want 3 and none", r.Replayed, r.Failed, r.Returned)
	}
	return e.compare(ctx, once(c.with(good, other)...))
}

// nothingNew has a batch of copies of what is done, and looks whether anything was written because of it.
func (e *txEnv[T]) nothingNew(ctx context.Context, c *crowd[T], ids ...string) error {
	place := c.ledger.now()
	if err := e.copies(ctx, c, e.onceMore(ids), messagesOf(ids...)...); err != nil {
		return err
	}
	if n := c.ledger.wrote(place, ids...); n > 0 {
		return fmt.Errorf("%d transactions were committed for it", n)
	}
	return nil
}
