package main

import (
	"context"
	"runtime"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// overhead asks what the middleware itself costs: a message at a time, called directly, over a store that does nothing.
func overhead() study {
	return study{
		name: "overhead", pair: "no broker → no database", warmUp: 2000, messages: 50_000,
		contenders: []contender{{name: penstockName, round: callDirectly}},
	}
}

func callDirectly(_ context.Context, w work) (o outcome, err error) {
	m, err := idempotency.New(nowhere{}, idempotency.Config{Consumer: consumer, Scope: "bench"})
	if err != nil {
		return o, err
	}
	o = outcome{effects: map[string]int64{}, receipts: noReceipts}
	handle := m.Handle(func(_ context.Context, _ nothing, msg *message.Message) error {
		o.effects[counterOf(msg.Payload)]++
		return nil
	})
	msgs := make([]*message.Message, w.messages)
	for i, m := range workload(w.messages) {
		msgs[i] = message.NewMessageWithContext(context.Background(), m.ID, m.Payload)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	for _, msg := range msgs {
		if err := handle(msg); err != nil {
			return o, err
		}
	}
	o.took = time.Since(began)
	runtime.ReadMemStats(&after)
	n := float64(w.messages)
	o.values = []value{
		{"time per message", "ns", float64(o.took.Nanoseconds()) / n},
		{"allocations per message", "count", float64(after.Mallocs-before.Mallocs) / n},
		{"memory per message", "bytes", float64(after.TotalAlloc-before.TotalAlloc) / n},
	}
	return o, nil
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
