package main

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// overhead asks what the middleware itself costs: a message at a time, called directly, over a store that does nothing.
func overhead() study {
	return study{
		name: overheadStudy, pair: "no broker → no database", warmUp: 2000, messages: 50_000,
		contenders: []contender{{name: penstockName, round: callDirectly(1)}},
	}
}

// overheadTogether asks the same for messages that come at once, as a router lets them, so that they share transactions.
func overheadTogether() study {
	s := overhead()
	s.window = usualWindow
	s.contenders[0].round = callDirectly(usualWindow)
	return s
}

// callDirectly calls the handler from so many goroutines.
func callDirectly(callers int) func(context.Context, work) (outcome, error) {
	return func(ctx context.Context, w work) (o outcome, err error) {
		m, err := idempotency.New(nowhere{}, idempotency.Config{Consumer: consumer, Scope: "bench"})
		if err != nil {
			return o, err
		}
		var counts [counterCount]atomic.Int64
		handle := m.Handle(func(_ context.Context, _ nothing, msg *message.Message) error {
			counts[counterNumber(msg.Payload)].Add(1)
			return nil
		})
		msgs := make([]*message.Message, w.messages)
		for i, m := range workload(w) {
			msgs[i] = message.NewMessageWithContext(context.Background(), m.ID, m.Payload)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		if err := callAll(ctx, callers, msgs, handle); err != nil {
			return o, err
		}
		o.took = time.Since(began)
		runtime.ReadMemStats(&after)
		n := float64(w.messages)
		o.values = []value{
			{"time per message", "ns", float64(o.took.Nanoseconds()) / n},
			{"allocations per message", "count", float64(after.Mallocs-before.Mallocs) / n},
			{"memory per message", "bytes", float64(after.TotalAlloc-before.TotalAlloc) / n},
		}
		o.receipts, o.effects = noReceipts, map[string]int64{}
		for i := range counts {
			if n := counts[i].Load(); n > 0 {
				o.effects[counterName(i)] = n
			}
		}
		return o, nil
	}
}

// callAll handles all messages, from several goroutines where there are several callers.
func callAll(ctx context.Context, callers int, msgs []*message.Message, handle message.NoPublishHandlerFunc) error {
	var next atomic.Int64
	call := func() error {
		for ctx.Err() == nil {
			i := int(next.Add(1)) - 1
			if i >= len(msgs) {
				return nil
			}
			if err := handle(msgs[i]); err != nil {
				return err
			}
		}
		return ctx.Err()
	}
	if callers == 1 {
		return call()
	}
	var group errgroup.Group
	for range callers {
		group.Go(call)
	}
	return group.Wait()
}

// nothing is the transaction type of nowhere.
type nothing struct{}

// nowhere is a store that keeps nothing and finds every claim fresh.
type nowhere struct{}

var _ receipts.Store[nothing] = nowhere{}

func (nowhere) Check(context.Context) (receipts.Info, error) {
	return receipts.Info{Dialect: "nowhere", Lanes: 1, Parts: true, Schema: 1}, nil
}
func (nowhere) Migrate(context.Context) error { return nil }

func (nowhere) Begin(context.Context, receipts.TxOptions) (receipts.Tx[nothing], error) {
	return nowhereTx{}, nil
}
func (nowhere) Resolve(context.Context, receipts.Nonce) (bool, error) { return false, nil }

func (nowhere) Unsent(context.Context, receipts.UnsentQuery) ([]receipts.Output, error) {
	return nil, nil
}

func (nowhere) Outputs(context.Context, string, []byte) ([]receipts.Output, error) { return nil, nil }

func (nowhere) MarkSent(context.Context, []receipts.OutputRef, time.Time) error { return nil }

func (nowhere) DeadLetters(context.Context, int) ([]receipts.DeadLetter, error) { return nil, nil }

func (nowhere) Stats(context.Context) (receipts.Stats, error) { return receipts.Stats{}, nil }

func (nowhere) Classify(error) receipts.Class { return receipts.ClassOther }

type nowhereTx struct{}

func (nowhereTx) Unclaim(context.Context, []receipts.Claim) error { return nil }
func (nowhereTx) Part(context.Context) error                      { return nil }
func (nowhereTx) Keep(context.Context) error                      { return nil }
func (nowhereTx) Undo(context.Context) error                      { return nil }

func (nowhereTx) Raw() nothing          { return nothing{} }
func (nowhereTx) Nonce() receipts.Nonce { return receipts.Nonce{} }

func (nowhereTx) Claim(_ context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results := make([]receipts.ClaimResult, len(claims))
	for i := range results {
		results[i].Status = receipts.ClaimFresh
	}
	return results, nil
}

func (nowhereTx) AddOutputs(_ context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	return outputs, nil
}
func (nowhereTx) Divert(context.Context, []receipts.DeadLetter) error { return nil }
func (nowhereTx) Commit(context.Context) error                        { return nil }
func (nowhereTx) Rollback(context.Context) error                      { return nil }
