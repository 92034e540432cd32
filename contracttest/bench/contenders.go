package main

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/sdk"
)

// statement is one of a contender's own. All contenders of a study prepare theirs, once, as somebody does who cares for
// speed, or none does, as the README has it.
type statement struct {
	query    string
	prepared *sql.Stmt // nil: as text
	tx       *sql.Tx
}

func newStatement(ctx context.Context, db *sql.DB, w work, query string) (s statement, err error) {
	s.query = query
	if !w.unprepared {
		s.prepared, err = db.PrepareContext(ctx, query)
	}
	return s, err
}

// in binds it to a transaction.
func (s statement) in(ctx context.Context, tx *sql.Tx) statement {
	if s.tx = tx; s.prepared != nil {
		s.prepared = tx.StmtContext(ctx, s.prepared)
	}
	return s
}

func (s statement) exec(ctx context.Context, args ...any) (sql.Result, error) {
	if s.prepared == nil {
		return s.tx.ExecContext(ctx, s.query, args...)
	}
	return s.prepared.ExecContext(ctx, args...)
}

func (s statement) close() error {
	if s.prepared == nil {
		return nil
	}
	return s.prepared.Close()
}

// effect is the statement that every contender executes once for each message, in one study after a nap.
type effect struct {
	bump statement
	nap  time.Duration
}

func prepareEffect(ctx context.Context, db *sql.DB, w work) (effect, error) {
	bump, err := newStatement(ctx, db, w, w.place.bump)
	return effect{bump, w.nap}, err
}

func (e effect) in(ctx context.Context, tx *sql.Tx) effect { return effect{e.bump.in(ctx, tx), e.nap} }

func (e effect) apply(ctx context.Context, payload []byte) error {
	if e.nap > 0 {
		time.Sleep(e.nap)
	}
	_, err := e.bump.exec(ctx, counterOf(payload))
	return err
}

func (e effect) close() error { return e.bump.close() }

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
	store, err := w.place.store(db)
	if err != nil {
		return nil, effect{}, err
	}
	m, err := idempotency.New(store, w.place.config(limits, w.batch))
	if err != nil {
		return nil, effect{}, err
	}
	e, err := prepareEffect(ctx, db, w)
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
func byHand(ctx context.Context, db *sql.DB, w work, _ sdk.Limits) (message.NoPublishHandlerFunc, func() error, error) {
	h, err := prepareByHand(ctx, db, w)
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
	insert statement
}

func prepareByHand(ctx context.Context, db *sql.DB, w work) (handMade, error) {
	insert, err := newStatement(ctx, db, w, w.place.seen)
	if err != nil {
		return handMade{}, err
	}
	e, err := prepareEffect(ctx, db, w)
	if err != nil {
		return handMade{}, errors.Join(err, insert.close())
	}
	return handMade{e, insert}, nil
}

func (h handMade) in(ctx context.Context, tx *sql.Tx) handMade {
	return handMade{h.effect.in(ctx, tx), h.insert.in(ctx, tx)}
}

func (h handMade) close() error { return errors.Join(h.effect.close(), h.insert.close()) }

// applyOnce writes receipt and effect, unless the receipt is there.
func (h handMade) applyOnce(ctx context.Context, id string, payload []byte) error {
	inserted, err := h.insert.exec(ctx, id, time.Now().UnixMicro())
	if err != nil {
		return err
	}
	if n, err := inserted.RowsAffected(); err != nil || n == 0 {
		return err
	}
	return h.apply(ctx, payload)
}
