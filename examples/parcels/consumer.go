package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "modernc.org/sqlite"

	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/contracttest/stage"
	"github.com/penstock-mq/penstock/examples/parcels/scan"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// What both processes call things.
const (
	topic    = "scans"
	group    = "tracking"
	window   = 16
	tableSQL = `
CREATE TABLE IF NOT EXISTS scans (   -- no unique key, on purpose: an event applied twice shows
	id TEXT NOT NULL, parcel TEXT NOT NULL, status TEXT NOT NULL, depot TEXT NOT NULL, weight_g INTEGER NOT NULL, at TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS scans_parcel ON scans (parcel, at);
CREATE TABLE IF NOT EXISTS parcels ( -- where each parcel is, and how often it was scanned
	parcel TEXT PRIMARY KEY, status TEXT NOT NULL, depot TEXT NOT NULL, at TEXT NOT NULL, scans INTEGER NOT NULL
) STRICT;`
)

// consumerEnv holds a consumerSpec in the environment of the child process; its presence makes a process a consumer.
const consumerEnv = "PENSTOCK_PARCELS_CONSUMER"

// consumerSpec is what the parent tells a consumer process.
type consumerSpec struct {
	Socket   string
	Database string
	Kill     stage.Kill
	// Bare leaves the middleware out.
	Bare bool
}

// progress is a line of JSON from the consumer to its parent.
type progress struct {
	Replayed uint64
	// Last, where set, are the last words.
	Last *stage.LastWords `json:",omitempty"`
}

// runConsumer is the child's main.
func runConsumer() error {
	var spec consumerSpec
	return stage.Consumer(consumerEnv, &spec, nil, func(ctx context.Context) error { return consume(ctx, spec, os.Stdout) })
}

// tell writes a line to the parent.
func (p progress) tell(out io.Writer) {
	if line, err := json.Marshal(p); err == nil {
		stage.Line(out, line)
	}
}

func consume(ctx context.Context, spec consumerSpec, out io.Writer) error {
	db, err := openDatabase(ctx, spec.Database)
	if err != nil {
		return err
	}
	defer db.Close()
	broker, err := pipe.Open(ctx, func(ctx context.Context) (io.ReadWriteCloser, error) {
		return new(net.Dialer).DialContext(ctx, "unix", spec.Socket)
	}, 0)
	if err != nil {
		return fmt.Errorf("connect to the broker: %w", err)
	}
	defer broker.Close(context.Background())
	death := stage.NewTrigger(spec.Kill, func(last stage.LastWords) { progress{Last: &last}.tell(out) })
	sub, err := sdk.NewSubscriber(stage.KillingDriver{Driver: broker, Trigger: death}, sdk.SubscriberConfig{Group: group, MaxInFlight: window})
	if err != nil {
		return fmt.Errorf("make the subscriber: %w", err)
	}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	if spec.Bare {
		router.AddConsumerHandler("track", topic, sub, applyBare(db, death))
	} else {
		m, err := newMiddleware(ctx, db, sub.Limits(), death)
		if err != nil {
			return err
		}
		router.AddMiddleware(reportTo(out, m))
		router.AddConsumerHandler("track", topic, sub, m.Handle(apply))
	}
	return sdk.Run(ctx, router, sub)
}

// newMiddleware is what an application would write, but for the store's wrapper, which kills.
func newMiddleware(
	ctx context.Context, db *sql.DB, limits sdk.Limits, death *stage.Trigger,
) (*idempotency.Middleware[*sql.Tx], error) {
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	if err != nil {
		return nil, fmt.Errorf("make the store: %w", err)
	}
	if err := store.Migrate(ctx); err != nil {
		return nil, fmt.Errorf("migrate the receipts: %w", err)
	}
	m, err := idempotency.New(stage.KillingStore[*sql.Tx]{Store: store, Trigger: death}, idempotency.Config{
		Consumer: "tracking",
		Validate: func(msg *message.Message) error { _, err := scan.Parse(msg.Payload); return err },
		Limits:   limits,
	})
	if err != nil {
		return nil, fmt.Errorf("make the middleware: %w", err)
	}
	return m, nil
}

// dataSource names a database file, whatever characters its path has.
func dataSource(path string, params url.Values) string {
	return "file:" + (&url.URL{Path: path}).EscapedPath() + "?" + params.Encode()
}

// openDatabase opens the file as durable as SQLite can: a write-ahead log that is flushed at each commit.
func openDatabase(ctx context.Context, path string) (*sql.DB, error) {
	db, err := sql.Open("sqlite", dataSource(path, url.Values{
		"_txlock": {"immediate"},
		"_pragma": {"journal_mode(WAL)", "synchronous(FULL)", "busy_timeout(5000)"},
	}))
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	db.SetMaxOpenConns(2) // SQLite has one writer
	if _, err := db.ExecContext(ctx, tableSQL); err != nil {
		_ = db.Close()
		return nil, fmt.Errorf("create the tables: %w", err)
	}
	return db, nil
}

// apply is the handler: what it writes through tx commits together with the receipt, or not at all. Nothing in it knows
// of duplicates.
func apply(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	e, err := scan.Parse(msg.Payload)
	if err != nil {
		return idempotency.Permanent(err) // Validate has refused it before
	}
	at := e.At.UTC().Format(time.RFC3339)
	if _, err := tx.ExecContext(ctx,
		`INSERT INTO scans (id, parcel, status, depot, weight_g, at) VALUES (?, ?, ?, ?, ?, ?)`,
		e.ID, e.Parcel, e.Status, e.Depot, e.WeightGrams, at); err != nil {
		return fmt.Errorf("record the scan: %w", err)
	}
	// Events come in any order: only a newer one moves the parcel, every one counts.
	if _, err := tx.ExecContext(ctx, `
		INSERT INTO parcels (parcel, status, depot, at, scans) VALUES (?, ?, ?, ?, 1)
		ON CONFLICT (parcel) DO UPDATE SET scans = scans + 1,
			status = iif(excluded.at > at, excluded.status, status),
			depot = iif(excluded.at > at, excluded.depot, depot),
			at = max(excluded.at, at)`,
		e.Parcel, e.Status, e.Depot, at); err != nil {
		return fmt.Errorf("move the parcel: %w", err)
	}
	return nil
}

// applyBare is the same handler without the middleware: a transaction of its own, then the router's ack.
func applyBare(db *sql.DB, death *stage.Trigger) message.NoPublishHandlerFunc {
	return func(msg *message.Message) error {
		if _, err := scan.Parse(msg.Payload); err != nil {
			return nil // thrown away
		}
		tx, err := db.BeginTx(msg.Context(), nil)
		if err != nil {
			return fmt.Errorf("begin: %w", err)
		}
		defer tx.Rollback()
		if err := apply(msg.Context(), tx, msg); err != nil {
			return err
		}
		death.Pass(stage.BeforeCommit, 1, stage.LastWords{Open: 1})
		if err := tx.Commit(); err != nil {
			return fmt.Errorf("commit: %w", err)
		}
		death.Pass(stage.AfterCommit, 1, stage.LastWords{Committed: 1})
		return nil
	}
}

// reportTo writes a line after each message.
func reportTo(out io.Writer, m *idempotency.Middleware[*sql.Tx]) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			outputs, err := next(msg)
			progress{Replayed: m.Report().Replayed}.tell(out)
			return outputs, err
		}
	}
}
