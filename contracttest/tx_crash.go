package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/sdk"
)

// crashClauses are about a process or an answer that is gone between the database and the broker.
func crashClauses[T any]() []txClause[T] {
	return []txClause[T]{
		{
			Clause: Clause{
				ID: "T01", Name: "killed before commit", Capability: "redelivers",
				Text: "killed before commit: no receipt, no effect; the redelivery applies it once",
			},
			processes: true, check: killedBeforeCommit[T],
		},
		{
			Clause: Clause{
				ID: "T02", Name: "killed after commit, before ack", Capability: "redelivers",
				Text: "killed after commit, before ack: the redelivery, with a new token, is acked; the effect stays at one",
			},
			processes: true, check: killedAfterCommit[T],
		},
		{
			Clause: Clause{
				ID: "T01/batch", Name: "killed in the middle of a batch", Capability: "redelivers",
				Text: "killed before commit, with several messages in the transaction: no receipt, no effect of any of them; the " +
					"redeliveries apply each once",
			},
			processes: true, check: killedInBatch[T],
		},
		{
			Clause: Clause{
				ID: "T02/batch", Name: "killed after a batch's commit", Capability: "redelivers",
				Text: "killed after commit, before ack, with several messages in the transaction: the redeliveries are acked as " +
					"replays; each effect stays at one",
			},
			processes: true, check: killedAfterBatch[T],
		},
		{
			Clause: Clause{
				ID: "T03", Name: "answer to the ack lost", Capability: "redelivers",
				Text: "the answer to the ack is lost: as T02",
			},
			check: ackAnswerLost[T],
		},
		{
			Clause: Clause{
				ID: "T03/kill", Name: "killed when the ack had arrived",
				Text: "the answer to the ack is lost because the process is dead: as T02, and what was acked stays away",
			},
			processes: true, check: killedAfterAck[T],
		},
		{
			Clause: Clause{
				ID: "T05/processes", Name: "one identity in two processes",
				Text: "two deliveries of one identity at the same moment in two processes: one effect, none diverted",
			},
			processes: true, check: twinProcesses[T],
		},
		{
			Clause: Clause{
				ID: "T30/kill", Name: "handler ends the transaction, then SIGKILL", Capability: "redelivers",
				Text: "a handler that commits, rolls back or executes COMMIT as text, with SIGKILL right after: neighbours are " +
					"not lost, torn receipts are diverted, never replayed",
			},
			processes: true, store: []string{"End"}, check: endedAndKilled[T],
		},
	}
}

// death is a point and how often it is passed before it kills.
type death struct {
	at  point
	nth int64
}

// killAt sends three messages and has a child with a window of one killed at a point of the nth of them.
func (e *txEnv[T]) killAt(ctx context.Context, d death, p childPlan) ([]string, error) {
	ids := e.ids(3)
	if err := e.send(ctx, ids...); err != nil {
		return ids, err
	}
	p.At, p.Nth, p.Window = d.at, d.nth, 1
	c, err := e.spawn(ctx, p)
	if err != nil {
		return ids, err
	}
	return ids, c.killed(ctx, e.h.Patience)
}

// killedBeforeCommit has a child die on its second message at each point before the commit.
func killedBeforeCommit[T any](ctx context.Context, e *txEnv[T]) error {
	return e.killedAt(ctx, 1, death{atBegun, 2}, death{atClaimed, 2}, death{atBeforeCommit, 2})
}

// killedAfterCommit has a child die between commit and ack.
func killedAfterCommit[T any](ctx context.Context, e *txEnv[T]) error {
	return e.killedAt(ctx, 0, death{atAfterCommit, 1}, death{atAfterCommit, 2}, death{atBeforeAck, 1})
}

