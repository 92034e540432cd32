package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// capabilityLanes is the tag of stores with which several transactions make sense at a time.
const capabilityLanes = "lanes"

// blockedClauses are about a claim that waits for another transaction.
func blockedClauses[T any]() []txClause[T] {
	return []txClause[T]{{
		Clause: Clause{
			ID: "T29", Name: "one duplicate held open elsewhere", Capability: capabilityLanes,
			Text: "one duplicate held open elsewhere for 5 s: the other 255 of the batch are acked within 1 s",
		},
		check: heldElsewhere[T],
	}}
}

// The numbers of T29.
const (
	heldBatch  = 256
	heldFor    = 5 * time.Second
	heldOthers = time.Second
	heldSmall  = 8               // so small are the transactions to which a batch may be cut
	heldSlow   = heldFor / 2     // the most that a slow machine excuses: less than a store takes that waits for the one held
	heldLease  = 5 * time.Minute // so many messages share a batch only where it may take long
)

// lanesLack tells why a clause about several lanes cannot run; empty: it can.
func lanesLack[T any](ctx context.Context, store receipts.Store[T]) (string, error) {
	info, err := store.Check(ctx)
	if err != nil {
		return "", fmt.Errorf("checking the store: %w", err)
	}
	if info.Lanes <= 1 {
		return "capability " + capabilityLanes + " is not declared: the store has a single writer", nil
	}
	return "", nil
}

// heldElsewhere has another transaction, beside the consumer, claim one of a batch and stay open.
func heldElsewhere[T any](ctx context.Context, e *txEnv[T]) error {
	same := func(*message.Message) []byte { return []byte("all the same") }
	c, err := e.crowd(ctx, plan[T]{window: heldBatch + 1, lease: heldLease, config: idempotency.Config{
		BatchSize: heldBatch, Fingerprint: same, BatchTime: heldLease / 3, TxBudget: heldLease / 2,
	}})
	if err != nil {
		return err
	}
	first := e.ids(heldBatch)
	undisturbed, err := e.batchTakes(ctx, c, func() {}, first, first)
	if err != nil {
		return err
	}
	ids, err := e.heldOnce(ctx, c, first[0], undisturbed)
	if err != nil {
		return err
	}
	if r := c.m.Report(); r.Failed > 0 {
		return fmt.Errorf("%d attempts were charged", r.Failed)
	}
	return e.balance(ctx, once(c.with(slices.Concat(first, ids)...)...))
}

// heldOnce makes a batch with a message that is claimed elsewhere, and brings it to its end. It gives all that was applied.
func (e *txEnv[T]) heldOnce(ctx context.Context, c *crowd[T], like string, undisturbed time.Duration) (ids []string, err error) {
	ids = e.ids(heldBatch)
	held, others := ids[heldBatch/2], slices.Concat(ids[:heldBatch/2], ids[heldBatch/2+1:])
	other, err := e.claimAs(ctx, c.ledger, like, held)
	if err != nil {
		return nil, err
	}
	beside := &sibling{ids: e.ids(heldBatch)}
	beside.make = func(ids []string) error {
		tx, err := e.claimAs(ctx, c.ledger, like, ids...)
		if err != nil {
			return err
		}
		return tx.Commit(ctx)
	}
	if err := e.passesBy(ctx, c, ids, held, others, undisturbed, beside); err != nil {
		return nil, errors.Join(err, other.Rollback(ctx))
	}
	if err := other.Commit(ctx); err != nil {
		return nil, fmt.Errorf("committing the other transaction: %w", err)
	}
	return append(ids, beside.ids...), e.ackedTimes(ctx, held, 1)
}

// sibling are as many messages, of which none is held, in small transactions on the store itself, at the same time as the
// batch that is judged: how long they take tells how slow machine and disk are at the moment.
type sibling struct {
	ids  []string
	make func(ids []string) error
	made sync.WaitGroup
	took time.Duration
	err  error
}

func (s *sibling) begin() {
	s.made.Go(func() {
		start := time.Now()
		for ids := range slices.Chunk(s.ids, heldSmall) {
			s.err = errors.Join(s.err, s.make(ids))
		}
		s.took = time.Since(start)
	})
}

// claimAs claims identities in a transaction of its own, as the middleware has claimed another one, applies their effects and
// leaves the transaction open.
func (e *txEnv[T]) claimAs(ctx context.Context, l *ledger, like string, ids ...string) (receipts.Tx[T], error) {
	claim, ok := l.claim(like)
	if !ok {
		return nil, fmt.Errorf("%q was never claimed", like)
	}
	claims := make([]receipts.Claim, len(ids))
	for i, id := range ids {
		claims[i] = claim
		claims[i].Key, claims[i].At = []byte(id), time.Now()
	}
	tx, err := e.db.Store.Begin(ctx, receipts.TxOptions{})
	if err != nil {
		return nil, fmt.Errorf("beginning the other transaction: %w", err)
	}
	got, err := tx.Claim(ctx, claims)
	if err == nil && (len(got) != len(ids) || slices.ContainsFunc(got, func(r receipts.ClaimResult) bool { return r.Status != receipts.ClaimFresh })) {
		err = fmt.Errorf("the other transaction's claim was answered with %v", got)
	}
	for i := 0; err == nil && i < len(ids); i++ {
		err = e.s.Apply(ctx, tx.Raw(), ids[i], 1)
	}
	if err != nil {
		return nil, errors.Join(err, tx.Rollback(ctx))
	}
	return tx, nil
}

// passesBy makes the batch, and returns when the claim was held for as long as it has to be. A slow machine may take longer for
// the others by what a batch takes that nobody disturbs, which is asked for in vain, and by the small transactions to which it is cut.
func (e *txEnv[T]) passesBy(
	ctx context.Context, c *crowd[T], ids []string, held string, others []string, undisturbed time.Duration, beside *sibling,
) error {
	start := time.Now()
	took, err := e.batchTakes(ctx, c, beside.begin, ids, others)
	beside.made.Wait()
	if err := errors.Join(err, beside.err); err != nil {
		return err
	}
	slow := min(undisturbed+beside.took, heldSlow)
	if took > heldOthers+slow {
		return fmt.Errorf("the others were acked after %v, want at most %v, and %v that a batch takes anyway", took, heldOthers, slow)
	}
	if err := pause(ctx, heldFor-time.Since(start)); err != nil {
		return err
	}
	if e.w.ackCount(held) > 0 {
		return errors.New("the one that is held was acked, though nothing of it is committed")
	}
	return nil
}

// batchTakes makes a batch and tells how long it takes until some of it are acked. It calls begin right before.
func (e *txEnv[T]) batchTakes(ctx context.Context, c *crowd[T], begin func(), ids, some []string) (time.Duration, error) {
	place, err := c.gatherThen(ctx, begin, messagesOf(ids...)...)
	if err != nil {
		return 0, err
	}
	start := time.Now()
	for _, id := range some {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return 0, err
		}
	}
	return time.Since(start), c.ledger.together(place, ids...)
}
