package main

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// effect is the statement that every contender executes once for each message. All of them prepare it, once, as somebody
// does who cares for speed.
type effect struct{ bump *sql.Stmt }

func prepareEffect(ctx context.Context, db *sql.DB) (effect, error) {
	bump, err := db.PrepareContext(ctx, `UPDATE counters SET value = value + 1 WHERE name = ?`)
	return effect{bump}, err
}

// in binds it to a transaction.
func (e effect) in(ctx context.Context, tx *sql.Tx) effect {
	return effect{tx.StmtContext(ctx, e.bump)}
}

func (e effect) apply(ctx context.Context, payload []byte) error {
	_, err := e.bump.ExecContext(ctx, counterOf(payload))
	return err
}

func (e effect) close() error { return e.bump.Close() }

// handlerOn makes a contender's handler on a database; end gives back what it holds.
type handlerOn func(ctx context.Context, db *sql.DB, w work, limits sdk.Limits) (handle message.NoPublishHandlerFunc, end func() error, err error)

// holdsNothing is the end of a contender that could not be made.
func holdsNothing() error { return nil }

// drain measures a router with a contender's handler.
func drain(with handlerOn) body {
	return func(ctx context.Context, w work, db *sql.DB) (took time.Duration, _ []value, err error) {
		end := holdsNothing
		took, err = through(ctx, w, func(limits sdk.Limits) (handle message.NoPublishHandlerFunc, err error) {
			handle, end, err = with(ctx, db, w, limits)
			return handle, err
		})
		return took, perSecond(w.messages, took), errors.Join(err, end())
	}
}

// middleware makes Penstock's, and prepares the effect.
func middleware(ctx context.Context, db *sql.DB, w work, limits sdk.Limits) (*idempotency.Middleware[*sql.Tx], effect, error) {
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	if err != nil {
		return nil, effect{}, err
	}
	m, err := idempotency.New(store, idempotency.Config{Consumer: consumer, Limits: limits, BatchSize: w.batch})
	if err != nil {
		return nil, effect{}, err
	}
	e, err := prepareEffect(ctx, db)
	return m, e, err
}

// withPenstock is a handler for one message, as the README has it.
func withPenstock(ctx context.Context, db *sql.DB, w work, limits sdk.Limits) (message.NoPublishHandlerFunc, func() error, error) {
	m, e, err := middleware(ctx, db, w, limits)
	if err != nil {
		return nil, holdsNothing, err
	}
	return m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		return e.in(ctx, tx).apply(ctx, msg.Payload)
	}), e.close, nil
}

// withPenstockBatch is a handler for many, with the same statement for each.
func withPenstockBatch(ctx context.Context, db *sql.DB, w work, limits sdk.Limits) (message.NoPublishHandlerFunc, func() error, error) {
	m, e, err := middleware(ctx, db, w, limits)
	if err != nil {
		return nil, holdsNothing, err
	}
	return m.HandleBatch(func(ctx context.Context, tx *sql.Tx, msgs []*message.Message) error {
		bound := e.in(ctx, tx)
		for _, msg := range msgs {
			if err := bound.apply(ctx, msg.Payload); err != nil {
				return err
			}
		}
		return nil
	}), e.close, nil
}

// byHand is a plain Watermill handler: a transaction of its own for each message, with a receipt row.
func byHand(ctx context.Context, db *sql.DB, _ work, _ sdk.Limits) (message.NoPublishHandlerFunc, func() error, error) {
	h, err := prepareByHand(ctx, db)
	if err != nil {
		return nil, holdsNothing, err
	}
	return func(msg *message.Message) (err error) {
		ctx := msg.Context()
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if err := h.in(ctx, tx).applyOnce(ctx, msg.UUID, msg.Payload); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return tx.Commit()
	}, h.close, nil
}

// handMade are the statements of those who write their receipts themselves.
type handMade struct {
	effect
	insert *sql.Stmt
}

func prepareByHand(ctx context.Context, db *sql.DB) (handMade, error) {
	insert, err := db.PrepareContext(ctx, `INSERT INTO seen (id, at) VALUES (?, ?) ON CONFLICT DO NOTHING`)
	if err != nil {
		return handMade{}, err
	}
	e, err := prepareEffect(ctx, db)
	if err != nil {
		return handMade{}, errors.Join(err, insert.Close())
	}
	return handMade{e, insert}, nil
}

func (h handMade) in(ctx context.Context, tx *sql.Tx) handMade {
	return handMade{h.effect.in(ctx, tx), tx.StmtContext(ctx, h.insert)}
}

func (h handMade) close() error { return errors.Join(h.effect.close(), h.insert.Close()) }

// applyOnce writes receipt and effect, unless the receipt is there.
func (h handMade) applyOnce(ctx context.Context, id string, payload []byte) error {
	inserted, err := h.insert.ExecContext(ctx, id, time.Now().UnixMicro())
	if err != nil {
		return err
	}
	if n, err := inserted.RowsAffected(); err != nil || n == 0 {
		return err
	}
	return h.apply(ctx, payload)
}