// killedAt has a child die each of the deaths and looks at the database: as many receipts as effects, those of the
// messages before the victim, and the victim's own unless it is missing (1). Then a healthy consumer has to take what
// comes back.
func (e *txEnv[T]) killedAt(ctx context.Context, missing int64, deaths ...death) error {
	var all []string
	for _, d := range deaths {
		ids, err := e.killAt(ctx, d, childPlan{})
		if err != nil {
			return fmt.Errorf("killed %s of message %d: %w", d.at, d.nth, err)
		}
		done := append(slices.Clone(all), ids[:d.nth-missing]...)
		if err := e.asCommitted(ctx, done); err != nil {
			return fmt.Errorf("killed %s of message %d: %w", d.at, d.nth, err)
		}
		replayed, err := e.recover(ctx, ids[d.nth-1], ids[2])
		if err == nil && replayed != uint64(1-missing) {
			err = fmt.Errorf("%d deliveries counted as replayed, want %d", replayed, 1-missing)
		}
		if err != nil {
			return fmt.Errorf("killed %s of message %d: %w", d.at, d.nth, err)
		}
		all = append(all, ids...)
	}
	return e.balance(ctx, once(all...))
}

// asCommitted compares the database with itself, receipts with effects, and then with what has to be in it.
func (e *txEnv[T]) asCommitted(ctx context.Context, done []string) error {
	got, err := e.effects(ctx)
	if err != nil {
		return err
	}
	return errors.Join(e.compare(ctx, account{effects: got}), e.compare(ctx, once(done...)))
}

// recover starts a healthy consumer after one message has killed another. It waits until that message, with a token it
// did not have before, and the last one sent are acked, and stops. It returns how many deliveries counted as replayed.
func (e *txEnv[T]) recover(ctx context.Context, victim, last string) (replayed uint64, err error) {
	died := e.w.tokens(victim)
	acks := e.w.ackCount(victim)
	c, err := e.consume(ctx, plan[T]{})
	if err != nil {
		return 0, err
	}
	if err := e.ackedTimes(ctx, victim, acks+1); err != nil {
		return 0, fmt.Errorf("the victim's redelivery: %w", err)
	}
	if err := e.ackedTimes(ctx, last, 1); err != nil {
		return 0, fmt.Errorf("the victim's neighbour: %w", err)
	}
	tokens := e.w.tokens(victim)
	if len(tokens) <= len(died) || tokens[len(tokens)-1] == died[len(died)-1] {
		return 0, errors.New("the victim was not handed out again with a new token")
	}
	if err := e.quiet(ctx); err != nil {
		return 0, err
	}
	return c.m.Report().Replayed, c.stop()
}

// ackAnswerLost loses acks on their way to the broker, and answers on their way back, together with the connection.
func ackAnswerLost[T any](ctx context.Context, e *txEnv[T]) error {
	ids := e.ids(2)
	c, err := e.consume(ctx, plan[T]{})
	if err != nil {
		return err
	}
	for i, arrives := range []bool{true, false} {
		var fired atomic.Int64
		e.w.set(func(w *watch) { w.onSettle = loseOne(w, &fired, arrives) })
		if err := e.send(ctx, ids[i]); err != nil {
			return err
		}
		if err := e.eventually(ctx, func() error { return wantFired(fired.Load()) }); err != nil {
			return err
		}
		if err := e.send(ctx, ids[i]); err != nil { // whatever became of the first, one more comes
			return err
		}
		wantAcks := 2
		if !arrives {
			wantAcks = 3
		}
		if err := e.ackedTimes(ctx, ids[i], wantAcks); err != nil {
			return fmt.Errorf("after a lost ack (arrived: %t): %w", arrives, err)
		}
	}
	if err := e.balance(ctx, once(ids...)); err != nil {
		return err
	}
	if got := c.m.Report().Replayed; got < 3 {
		return fmt.Errorf("%d deliveries were counted as replayed, want at least 3", got)
	}
	return nil
}

func wantFired(n int64) error {
	if n == 0 {
		return errors.New("the fault has not hit anything")
	}
	return nil
}

