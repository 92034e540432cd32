package handlertest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/idempotency"
)

// rollbacks is how often the scenario of that name rolls back.
const rollbacks = 3

// scenario is one way in which a delivery goes wrong.
type scenario[T any] struct {
	name    string
	promise string
	plan    func(b *bench[T]) plan
	// lives are how often the consumer starts; in each the message is sent so many times, one after the other, in so many
	// copies at once.
	lives, times, copies int
	// attempts is how often the handler must have run, at least.
	attempts int
	// blame is what to say when the state is not that of a single run.
	blame string
}

func scenarios[T any]() []scenario[T] {
	return []scenario[T]{
		{
			name:    "commit fails",
			promise: "when COMMIT fails nothing of the attempt stays; the message comes again and takes effect once",
			plan:    func(*bench[T]) plan { return plan{commit: failUntil(1)} },
			lives:   1, times: 1, copies: 1, attempts: 2, blame: notRepeatable,
		},
		{
			name:    "panic after the handler",
			promise: "when an attempt panics nothing of it stays; the message comes again and takes effect once",
			plan: func(*bench[T]) plan {
				return plan{after: func(attempt int) error {
					if attempt == 1 {
						panic(errPlanted)
					}
					return nil
				}}
			},
			lives: 1, times: 1, copies: 1, attempts: 2, blame: notRepeatable,
		},
		{
			name:    "rolled back and run again",
			promise: "attempts that are rolled back leave nothing, and the one that commits is like the only one",
			plan:    func(*bench[T]) plan { return plan{after: failUntil(rollbacks)} },
			lives:   1, times: 1, copies: 1, attempts: rollbacks + 1, blame: notRepeatable,
		},
		{
			name:    "transaction lost",
			promise: "a handler whose transaction is lost before it writes reports the error and leaves nothing",
			plan:    func(*bench[T]) plan { return plan{kill: func(attempt int) bool { return attempt == 1 }} },
			lives:   1, times: 1, copies: 1, attempts: 2, blame: notRepeatable,
		},
		{
			name:    "duplicate",
			promise: "a message that comes again after it was acknowledged changes nothing",
			plan:    func(*bench[T]) plan { return plan{} },
			lives:   1, times: 2, copies: 1, attempts: 1, blame: appliedAgain,
		},
		{
			name:    "two at once",
			promise: "of two deliveries of one message at the same time one takes effect",
			plan:    func(b *bench[T]) plan { return plan{together: true, before: b.untilBothAreHere} },
			lives:   1, times: 1, copies: 2, attempts: 1, blame: appliedAgain,
		},
		{
			name:    "restart",
			promise: "a message that comes again after the consumer restarted changes nothing",
			plan:    func(*bench[T]) plan { return plan{} },
			lives:   2, times: 1, copies: 1, attempts: 1, blame: appliedAgain,
		},
	}
}

// check runs a scenario and compares what it leaves with a single run.
func (s scenario[T]) check(t *testing.T, open func(t *testing.T) Case[T], once single) error {
	return withBench(t, open, once.writes(), func(ctx context.Context, b *bench[T]) error {
		b.plan = s.plan(b)
		if !reflect.DeepEqual(b.before, once.before) {
			return fmt.Errorf("two fresh cases start differently: State must be the same before each run\n%s",
				difference("clean run", once.before, "now", b.before))
		}
		var total idempotency.Report
		for range s.lives {
			r, err := b.live(ctx, s.times, s.copies)
			if err != nil {
				return err
			}
			total.Handled += r.Handled
			total.Replayed += r.Replayed
		}
		return s.judge(ctx, b, once, total)
	})
}

func (s scenario[T]) judge(ctx context.Context, b *bench[T], once single, total idempotency.Report) error {
	now, err := b.effects(ctx)
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(now.State, once.effects.State) {
		return fmt.Errorf("%s\n%s", s.blame, difference("after one clean run", once.effects.State, "after this", now.State))
	}
	if !reflect.DeepEqual(now.Outputs, once.effects.Outputs) {
		return fmt.Errorf("outputs differ: %s\n%s", s.blame, difference("after one clean run", once.effects.Outputs, "after this", now.Outputs))
	}
	if again := s.lives*s.times*s.copies - 1; total.Handled != 1 || total.Replayed != uint64(again) {
		return fmt.Errorf("of %d deliveries of one message one must be handled and the others recognised; is the identity or the "+
			"fingerprint of Config unstable? (%s)", again+1, summary(total))
	}
	if b.attempts < s.attempts {
		return fmt.Errorf("the handler ran %d times instead of %d: the fault was not met, so that nothing was shown", b.attempts, s.attempts)
	}
	return nil
}

const appliedAgain = "the effect is not that of a single run: the message was applied again, or something else changed State"

// failUntil fails the first n attempts.
func failUntil(n int) func(attempt int) error {
	return func(attempt int) error {
		if attempt <= n {
			return errPlanted
		}
		return nil
	}
}

// untilBothAreHere holds the first attempt, in its transaction, until the other delivery has arrived.
func (b *bench[T]) untilBothAreHere(int) error {
	for deadline := time.Now().Add(b.c.Patience / 4); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		b.mu.Lock()
		n := b.deliveries
		b.mu.Unlock()
		if n >= 2 {
			return nil
		}
	}
	return errors.New("handlertest: the second delivery did not come while the first was handled")
}
