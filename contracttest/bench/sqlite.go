package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	_ "modernc.org/sqlite" // registers the driver

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// scheme says how a contender keeps its receipts.
type scheme struct {
	// prepare makes the tables, count is a query for the number of receipts.
	prepare func(ctx context.Context, db *sql.DB) error
	count   string
}

// handWritten is what people write: one row for a message, without fingerprint or marker.
func handWritten() scheme {
	return scheme{
		prepare: func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, `CREATE TABLE seen (id TEXT PRIMARY KEY, at INTEGER NOT NULL) STRICT, WITHOUT ROWID`)
			return err
		},
		count: `SELECT count(*) FROM seen`,
	}
}

// penstock has the tables of its migrations.
func penstock() scheme {
	return scheme{
		prepare: func(ctx context.Context, db *sql.DB) error {
			store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
			if err != nil {
				return err
			}
			return store.Migrate(ctx)
		},
		count: `SELECT count(*) FROM penstock_receipts r JOIN penstock_markers m ON m.nonce = r.nonce WHERE r.state = 1`,
	}
}

// body is what a contender does on its database.
type body func(ctx context.Context, w work, db *sql.DB) (took time.Duration, values []value, err error)

// onSQLite gives a contender a database of its own, and reads the result back through another handle.
func onSQLite(s scheme, do body) func(ctx context.Context, w work) (outcome, error) {
	return func(ctx context.Context, w work) (o outcome, err error) {
		path := filepath.Join(w.dir, "bench.db")
		err = withDatabase(path, func(db *sql.DB) error {
			if err := createCounters(ctx, db); err != nil {
				return fmt.Errorf("make the counters: %w", err)
			}
			if err := s.prepare(ctx, db); err != nil {
				return fmt.Errorf("make the receipts' tables: %w", err)
			}
			o.took, o.values, err = do(ctx, w, db)
			return err
		})
		if err != nil {
			return o, err
		}
		return o, withDatabase(path, func(db *sql.DB) error {
			if err := db.QueryRowContext(ctx, s.count).Scan(&o.receipts); err != nil {
				return fmt.Errorf("count the receipts: %w", err)
			}
			o.effects, err = readCounters(ctx, db)
			return err
		})
	}
}

// withDatabase opens a file as durable as SQLite can: a write-ahead log that is flushed at each commit. One connection is
// the kindest setting for handlers written by hand: they wait in the pool's queue, in order, instead of in SQLite's busy
// loop, where some would starve. Penstock has one lane on SQLite and needs no more.
func withDatabase(path string, use func(*sql.DB) error) (err error) {
	params := url.Values{
		"_txlock": {"immediate"},
		"_pragma": {"journal_mode(WAL)", "synchronous(FULL)", "busy_timeout(5000)"},
	}
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?"+params.Encode())
	if err != nil {
		return fmt.Errorf("open the database: %w", err)
	}
	db.SetMaxOpenConns(1)
	defer func() { err = errors.Join(err, db.Close()) }()
	return use(db)
}

func createCounters(ctx context.Context, db *sql.DB) error {
	names := make([]string, counterCount)
	for i := range names {
		names[i] = "('" + counterName(i) + "', 0)"
	}
	_, err := db.ExecContext(ctx, `CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
		INSERT INTO counters (name, value) VALUES `+strings.Join(names, ", "))
	return err
}