// errAnswerLost is what a Settle gives whose answer is lost.
var errAnswerLost = &sdk.OutcomeError{Kind: sdk.OutcomeUnknown, Err: errors.New("the answer was lost by the clause")}

// loseOne loses the first settlement, or only its answer, and cuts the connection with it.
func loseOne(w *watch, fired *atomic.Int64, arrives bool) func(context.Context, sdk.Source, []sdk.Settlement) error {
	return func(ctx context.Context, src sdk.Source, batch []sdk.Settlement) error {
		if fired.Add(1) > 1 {
			return src.Settle(ctx, batch)
		}
		defer w.cut()
		if arrives {
			if err := src.Settle(ctx, batch); err != nil {
				return err
			}
		}
		return errAnswerLost
	}
}

// killedAfterAck has a child die when the broker has the ack and the child does not know.
func killedAfterAck[T any](ctx context.Context, e *txEnv[T]) error {
	ids, err := e.killAt(ctx, death{atAfterAck, 2}, childPlan{})
	if err != nil {
		return err
	}
	if two := e.compare(ctx, once(ids[:2]...)); two != nil {
		// The ack freed the window: in the moment before the signal came the third message may have been committed, too.
		if err := e.compare(ctx, once(ids...)); err != nil {
			return errors.Join(two, err)
		}
	}
	if _, err := e.consume(ctx, plan[T]{}); err != nil {
		return err
	}
	if err := e.ackedTimes(ctx, ids[2], 1); err != nil {
		return err
	}
	if n := len(e.w.tokens(ids[1])); n != 1 {
		return fmt.Errorf("a message whose ack had arrived was handed out %d times", n)
	}
	if err := e.send(ctx, ids[1]); err != nil { // a copy from a publisher that did not hear either
		return err
	}
	if err := e.ackedTimes(ctx, ids[1], 2); err != nil {
		return err
	}
	return e.balance(ctx, once(ids...))
}

// twinProcesses gives two processes, with a window of one each, the two copies of each message.
func twinProcesses[T any](ctx context.Context, e *txEnv[T]) error {
	var children []*child
	for range 2 {
		c, err := e.spawn(ctx, childPlan{Window: 1})
		if err != nil {
			return err
		}
		children = append(children, c)
	}
	if err := e.eventually(ctx, func() error { return wantSources(e.w.sources(), 2) }); err != nil {
		return err
	}
	ids := e.ids(4)
	overlaps := 0
	for _, id := range ids {
		if err := e.send(ctx, id, id); err != nil {
			return err
		}
		if err := e.ackedTimes(ctx, id, 2); err != nil {
			return err
		}
		if e.w.overlapped(id) {
			overlaps++
		}
	}
	if overlaps == 0 {
		return errors.New("no identity was handed out twice at the same moment")
	}
	for _, c := range children {
		if err := c.finish(ctx, e.h.Patience); err != nil {
			return err
		}
	}
	return e.balance(ctx, once(ids...))
}

func wantSources(got, want int) error {
	if got < want {
		return fmt.Errorf("%d consumers have opened a source, want %d", got, want)
	}
	return nil
}

// killCrowd sends one message more than a batch has, and has a child killed at a point of the batch of all but the first.
// Each point's number counts that first one, which has a transaction of its own.
func (e *txEnv[T]) killCrowd(ctx context.Context, d death, p childPlan) ([]string, error) {
	ids := e.ids(batchSize + 1)
	if err := e.send(ctx, ids...); err != nil {
		return ids, err
	}
	p.At, p.Nth, p.Window, p.Crowd = d.at, d.nth, len(ids), batchSize
	c, err := e.spawn(ctx, p)
	if err != nil {
		return ids, err
	}
	return ids, c.killed(ctx, e.h.Patience)
}

