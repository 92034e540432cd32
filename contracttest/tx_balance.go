package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// account is what has to be in the database and at the broker when a clause is over.
type account struct {
	// effects are the counters and their values.
	effects map[string]int64
	// receipts is the number in state done; 0 means one for each counter, noReceipts none at all.
	receipts int
	// torn is the number of receipts without a marker. Each has to be explained by a dead letter.
	torn int
	// dead are the dead letters by kind.
	dead map[receipts.DeadLetterKind]int
}

// noReceipts is for at-least-once, which keeps no receipts.
const noReceipts = -1

// once is the account of identities that each took effect once.
func once(ids ...string) account {
	effects := make(map[string]int64, len(ids))
	for _, id := range ids {
		effects[id] = 1
	}
	return account{effects: effects}
}

// balance is clause T25, which ends every other one: receipts in state done = distinct identities applied = effects; the
// broker holds nothing unsettled; no torn receipt unexplained. It waits for that state, stops the consumers and looks
// again, and then looks whether the broker still has anything to hand out.
func (e *txEnv[T]) balance(ctx context.Context, want account) error {
	if err := e.becomes(ctx, want); err != nil {
		return errors.Join(fmt.Errorf("T25: %w", err), e.stopAll())
	}
	if err := e.quiet(ctx); err != nil {
		return errors.Join(fmt.Errorf("T25: %w", err), e.stopAll())
	}
	if err := e.stopAll(); err != nil {
		return fmt.Errorf("T25: stopping the consumers: %w", err)
	}
	newest := e.messageID()
	for _, b := range e.used {
		if err := b.empty(ctx, newest); err != nil {
			return fmt.Errorf("T25: %w", err)
		}
	}
	if err := e.compare(ctx, want); err != nil {
		return fmt.Errorf("T25: after the consumers stopped: %w", err)
	}
	return nil
}

// errTooOften marks an effect that no waiting can make right.
var errTooOften = errors.New("and nothing takes it back")

// becomes waits until the database is as it has to be, or cannot become so any more.
func (e *txEnv[T]) becomes(ctx context.Context, want account) error {
	var hopeless error
	err := e.eventually(ctx, func() error {
		err := e.compare(ctx, want)
		if errors.Is(err, errTooOften) {
			hopeless = err
			return nil
		}
		return err
	})
	return errors.Join(hopeless, err)
}

// quiet waits until the broker says that nothing is unsettled.
func (e *txEnv[T]) quiet(ctx context.Context) error {
	for _, b := range e.used {
		if err := e.unsettled(ctx, b.topic, b.group, 0); err != nil {
			return err
		}
	}
	return nil
}

// empty opens a member of the group and fails if it gets anything that was sent before the fence. Identities above newest
// are fences too: those of other groups of the topic.
func (b *bench) empty(ctx context.Context, newest string) error {
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	got = slices.DeleteFunc(got, func(d sdk.Delivery) bool { return strings.HasPrefix(d.ID, b.e.run) && d.ID > newest })
	if err == nil && len(got) > 0 {
		err = fmt.Errorf("the broker still holds %d messages of %s for %s, the first is %q", len(got), b.topic, b.group, got[0].ID)
	}
	return errors.Join(err, m.close(ctx))
}

// compare compares the database with the account.
func (e *txEnv[T]) compare(ctx context.Context, want account) error {
	if err := e.effectsAre(ctx, want.effects); err != nil {
		return err
	}
	stats, err := e.db.Store.Stats(ctx)
	if err != nil {
		return fmt.Errorf("reading the receipts: %w", err)
	}
	done := want.receipts
	switch done {
	case 0:
		done = len(want.effects)
	case noReceipts:
		done = 0
	}
	if stats.Done != done {
		return fmt.Errorf("%d receipts in state done for %d applied identities", stats.Done, done)
	}
	if stats.Torn != want.torn {
		return fmt.Errorf("%d torn receipts, want %d", stats.Torn, want.torn)
	}
	if stats.Unsent != 0 {
		return fmt.Errorf("%d outputs were never sent", stats.Unsent)
	}
	if !maps.Equal(stats.DeadLetters, want.dead) && len(stats.DeadLetters)+len(want.dead) > 0 {
		return fmt.Errorf("dead letters %v, want %v", stats.DeadLetters, want.dead)
	}
	return nil
}

// effectsAre compares the counters that are not zero.
func (e *txEnv[T]) effectsAre(ctx context.Context, want map[string]int64) error {
	got, err := e.effects(ctx)
	if err != nil {
		return err
	}
	for id, n := range want {
		if got[id] > n {
			return fmt.Errorf("the effect of %q was applied %d times, want %d: %w", id, got[id], n, errTooOften)
		}
		if got[id] < n {
			return fmt.Errorf("the effect of %q was applied %d times, want %d", id, got[id], n)
		}
	}
	for id, n := range got {
		if _, ok := want[id]; !ok && n != 0 {
			return fmt.Errorf("the effect of %q was applied %d times, want none: %w", id, n, errTooOften)
		}
	}
	return nil
}

// effects reads the committed counters.
func (e *txEnv[T]) effects(ctx context.Context) (map[string]int64, error) {
	got, err := e.db.Effects(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the effects: %w", err)
	}
	return got, nil
}

// applied waits until those identities took effect.
func (e *txEnv[T]) applied(ctx context.Context, ids ...string) error {
	return e.eventually(ctx, func() error {
		got, err := e.effects(ctx)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if got[id] == 0 {
				return fmt.Errorf("%q has not taken effect", id)
			}
		}
		return nil
	})
}

// ackedTimes waits until that many acks of the identity were asked for.
func (e *txEnv[T]) ackedTimes(ctx context.Context, id string, n int) error {
	return e.eventually(ctx, func() error {
		if got := e.w.ackCount(id); got < n {
			return fmt.Errorf("%q was acknowledged %d times, want %d", id, got, n)
		}
		return nil
	})
}
