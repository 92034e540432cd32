package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/jackc/pgx/v5/stdlib" // registers the driver "pgx"

	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/contracttest/stage"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// What all processes call things.
const (
	topic  = "transfers"
	group  = "ledger"
	window = 64 // messages that a process has in hand
	// lanes is how many transactions a process runs at a time. The accounts are few: more would wait for each other.
	lanes = 2
	// pool is how many connections a process has: one for each lane, one for a message whose duplicate another process is
	// working on, and one to spare.
	pool = lanes + 2
)

// consumerEnv holds a consumerSpec in the environment of a child process; its presence makes a process a consumer.
const consumerEnv = "PENSTOCK_LEDGER_CONSUMER"

// consumerSpec is what the parent tells a consumer process at its birth; later it tells when to die: a stage.Kill.
type consumerSpec struct {
	Socket   string
	Database string // a URL
	Single   bool   // one message at a time
	Bare     bool   // leaves the middleware out
}

// news is a line of JSON from a consumer to its parent.
type news struct {
	Ready  bool             `json:",omitempty"` // the router runs
	Report counts           // so far
	Last   *stage.LastWords `json:",omitempty"` // in the moment of death
}

// counts are those of the middleware's report that the demo shows.
type counts struct {
	Replayed, Failed, Contention uint64
}

// teller writes news to the parent.
type teller struct {
	mu     sync.Mutex
	out    io.Writer
	report func() counts // set before ready
}

func (t *teller) tell(n news) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.report != nil {
		n.Report = t.report()
	}
	if line, err := json.Marshal(n); err == nil {
		stage.Line(t.out, line)
	}
}

// newsTime is how often a consumer tells its counts, besides in its last moment.
const newsTime = 20 * time.Millisecond

// runConsumer is the child's main.
func runConsumer() error {
	var spec consumerSpec
	says := &teller{out: os.Stdout}
	death := stage.NewTrigger(stage.Kill{}, func(last stage.LastWords) { says.tell(news{Last: &last}) })
	order := func(line []byte) {
		var k stage.Kill
		if json.Unmarshal(line, &k) == nil {
			death.Set(k)
		}
	}
	return stage.Consumer(consumerEnv, &spec, order, func(ctx context.Context) error {
		return consume(ctx, spec, says, death)
	})
}

func consume(ctx context.Context, spec consumerSpec, says *teller, death *stage.Trigger) error {
	db, err := sql.Open("pgx", spec.Database)
	if err != nil {
		return fmt.Errorf("open the database: %w", err)
	}
	defer db.Close()
	db.SetMaxOpenConns(pool)
	db.SetMaxIdleConns(pool)
	broker, err := pipe.Open(ctx, func(ctx context.Context) (io.ReadWriteCloser, error) {
		return new(net.Dialer).DialContext(ctx, "unix", spec.Socket)
	}, 0)
	if err != nil {
		return fmt.Errorf("connect to the broker: %w", err)
	}
	defer broker.Close(context.Background())
	sub, err := sdk.NewSubscriber(stage.KillingDriver{Driver: broker, Trigger: death},
		sdk.SubscriberConfig{Group: group, MaxInFlight: window})
	if err != nil {
		return fmt.Errorf("make the subscriber: %w", err)
	}
	ours := book{between: func(n int) { death.Pass(betweenHalves, n, stage.LastWords{Open: n}) }}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	if spec.Bare {
		router.AddConsumerHandler("transfer", topic, sub, applyBare(db, ours, death))
	} else {
		m, err := newMiddleware(db, sub.Limits(), death)
		if err != nil {
			return err
		}
		says.report = func() counts {
			r := m.Report()
			return counts{Replayed: r.Replayed, Failed: r.Failed, Contention: r.Contention}
		}
		handler := m.HandleBatch(ours.applyAll)
		if spec.Single {
			handler = m.Handle(ours.apply)
		}
		router.AddConsumerHandler("transfer", topic, sub, handler)
	}
	return says.during(ctx, router, func() error { return sdk.Run(ctx, router, sub) })
}

// during tells the parent that the router runs, and from then on the counts, until work has ended.
func (t *teller) during(ctx context.Context, router *message.Router, work func() error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var group sync.WaitGroup
	group.Go(func() {
		select {
		case <-router.Running():
			t.tell(news{Ready: true})
		case <-ctx.Done():
		}
		for tick := time.NewTicker(newsTime); ctx.Err() == nil; t.tell(news{}) {
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
	err := work()
	stop()
	group.Wait()
	t.tell(news{})
	return err
}

// newMiddleware is what an application would write, but for the store's wrapper, which kills. The tables were made by the
// parent.
func newMiddleware(db *sql.DB, limits sdk.Limits, death *stage.Trigger) (*idempotency.Middleware[*sql.Tx], error) {
	store, err := receipts.NewPostgres(db, receipts.PostgresOptions{})
	if err != nil {
		return nil, fmt.Errorf("make the store: %w", err)
	}
	m, err := idempotency.New(stage.KillingStore[*sql.Tx]{Store: store, Trigger: death}, idempotency.Config{
		Consumer: "ledger",
		Validate: func(msg *message.Message) error { _, err := parse(msg.Payload); return err },
		Lanes:    lanes,
		LockKeys: lockKeys,
		Limits:   limits,
	})
	if err != nil {
		return nil, fmt.Errorf("make the middleware: %w", err)
	}
	return m, nil
}

// applyBare is the same handler without the middleware: a transaction of its own, then the router's ack.
func applyBare(db *sql.DB, ours book, death *stage.Trigger) message.NoPublishHandlerFunc {
	return func(msg *message.Message) error {
		tx, err := db.BeginTx(msg.Context(), nil)
		if err != nil {
			return fmt.Errorf("begin: %w", err)
		}
		defer tx.Rollback()
		if err := ours.apply(msg.Context(), tx, msg); err != nil {
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