// readCounters leaves out those that nothing was added to.
func readCounters(ctx context.Context, db *sql.DB) (effects map[string]int64, err error) {
	rows, err := db.QueryContext(ctx, `SELECT name, value FROM counters WHERE value <> 0`)
	if err != nil {
		return nil, fmt.Errorf("read the counters: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	effects = map[string]int64{}
	for rows.Next() {
		var name string
		var n int64
		if err := rows.Scan(&name, &n); err != nil {
			return nil, fmt.Errorf("read the counters: %w", err)
		}
		effects[name] = n
	}
	return effects, rows.Err()
}

// bump is the effect: the same statement for all contenders.
func bump(ctx context.Context, tx *sql.Tx, payload []byte) error {
	_, err := tx.ExecContext(ctx, `UPDATE counters SET value = value + 1 WHERE name = ?`, counterOf(payload))
	return err
}

// handlerOn makes a contender's handler on a database; end gives back what it holds.
type handlerOn func(ctx context.Context, db *sql.DB, limits sdk.Limits) (handle message.NoPublishHandlerFunc, end func() error, err error)

// drain measures a router with a contender's handler.
func drain(with handlerOn) body {
	return func(ctx context.Context, w work, db *sql.DB) (took time.Duration, _ []value, err error) {
		end := func() error { return nil }
		took, err = through(ctx, w, func(limits sdk.Limits) (handle message.NoPublishHandlerFunc, err error) {
			handle, end, err = with(ctx, db, limits)
			return handle, err
		})
		return took, perSecond(w.messages, took), errors.Join(err, end())
	}
}

// withPenstock is the handler as the README has it.
func withPenstock(_ context.Context, db *sql.DB, limits sdk.Limits) (message.NoPublishHandlerFunc, func() error, error) {
	nothing := func() error { return nil }
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	if err != nil {
		return nil, nothing, err
	}
	m, err := idempotency.New(store, idempotency.Config{Consumer: consumer, Limits: limits})
	if err != nil {
		return nil, nothing, err
	}
	return m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		return bump(ctx, tx, msg.Payload)
	}), nothing, nil
}

// byHand is a plain Watermill handler: a transaction of its own for each message, with a receipt row.
func byHand(ctx context.Context, db *sql.DB, _ sdk.Limits) (message.NoPublishHandlerFunc, func() error, error) {
	insert, err := prepareSeen(ctx, db)
	if err != nil {
		return nil, func() error { return nil }, err
	}
	return func(msg *message.Message) (err error) {
		ctx := msg.Context()
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if err := applyOnce(ctx, tx, tx.StmtContext(ctx, insert), msg.UUID, msg.Payload); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return tx.Commit()
	}, insert.Close, nil
}

// prepareSeen prepares the statement once, as somebody who cares for speed does.
func prepareSeen(ctx context.Context, db *sql.DB) (*sql.Stmt, error) {
	return db.PrepareContext(ctx, `INSERT INTO seen (id, at) VALUES (?, ?) ON CONFLICT DO NOTHING`)
}

// applyOnce writes receipt and effect, unless the receipt is there.
func applyOnce(ctx context.Context, tx *sql.Tx, insert *sql.Stmt, id string, payload []byte) error {
	inserted, err := insert.ExecContext(ctx, id, time.Now().UnixMicro())
	if err != nil {
		return err
	}
	if n, err := inserted.RowsAffected(); err != nil || n == 0 {
		return err
	}
	return bump(ctx, tx, payload)
}

// loopBatch is the most messages that the loop commits together.
const loopBatch = 256

// loop is what can be reached by hand, on the driver itself: it receives up to a batch, applies it in one transaction,
// commits, settles, and begins again.
func loop(ctx context.Context, w work, db *sql.DB) (took time.Duration, _ []value, err error) {
	driver, err := openBroker(ctx, w.messages)
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, driver.Close(context.WithoutCancel(ctx))) }()
	if err := driver.Send(ctx, topic, workload(w.messages)); err != nil {
		return 0, nil, err
	}
	insert, err := prepareSeen(ctx, db)
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, insert.Close()) }()
	began := time.Now()
	source, err := driver.Open(ctx, sdk.Binding{Topic: topic, Group: group, Window: w.window})
	if err != nil {
		return 0, nil, err
	}
	for left := w.messages; left > 0; {
		batch, err := source.Receive(ctx, min(loopBatch, w.window))
		if err != nil {
			return 0, nil, err
		}
		if err := applyBatch(ctx, db, insert, batch); err != nil {
			return 0, nil, err
		}
		settlements := make([]sdk.Settlement, len(batch))
		for i, d := range batch {
			settlements[i] = sdk.Settlement{Token: d.Token, Verdict: sdk.Ack}
		}
		if err := source.Settle(ctx, settlements); err != nil {
			return 0, nil, err
		}
		left -= len(batch)
	}
	took = time.Since(began)
	return took, perSecond(w.messages, took), nil
}

func applyBatch(ctx context.Context, db *sql.DB, insert *sql.Stmt, batch []sdk.Delivery) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	bound := tx.StmtContext(ctx, insert)
	for _, d := range batch {
		if err := applyOnce(ctx, tx, bound, d.ID, d.Payload); err != nil {
			return errors.Join(err, tx.Rollback())
		}
	}
	return tx.Commit()
}
