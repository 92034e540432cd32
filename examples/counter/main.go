// Counter shows the promise at its smallest: one message is delivered twice, with two tokens; the counter is incremented
// once, and both deliveries are acknowledged.
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "modernc.org/sqlite"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

const topic = "increments"

// increment is the payload of a message.
type increment struct {
	Counter string `json:"counter"`
	By      int64  `json:"by"`
}

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "counter:", err)
		os.Exit(1)
	}
}

// run delivers one message twice, prints what became of it, and checks it.
func run(ctx context.Context, out io.Writer) error {
	dir, err := os.MkdirTemp("", "counter-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	db, err := openDatabase(ctx, filepath.Join(dir, "counter.db"))
	if err != nil {
		return err
	}
	defer db.Close()

	payload := []byte(`{"counter": "visits", "by": 1}`)
	done, err := consume(ctx, db, message.NewMessage("m-1", payload), message.NewMessage("m-1", payload))
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "acknowledged %d  replayed %d  failed %d\n", len(done.tokens), done.report.Replayed, done.report.Failed)

	var visits int64
	if err := db.QueryRowContext(ctx, `SELECT value FROM counters WHERE name = 'visits'`).Scan(&visits); err != nil {
		return err
	}
	if visits != 1 || len(done.tokens) != 2 || done.report.Replayed != 1 || done.report.Failed != 0 {
		return fmt.Errorf("the counter is at %d instead of 1, or the line above is wrong", visits)
	}
	return nil
}

// apply is the handler. What it does through tx commits together with the receipt, or not at all.
func apply(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	inc, err := parse(msg)
	if err != nil {
		return err
	}
	var value int64
	err = tx.QueryRowContext(ctx, `SELECT value FROM counters WHERE name = ?`, inc.Counter).Scan(&value)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if inc.By > 0 && value > math.MaxInt64-inc.By || inc.By < 0 && value < math.MinInt64-inc.By {
		// Trying again cannot help: the message goes to the dead letters.
		return idempotency.Permanent(fmt.Errorf("counter %s would overflow", inc.Counter))
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO counters (name, value) VALUES (?, ?)
		ON CONFLICT (name) DO UPDATE SET value = excluded.value`, inc.Counter, value+inc.By)
	return err
}

// parse refuses what no state of the database could make right.
func parse(msg *message.Message) (increment, error) {
	var inc increment
	if err := json.Unmarshal(msg.Payload, &inc); err != nil {
		return inc, err
	}
	if inc.Counter == "" {
		return inc, errors.New("no counter is named")
	}
	return inc, nil
}

// outcome is what became of some messages.
type outcome struct {
	tokens map[sdk.Token]bool // of the acknowledged deliveries: each has its own
	report idempotency.Report
}

// consume publishes messages and handles them until the broker has confirmed an ack for each.
func consume(ctx context.Context, db *sql.DB, msgs ...*message.Message) (done outcome, err error) {
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	if err != nil {
		return done, err
	}
	if err := store.Migrate(ctx); err != nil {
		return done, err
	}
	broker, err := memory.NewNetwork(memory.Options{}).Driver("counter")
	if err != nil {
		return done, err
	}
	defer broker.Close(ctx)
	settled := make(chan sdk.Token, len(msgs))
	sub, err := sdk.NewSubscriber(broker, sdk.SubscriberConfig{Group: "counter", Observer: sdk.ObserverFunc(func(e sdk.Event) {
		if e.Kind == sdk.EventSettled && e.Verdict == sdk.Ack && e.Outcome == sdk.SettleOutcomeConfirmed {
			settled <- e.Token
		}
	})})
	if err != nil {
		return done, err
	}
	pub, err := sdk.NewPublisher(broker, sdk.PublisherConfig{})
	if err != nil {
		return done, err
	}
	defer pub.Close()
	m, err := idempotency.New(store, idempotency.Config{
		Consumer: "counter",
		Validate: func(msg *message.Message) error { _, err := parse(msg); return err },
		Limits:   sub.Limits(),
	})
	if err != nil {
		return done, err
	}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddConsumerHandler("apply", topic, sub, m.Handle(apply))

	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		defer stop() // also where it ends by itself
		ended <- sdk.Run(ctx, router, sub)
	}()
	defer func() {
		stop()
		err = errors.Join(err, <-ended)
		done.report = m.Report()
	}()
	select {
	case <-router.Running(): // now the group exists: what is sent from here on reaches it
	case <-ctx.Done():
		return done, ctx.Err()
	}
	if err := pub.PublishContext(ctx, topic, msgs...); err != nil {
		return done, err
	}
	done.tokens = map[sdk.Token]bool{}
	for range msgs {
		select {
		case token := <-settled:
			done.tokens[token] = true
		case <-ctx.Done():
			return done, ctx.Err()
		}
	}
	return done, nil
}

func openDatabase(ctx context.Context, path string) (*sql.DB, error) {
	db, err := sql.Open("sqlite", "file:"+path+"?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	if err != nil {
		return nil, err
	}
	_, err = db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT`)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}
