package main

import (
	"context"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/contracttest/memstore"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// nap is how long the slow handler waits for something else, a remote call say.
const nap = 20 * time.Millisecond

// sleeping asks what becomes of handlers that wait, each with its transaction open, on a database with many writers: a plain
// router runs as many of them at a time as the window has.
func sleeping() study {
	return study{
		name: sleepingStudy, pair: "memory → memstore, handler sleeps 20 ms", window: 16, warmUp: 32, span: 2 * time.Second,
		contenders: []contender{
			{name: watermillName, round: onMemstore(sleepByHand)},
			{name: penstockName, rivals: []string{watermillName}, round: onMemstore(sleepWithPenstock)},
		},
	}
}

func onMemstore(with func(db *memstore.Database, limits sdk.Limits) (message.NoPublishHandlerFunc, error)) func(context.Context, work) (outcome, error) {
	return func(ctx context.Context, w work) (outcome, error) {
		db := memstore.NewDatabase()
		took, err := through(ctx, w, func(limits sdk.Limits) (message.NoPublishHandlerFunc, error) { return with(db, limits) })
		if err != nil {
			return outcome{}, err
		}
		return outcome{took: took, values: perSecond(w.messages, took), effects: db.Counters(), receipts: noReceipts}, nil
	}
}

// sleepByHand is a plain handler with a transaction of its own, without a receipt.
func sleepByHand(db *memstore.Database, _ sdk.Limits) (message.NoPublishHandlerFunc, error) {
	store := db.Store()
	return func(msg *message.Message) error {
		ctx := msg.Context()
		tx, err := store.Begin(ctx, receipts.TxOptions{})
		if err != nil {
			return err
		}
		if err := sleepAndApply(tx.Raw(), msg); err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		return tx.Commit(ctx)
	}, nil
}

// sleepAndApply is what all of these handlers do.
func sleepAndApply(tx *memstore.Tx, msg *message.Message) error {
	time.Sleep(nap)
	return tx.Add(counterOf(msg.Payload), 1)
}

// sleepWithPenstock leaves it to the middleware how many lanes there are.
func sleepWithPenstock(db *memstore.Database, limits sdk.Limits) (message.NoPublishHandlerFunc, error) {
	m, err := idempotency.New(db.Store(), idempotency.Config{Consumer: consumer, Limits: limits})
	if err != nil {
		return nil, err
	}
	return m.Handle(func(_ context.Context, tx *memstore.Tx, msg *message.Message) error {
		return sleepAndApply(tx, msg)
	}), nil
}
