package handlertest

import (
	"context"
	"database/sql"
	"errors"
	"net/url"
	"path/filepath"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite"

	"github.com/penstock-mq/penstock/contracttest/memstore"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func theMessage() *message.Message { return message.NewMessage("m-1", []byte("5")) }

// shop is an application's database.
type shop struct {
	db    *sql.DB
	store *receipts.SQLite
}

// openShop makes one, on which a blocked writer gives up soon.
func openShop(t *testing.T) *shop {
	t.Helper()
	q := url.Values{"_txlock": {"immediate"}, "_pragma": {"busy_timeout(50)", "journal_mode(WAL)", "synchronous(FULL)"}}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "shop.db")+"?"+q.Encode())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	if _, err := db.ExecContext(t.Context(), `CREATE TABLE sales (id TEXT, n INTEGER)`); err != nil {
		t.Fatal(err)
	}
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return &shop{db: db, store: store}
}

// runner is what *sql.DB and *sql.Tx share.
type runner interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

func sell(ctx context.Context, r runner, id string, n int) error {
	_, err := r.ExecContext(ctx, `INSERT INTO sales VALUES (?, ?)`, id, n)
	return err
}

// sales is the state: everything sold, in the order of selling.
func (s *shop) sales(ctx context.Context) (any, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT id, n FROM sales ORDER BY rowid`)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // reading is over by then
	type sale struct {
		ID string
		N  int
	}
	var all []sale
	for rows.Next() {
		var s sale
		if err := rows.Scan(&s.ID, &s.N); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, rows.Err()
}

// inShop is a case whose handler is made for a shop.
func inShop(handler func(s *shop) func(context.Context, *sql.Tx, *message.Message) error) func(t *testing.T) Case[*sql.Tx] {
	return func(t *testing.T) Case[*sql.Tx] {
		t.Helper()
		s := openShop(t)
		return Case[*sql.Tx]{Store: s.store, Message: theMessage, State: s.sales, Handler: handler(s)}
	}
}

func goodSale(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	return sell(ctx, tx, msg.UUID, len(msg.Payload))
}

func sellAll(ctx context.Context, tx *sql.Tx, msgs []*message.Message) error {
	for _, msg := range msgs {
		if err := goodSale(ctx, tx, msg); err != nil {
			return err
		}
	}
	return nil
}

// goodOnes are all ways to give a handler, each with a handler that is right.
func goodOnes() map[string]func(t *testing.T) Case[*sql.Tx] {
	produce := func(id string) []*message.Message {
		return []*message.Message{message.NewMessage(watermill.NewUUID(), []byte(id))}
	}
	plain := func(msg *message.Message) ([]*message.Message, error) {
		tx, err := idempotency.TxFrom[*sql.Tx](msg.Context())
		if err != nil {
			return nil, err
		}
		return produce(msg.UUID), goodSale(msg.Context(), tx, msg)
	}
	with := func(change func(c *Case[*sql.Tx])) func(t *testing.T) Case[*sql.Tx] {
		return func(t *testing.T) Case[*sql.Tx] {
			t.Helper()
			s := openShop(t)
			c := Case[*sql.Tx]{Store: s.store, Message: theMessage, State: s.sales}
			change(&c)
			return c
		}
	}
	return map[string]func(t *testing.T) Case[*sql.Tx]{
		"handler": inShop(func(*shop) func(context.Context, *sql.Tx, *message.Message) error { return goodSale }),
		"outputs": with(func(c *Case[*sql.Tx]) {
			c.HandlerOutputs = func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
				return produce(msg.UUID), goodSale(ctx, tx, msg)
			}
		}),
		"outputs alone": with(func(c *Case[*sql.Tx]) {
			c.HandlerOutputs = func(_ context.Context, _ *sql.Tx, msg *message.Message) ([]*message.Message, error) {
				return produce(msg.UUID), nil
			}
		}),
		"batches": with(func(c *Case[*sql.Tx]) {
			c.HandlerBatch = sellAll
		}),
		"plugin": with(func(c *Case[*sql.Tx]) {
			c.Topic = "orders"
			c.Register = func(m *idempotency.Middleware[*sql.Tx], r *message.Router, sub message.Subscriber) error {
				r.AddMiddleware(middleware.Recoverer)
				r.AddPlugin(m.Plugin)
				r.AddHandler("sell", "orders", sub, "sold", discard{}, plain)
				return nil
			}
		}),
		"wrapped, outputs through the router": with(func(c *Case[*sql.Tx]) {
			c.Topic = "orders"
			c.Config = idempotency.Config{Consumer: "shop", RequireTx: true, OutputsThroughRouter: true}
			c.Register = func(m *idempotency.Middleware[*sql.Tx], r *message.Router, sub message.Subscriber) error {
				r.AddHandler("sell", "orders", sub, "sold", discard{}, m.Wrap(plain))
				return nil
			}
		}),
		"one connection": func(t *testing.T) Case[*sql.Tx] {
			t.Helper()
			s := openShop(t)
			s.db.SetMaxOpenConns(1)
			return Case[*sql.Tx]{Store: s.store, Message: theMessage, State: s.sales, Handler: goodSale}
		},
		"identity in a field, a validator, something inside": with(func(c *Case[*sql.Tx]) {
			c.Handler = goodSale
			c.Message = func() *message.Message {
				msg := theMessage()
				msg.Metadata.Set("order", "4711")
				return msg
			}
			c.Config = idempotency.Config{
				IdentityField: "order", Validate: func(*message.Message) error { return nil }, TxBudget: time.Minute,
				Inside: []message.HandlerMiddleware{middleware.CorrelationID},
			}
		}),
	}
}

func TestGoodHandlersPass(t *testing.T) {
	for name, open := range goodOnes() {
		t.Run(name, func(t *testing.T) { Run(t, open) })
	}
}

func TestGoodHandlerPassesOnOtherStores(t *testing.T) {
	for name, opts := range map[string]memstore.Options{
		"many writers": {}, "one writer": {Serial: true}, "without parts": {WithoutParts: true},
	} {
		t.Run(name, func(t *testing.T) {
			Run(t, func(*testing.T) Case[*memstore.Tx] {
				db := memstore.NewDatabaseWith(opts)
				return Case[*memstore.Tx]{
					Store:   db.Store(),
					Message: theMessage,
					State:   func(context.Context) (any, error) { return db.Counters(), nil },
					Handler: func(_ context.Context, tx *memstore.Tx, _ *message.Message) error { return tx.Add("sales", 1) },
				}
			})
		})
	}
}

// A handler may panic over a statement that fails: that rolls back as an error does.
func TestPanickingOverAFailedStatementIsFine(t *testing.T) {
	Run(t, inShop(func(*shop) func(context.Context, *sql.Tx, *message.Message) error {
		return func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			if err := goodSale(ctx, tx, msg); err != nil {
				panic(err)
			}
			return nil
		}
	}))
}

func TestCasesThatCanShowNothingAreRefused(t *testing.T) {
	good := func() Case[*memstore.Tx] {
		return Case[*memstore.Tx]{
			Store:   memstore.NewDatabase().Store(),
			Message: theMessage,
			State:   func(context.Context) (any, error) { return nil, nil },
			Handler: func(context.Context, *memstore.Tx, *message.Message) error { return nil },
		}
	}
	same := theMessage()
	tests := map[string]struct {
		change func(c *Case[*memstore.Tx])
		want   string
	}{
		"no store":   {func(c *Case[*memstore.Tx]) { c.Store = nil }, "no Store"},
		"no message": {func(c *Case[*memstore.Tx]) { c.Message = nil }, "no Message"},
		"no state":   {func(c *Case[*memstore.Tx]) { c.State = nil }, "no State"},
		"no handler": {func(c *Case[*memstore.Tx]) { c.Handler = nil }, "0 of Handler"},
		"two handlers": {func(c *Case[*memstore.Tx]) {
			c.Register = func(*idempotency.Middleware[*memstore.Tx], *message.Router, message.Subscriber) error { return nil }
		}, "2 of Handler"},
		"two handlers, one for batches": {func(c *Case[*memstore.Tx]) {
			c.HandlerBatch = func(context.Context, *memstore.Tx, []*message.Message) error { return nil }
		}, "2 of Handler"},
		"impatience":       {func(c *Case[*memstore.Tx]) { c.Patience = -1 }, "Patience is -1ns"},
		"other guarantee":  {func(c *Case[*memstore.Tx]) { c.Config.Guarantee = idempotency.AtMostOnce }, "not EffectivelyOnce"},
		"outputs":          {func(c *Case[*memstore.Tx]) { c.Config.Outputs = discard{} }, "Config.Outputs is set"},
		"nil message":      {func(c *Case[*memstore.Tx]) { c.Message = func() *message.Message { return nil } }, "gives nil"},
		"same message":     {func(c *Case[*memstore.Tx]) { c.Message = func() *message.Message { return same } }, "the same pointer"},
		"changing message": {func(c *Case[*memstore.Tx]) { c.Message = changing() }, "another message at each call"},
		"state unreadable": {func(c *Case[*memstore.Tx]) {
			c.State = func(context.Context) (any, error) { return nil, errors.New("no such table") }
		}, "reading State: no such table"},
		"config refused": {func(c *Case[*memstore.Tx]) { c.Config.TxBudget = -1 }, "TxBudget is -1ns"},
		"register fails": {func(c *Case[*memstore.Tx]) {
			c.Handler = nil
			c.Register = func(*idempotency.Middleware[*memstore.Tx], *message.Router, message.Subscriber) error {
				return errors.New("not today")
			}
		}, "Register: not today"},
		"register adds none": {func(c *Case[*memstore.Tx]) {
			c.Handler = nil
			c.Register = func(*idempotency.Middleware[*memstore.Tx], *message.Router, message.Subscriber) error { return nil }
		}, "added no handler"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := cleanRuns(t, func(*testing.T) Case[*memstore.Tx] {
				c := good()
				tt.change(&c)
				return c
			})
			wants(t, err, tt.want)
		})
	}
}

func changing() func() *message.Message {
	return func() *message.Message { return message.NewMessage(watermill.NewUUID(), nil) }
}
