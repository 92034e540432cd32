package handlertest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/penstock-mq/penstock/middleware/idempotency"
)

// Run checks a handler, each scenario in a subtest of its own, on a case that open makes for it: a fresh database, and a
// fresh handler where the handler keeps state. open may end the test with t.Fatal and clean up with t.Cleanup.
//
// First comes an undisturbed run; the others must leave the same state and outputs, however their attempts were failed.
// When the undisturbed run fails there is nothing to compare with, and Run stops there. A failure says what the promise is
// and what was seen. Subtests do not run in parallel with one another.
func Run[T any](t *testing.T, open func(t *testing.T) Case[T]) {
	t.Helper()
	var once single
	if !t.Run("clean run", func(t *testing.T) {
		t.Helper()
		const promise = "a message that nothing disturbs takes effect, and the same effect each time"
		var err error
		once, err = cleanRuns(t, open)
		report(t, promise, err)
	}) {
		return
	}
	for _, s := range scenarios[T]() {
		t.Run(s.name, func(t *testing.T) {
			t.Helper()
			report(t, s.promise, s.check(t, open, once))
		})
	}
}

func report(t *testing.T, promise string, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("promise: %s\nseen:    %v", promise, err)
	}
}

// single is what a single run leaves.
type single struct {
	before  any
	effects effects
}

// writes tells whether the run changed State.
func (s single) writes() bool { return !reflect.DeepEqual(s.before, s.effects.State) }

// cleanRuns makes two undisturbed runs, on a database each, and compares them.
func cleanRuns[T any](t *testing.T, open func(t *testing.T) Case[T]) (single, error) {
	first, err := cleanRun(t, open)
	if err != nil {
		return single{}, err
	}
	if !first.writes() && len(first.effects.Outputs) == 0 {
		return single{}, fmt.Errorf("State is the same before and after, and there are no outputs: choose Message and State "+
			"so that the effect shows\n  State %s", brief(first.before))
	}
	second, err := cleanRun(t, open)
	if err != nil {
		return single{}, fmt.Errorf("in the second run: %w", err)
	}
	if !reflect.DeepEqual(first.before, second.before) {
		return single{}, fmt.Errorf("two fresh cases start differently: State must be the same before each run\n%s",
			difference("first", first.before, "second", second.before))
	}
	if !reflect.DeepEqual(first.effects, second.effects) {
		return single{}, fmt.Errorf("%s\n%s", notFixed, difference("first", first.effects, "second", second.effects))
	}
	return first, nil
}

func cleanRun[T any](t *testing.T, open func(t *testing.T) Case[T]) (found single, err error) {
	err = withBench(t, open, false, func(ctx context.Context, b *bench[T]) error {
		r, err := b.live(ctx, 1, 1)
		if err != nil {
			return err
		}
		if err := wasHandled(ctx, b, r); err != nil {
			return err
		}
		found.before = b.before
		found.effects, err = b.effects(ctx)
		return err
	})
	return found, err
}

// wasHandled tells why an acknowledged message was not.
func wasHandled[T any](ctx context.Context, b *bench[T], r idempotency.Report) error {
	if r.Handled == 1 {
		if r.WithoutTx > 0 {
			return errors.New("the handler never asked for its transaction: its effect cannot be in it")
		}
		return nil
	}
	err := fmt.Errorf("the message was not handled (%s)", summary(r))
	letters, readErr := b.c.Store.DeadLetters(ctx, 1)
	if readErr == nil && len(letters) > 0 {
		err = fmt.Errorf("%w; its dead letter says: %s: %s", err, letters[0].Kind, letters[0].Reason)
	}
	return err
}

// withBench makes a case and a bench for one scenario.
func withBench[T any](t *testing.T, open func(t *testing.T) Case[T], writes bool, f func(context.Context, *bench[T]) error) error {
	c := open(t).withDefaults()
	if err := c.check(); err != nil {
		return err
	}
	ctx := t.Context()
	b, err := newBench(ctx, c, writes)
	if err != nil {
		return err
	}
	return errors.Join(f(ctx, b), b.close())
}
