package main

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-mq/penstock/sdk"
)

// loopBatch is the most messages that the loop commits together, unless the study says another number.
const loopBatch = 256

// loop is what can be reached by hand, on the driver itself: on each connection it receives up to a batch, applies it in one
// transaction, commits, settles, and begins again. There are as many connections as do best, each with a source of its own.
func loop(ctx context.Context, w work, db *sql.DB) (took time.Duration, _ []value, err error) {
	h, err := prepareByHand(ctx, db, w)
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	took, err = loopWith(ctx, w, w.place.loops, h.applyAll(db))
	return took, perSecond(w.messages, took), err
}

// loopWith is the loop with another way to apply a batch in one transaction.
func loopWith(ctx context.Context, w work, workers int, apply func(context.Context, []sdk.Delivery) error) (took time.Duration, err error) {
	driver, err := openBroker(ctx, w.messages)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, driver.Close(context.WithoutCancel(ctx))) }()
	if err := driver.Send(ctx, topic, workload(w)); err != nil {
		return 0, err
	}
	l := looping{driver: driver, apply: apply, window: max(w.window/workers, 1), sorts: workers > 1}
	l.batch = w.batch
	if l.batch == 0 {
		l.batch = loopBatch
	}
	l.batch = min(l.batch, l.window)
	l.left.Store(int64(w.messages))
	return l.run(ctx, workers)
}

// looping is a loop under way.
type looping struct {
	driver sdk.Driver
	apply  func(context.Context, []sdk.Delivery) error
	window int // of each source
	batch  int
	sorts  bool         // by counter, so that workers do not lock each other out
	left   atomic.Int64 // messages that are not settled
}

// run starts the workers and waits for the last message.
func (l *looping) run(ctx context.Context, workers int) (time.Duration, error) {
	ctx, allDone := context.WithCancel(ctx)
	defer allDone()
	began := time.Now()
	var took atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for range workers {
		group.Go(func() error {
			return l.work(ctx, func() {
				took.Store(int64(time.Since(began)))
				allDone() // the others wait for messages that do not come
			})
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	return time.Duration(took.Load()), nil
}

func (l *looping) work(ctx context.Context, last func()) error {
	source, err := l.driver.Open(ctx, sdk.Binding{Topic: topic, Group: group, Window: l.window})
	if err != nil {
		return err
	}
	for {
		batch, err := source.Receive(ctx, l.batch)
		if err != nil {
			if l.left.Load() == 0 {
				return nil
			}
			return err
		}
		if l.sorts {
			slices.SortFunc(batch, func(a, b sdk.Delivery) int { return strings.Compare(counterOf(a.Payload), counterOf(b.Payload)) })
		}
		if err := l.apply(ctx, batch); err != nil {
			return err
		}
		settlements := make([]sdk.Settlement, len(batch))
		for i, d := range batch {
			settlements[i] = sdk.Settlement{Token: d.Token, Verdict: sdk.Ack}
		}
		if err := source.Settle(ctx, settlements); err != nil {
			return err
		}
		if l.left.Add(-int64(len(batch))) == 0 {
			last()
			return nil
		}
	}
}

// applyAll applies a batch in one transaction.
func (h handMade) applyAll(db *sql.DB) func(context.Context, []sdk.Delivery) error {
	return func(ctx context.Context, batch []sdk.Delivery) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		bound := h.in(ctx, tx)
		for _, d := range batch {
			if err := bound.applyOnce(ctx, d.ID, d.Payload); err != nil {
				return errors.Join(err, tx.Rollback())
			}
		}
		return tx.Commit()
	}
}