// recoverAll has a healthy consumer take what a dead one has left, and returns what it counted.
func (e *txEnv[T]) recoverAll(ctx context.Context, ids []string) (idempotency.Report, error) {
	c, err := e.consume(ctx, plan[T]{})
	if err != nil {
		return idempotency.Report{}, err
	}
	for _, id := range ids {
		if err := e.ackedTimes(ctx, id, 1); err != nil {
			return idempotency.Report{}, err
		}
	}
	if err := e.quiet(ctx); err != nil {
		return idempotency.Report{}, err
	}
	return c.m.Report(), c.stop()
}

// killedInBatch has a child die at each point before a batch's commit: only the message before the batch has taken effect.
func killedInBatch[T any](ctx context.Context, e *txEnv[T]) error {
	deaths := []death{{atClaimed, 2}, {atEnded, 4}, {atBeforeCommit, 2}}
	parts, err := e.parts(ctx)
	if err != nil {
		return err
	}
	if parts {
		deaths = append(deaths, death{atKept, 3})
	}
	var all []string
	for _, d := range deaths {
		ids, err := e.killCrowd(ctx, d, childPlan{})
		if err == nil {
			err = e.committedOf(ctx, all, ids, 1)
		}
		if err == nil {
			_, err = e.recoverAll(ctx, ids)
		}
		if err != nil {
			return fmt.Errorf("killed %s: %w", d.at, err)
		}
		all = append(all, ids...)
	}
	return e.balance(ctx, once(all...))
}

// committedOf fails unless n of those messages are committed, besides what was before, each with effect and receipt.
func (e *txEnv[T]) committedOf(ctx context.Context, before, ids []string, n int) error {
	got, err := e.effects(ctx)
	if err != nil {
		return err
	}
	if want := len(before) + n; len(got) != want {
		return fmt.Errorf("%d of the %d messages have taken effect, want %d", len(got)-len(before), len(ids), n)
	}
	return e.compare(ctx, once(slices.Collect(maps.Keys(got))...))
}

// killedAfterBatch has a child die between a batch's commit and its acks: all of it has taken effect, and comes again.
func killedAfterBatch[T any](ctx context.Context, e *txEnv[T]) error {
	ids, err := e.killCrowd(ctx, death{atAfterCommit, 2}, childPlan{})
	if err != nil {
		return err
	}
	if err := e.committedOf(ctx, nil, ids, len(ids)); err != nil {
		return err
	}
	r, err := e.recoverAll(ctx, ids)
	if err != nil {
		return err
	}
	if r.Replayed < batchSize || r.Handled > 0 {
		return fmt.Errorf("%d deliveries were replays and %d were handled; want the batch of %d, and none", r.Replayed, r.Handled, batchSize)
	}
	return e.balance(ctx, once(ids...))
}

// endedAndKilled has a child's handler end the transaction of a batch, after one of its neighbours ran and before others,
// and die.
func endedAndKilled[T any](ctx context.Context, e *txEnv[T]) error {
	var all []string
	for _, how := range e.s.endings() {
		before, err := e.db.Store.Stats(ctx)
		if err != nil {
			return err
		}
		ids, err := e.killCrowd(ctx, death{atEnded, 3}, childPlan{How: how})
		if err != nil {
			return fmt.Errorf("handler ends with %s: %w", how, err)
		}
		all = append(all, ids...)
		proven, err := e.db.Store.Stats(ctx)
		if err != nil {
			return err
		}
		r, err := e.recoverAll(ctx, ids)
		if whole := proven.Done - before.Done; err == nil && r.Replayed > uint64(whole) {
			err = fmt.Errorf("%d messages passed for replays, and %d receipts prove something", r.Replayed, whole)
		}
		if err == nil {
			_, err = e.nothingLost(ctx, all)
		}
		if err != nil {
			return fmt.Errorf("handler ended with %s: %w", how, err)
		}
	}
	want, err := e.nothingLost(ctx, all)
	if err != nil {
		return err
	}
	return e.balance(ctx, want)
}
