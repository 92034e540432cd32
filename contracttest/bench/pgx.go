package main

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
	"github.com/penstock-mq/penstock/sdk"
)

// onPgx compares effects that are queued with what pgx can do by hand, and with the store over database/sql.
func onPgx(servers *backends.Set) study {
	at := postgres(servers, 0)
	rivals := []string{penstockName, pipelineName}
	return study{
		name: pgxStudy, pair: "memory → PostgreSQL, pgx", window: usualWindow, warmUp: 2000, span: serverSpan,
		contenders: []contender{
			doingNothing(),
			{name: penstockName, round: at.on(penstock(), drain(withPenstock))},
			{name: queuedName, rivals: rivals, round: at.on(penstock(), drain(withQueue))},
			{name: queuedBatchName, rivals: rivals, round: at.on(penstock(), drain(withQueueBatch))},
			{name: pipelineName, round: at.on(handWritten(), pipelinedLoop)},
		},
	}
}

func openPool(ctx context.Context, w work) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(w.url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = serverPool
	return pgxpool.NewWithConfig(ctx, config)
}

// native makes Penstock's middleware on a pool of pgx.
func native(ctx context.Context, w work, limits sdk.Limits) (m *idempotency.Middleware[*pgxstore.Tx], end func() error, err error) {
	pool, err := openPool(ctx, w)
	if err != nil {
		return nil, holdsNothing, err
	}
	end = func() error { pool.Close(); return nil }
	store, err := pgxstore.New(pool, pgxstore.Options{})
	if err == nil {
		m, err = idempotency.New(store, w.place.config(limits, w.batch))
	}
	return m, end, err
}

// withQueue is a handler whose effect is queued.
func withQueue(ctx context.Context, _ *sql.DB, w work, limits sdk.Limits) (message.NoPublishHandlerFunc, func() error, error) {
	m, end, err := native(ctx, w, limits)
	if err != nil {
		return nil, end, err
	}
	return m.Handle(func(_ context.Context, tx *pgxstore.Tx, msg *message.Message) error {
		tx.Queue(w.place.bump, counterOf(msg.Payload))
		return nil
	}), end, nil
}

// withQueueBatch is the same for many messages in one call.
func withQueueBatch(ctx context.Context, _ *sql.DB, w work, limits sdk.Limits) (message.NoPublishHandlerFunc, func() error, error) {
	m, end, err := native(ctx, w, limits)
	if err != nil {
		return nil, end, err
	}
	return m.HandleBatch(func(_ context.Context, tx *pgxstore.Tx, msgs []*message.Message) error {
		for _, msg := range msgs {
			tx.Queue(w.place.bump, counterOf(msg.Payload))
		}
		return nil
	}), end, nil
}

// once is a receipt and its effect in one statement: the best that a pipeline can be given.
const once = `WITH fresh AS (INSERT INTO seen (id, at) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING 1)
	UPDATE counters SET value = value + 1 WHERE name = $3 AND EXISTS (SELECT FROM fresh)`

// pipelinedLoop is the loop by hand with one pgx.Batch, and so one transaction, for each of its batches.
func pipelinedLoop(ctx context.Context, w work, _ *sql.DB) (took time.Duration, _ []value, err error) {
	pool, err := openPool(ctx, w)
	if err != nil {
		return 0, nil, err
	}
	defer pool.Close()
	took, err = loopWith(ctx, w, w.place.pipelines, func(ctx context.Context, batch []sdk.Delivery) error {
		var pipeline pgx.Batch
		pipeline.Queue("BEGIN")
		for _, d := range batch {
			pipeline.Queue(once, d.ID, time.Now().UnixMicro(), counterOf(d.Payload))
		}
		pipeline.Queue("COMMIT")
		return errors.Join(pool.SendBatch(ctx, &pipeline).Close())
	})
	return took, perSecond(w.messages, took), err
}
