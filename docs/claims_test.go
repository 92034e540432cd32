package docs

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite"

	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// These tests run what the pages say in prose. Each names the page.

// plant is a broker, a database and one consumer.
type plant struct {
	t      *testing.T
	db     *sql.DB
	store  *receipts.SQLite
	driver sdk.Driver
	pub    *sdk.Publisher
	sub    *sdk.Subscriber
	acked  chan sdk.Event
	router *message.Router
}

// writer is what the README says about a data source name.
const writer = "?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"

func newPlant(t *testing.T) *plant {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "app.db")+writer)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, db.Close()) })
	_, err = db.ExecContext(t.Context(), `CREATE TABLE effects (id TEXT)`)
	require.NoError(t, err)
	return newPlantOn(t, db)
}

// newPlantOn is what a restart is: the same database, everything else anew.
func newPlantOn(t *testing.T, db *sql.DB) *plant {
	t.Helper()
	p := &plant{t: t, db: db, acked: make(chan sdk.Event, 100)}
	var err error
	p.store, err = receipts.NewSQLite(p.db, receipts.SQLiteOptions{})
	require.NoError(t, err)
	require.NoError(t, p.store.Migrate(t.Context()))
	p.driver, err = memory.NewNetwork(memory.Options{}).Driver("plant")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, p.driver.Close(context.Background())) })
	p.pub, err = sdk.NewPublisher(p.driver, sdk.PublisherConfig{})
	require.NoError(t, err)
	p.sub, err = sdk.NewSubscriber(p.driver, sdk.SubscriberConfig{Group: "plant", MaxInFlight: 1, Observer: p})
	require.NoError(t, err)
	p.router, err = message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	return p
}

// Observe makes plant an sdk.Observer that waits for acks.
func (p *plant) Observe(e sdk.Event) {
	if e.Kind == sdk.EventSettled && e.Verdict == sdk.Ack {
		p.acked <- e
	}
}

func (p *plant) middleware(cfg idempotency.Config) *idempotency.Middleware[*sql.Tx] {
	p.t.Helper()
	cfg.Consumer, cfg.Limits = "plant", p.sub.Limits()
	m, err := idempotency.New(p.store, cfg)
	require.NoError(p.t, err)
	return m
}

// process runs the router, publishes messages to topic "in", waits for their acks, and ends in an orderly way.
func (p *plant) process(msgs ...*message.Message) {
	p.t.Helper()
	p.processUntil(len(msgs), msgs...)
}

// processUntil is process with as many acks as the groups of the topic ask for.
func (p *plant) processUntil(acks int, msgs ...*message.Message) {
	p.t.Helper()
	ctx, cancel := context.WithCancel(p.t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- sdk.Run(ctx, p.router, p.sub) }()
	<-p.router.Running()
	for _, msg := range msgs {
		require.NoError(p.t, p.pub.Publish("in", msg))
	}
	for range acks {
		select {
		case <-p.acked:
		case <-time.After(20 * time.Second):
			p.t.Error("a message is not acknowledged")
		}
	}
	cancel()
	require.NoError(p.t, <-ended)
}

func (p *plant) count(query string) (n int) {
	p.t.Helper()
	require.NoError(p.t, p.db.QueryRowContext(p.t.Context(), query).Scan(&n))
	return n
}

func apply(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES (?)`, msg.UUID)
	return err
}

func text(id, payload string) *message.Message { return message.NewMessage(id, []byte(payload)) }

func TestReadmePluginAroundExistingHandlers(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	m := p.middleware(idempotency.Config{RequireTx: true})
	p.router.AddPlugin(m.Plugin)
	p.router.AddConsumerHandler("charge", "in", p.sub, func(msg *message.Message) error {
		tx, err := idempotency.TxFrom[*sql.Tx](msg.Context())
		if err != nil {
			return err
		}
		return apply(msg.Context(), tx, msg)
	})
	p.process(text("a", "1"), text("a", "1"), text("b", "1"))
	assert.Equal(t, 2, p.count(`SELECT count(*) FROM effects`))
	assert.EqualValues(t, 1, m.Report().Replayed)
	assert.Empty(t, m.Report().Store.Warnings, "the README's data source name")
}

func TestReadmeNewSaysThatTheHandleDoesNotWrite(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "app.db"))
	require.NoError(t, err)
	defer func() { assert.NoError(t, db.Close()) }()
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	require.NoError(t, err)
	require.NoError(t, store.Migrate(t.Context()))
	_, err = idempotency.New(store, idempotency.Config{Consumer: "billing"})
	require.ErrorContains(t, err, "_txlock=immediate")
}

func TestGuaranteesAckAndNackInsideTheHandler(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	m := p.middleware(idempotency.Config{})
	var attempt atomic.Int32
	p.router.AddConsumerHandler("charge", "in", p.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		if err := apply(ctx, tx, msg); err != nil {
			return err
		}
		switch attempt.Add(1) {
		case 1:
			msg.Ack()
			return errors.New("after the ack")
		case 2:
			msg.Nack()
		}
		return nil
	}))
	p.process(text("a", "1"))
	assert.EqualValues(t, 3, attempt.Load())
	assert.Equal(t, 1, p.count(`SELECT count(*) FROM effects`))
	assert.EqualValues(t, 2, m.Report().Failed)
}

// leaveCommitHook gives the plant a store that prevents nothing.
func (p *plant) leaveCommitHook() {
	p.t.Helper()
	var err error
	p.store, err = receipts.NewSQLite(p.db, receipts.SQLiteOptions{LeaveCommitHook: true})
	require.NoError(p.t, err)
}

func TestGuaranteesNobodyButTheStoreCommits(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	m := p.middleware(idempotency.Config{})
	var attempt atomic.Int32
	var told error
	p.router.AddConsumerHandler("charge", "in", p.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		if err := apply(ctx, tx, msg); err != nil {
			return err
		}
		switch attempt.Add(1) {
		case 1:
			_, told = tx.ExecContext(ctx, "COMMIT")
			return told
		case 2:
			return tx.Commit()
		}
		return nil
	}))
	p.process(text("a", "1"))
	require.Error(t, told)
	report := m.Report()
	assert.EqualValues(t, []uint64{2, 0, 1}, []uint64{report.Failed, report.Torn, report.Handled})
	assert.Equal(t, 1, p.count(`SELECT count(*) FROM effects`))
}

func TestGuaranteesAHandlerThatCommitsLeavesATornReceipt(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	p.leaveCommitHook()
	m := p.middleware(idempotency.Config{})
	p.router.AddConsumerHandler("charge", "in", p.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		return tx.Commit()
	}))
	p.process(text("a", "1"))
	report := m.Report()
	assert.EqualValues(t, []uint64{1, 1, 0, 0}, []uint64{report.Failed, report.Torn, report.Handled, report.Replayed})
	assert.Equal(t, 1, p.count(`SELECT count(*) FROM penstock_dead_letters WHERE kind = 'torn'`))
}

func TestGuaranteesWhatIsWrittenAfterAnErrorThatEndsTheTransaction(t *testing.T) {
	t.Parallel()
	for name, effects := range map[string]int{"refused": 1, "one for each attempt": 3} {
		p := newPlant(t)
		if effects > 1 {
			p.leaveCommitHook()
		}
		m := p.middleware(idempotency.Config{})
		_, err := p.db.ExecContext(t.Context(), `CREATE TABLE taken (id TEXT PRIMARY KEY); INSERT INTO taken VALUES ('x')`)
		require.NoError(t, err)
		var attempt atomic.Int32
		p.router.AddConsumerHandler("charge", "in", p.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			if attempt.Add(1) > 2 {
				return apply(ctx, tx, msg)
			}
			_, _ = tx.ExecContext(ctx, `INSERT OR ROLLBACK INTO taken VALUES ('x')`) // ignored
			_ = apply(ctx, tx, msg)                                                  // likewise
			return nil
		}))
		p.process(text("a", "1"))
		report := m.Report()
		assert.Equal(t, []uint64{2, 1, 0}, []uint64{report.Failed, report.Handled, report.Torn}, name)
		assert.Equal(t, effects, p.count(`SELECT count(*) FROM effects`), name)
	}
}

func TestGuaranteesAtMostOnceLosesWhatFails(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	m := p.middleware(idempotency.Config{Guarantee: idempotency.AtMostOnce})
	p.router.AddConsumerHandler("charge", "in", p.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		return errors.New("not now")
	}))
	p.process(text("a", "1"))
	report := m.Report()
	assert.Equal(t, []uint64{1, 1, 0}, []uint64{report.Failed, report.Replayed, report.Handled})
}

func TestIdentityTwoHandlersOfOneTopic(t *testing.T) {
	t.Parallel()
	for groups, effects := range map[string]int{"plant": 1, "other": 2} {
		p := newPlant(t)
		second, err := sdk.NewSubscriber(p.driver, sdk.SubscriberConfig{Group: groups, MaxInFlight: 1, Observer: p})
		require.NoError(t, err)
		m := p.middleware(idempotency.Config{})
		p.router.AddConsumerHandler("charge", "in", p.sub, m.Handle(apply))
		p.router.AddConsumerHandler("mail", "in", second, m.Handle(apply))
		p.processUntil(effects, text("a", "1"))
		assert.Equal(t, effects, p.count(`SELECT count(*) FROM effects`), groups)
		assert.EqualValues(t, effects, m.Report().Handled, groups)
	}
}

func TestIdentityScopesAndAliases(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	p.router.AddConsumerHandler("charge", "in", p.sub, p.middleware(idempotency.Config{}).Handle(apply))
	p.process(text("a", "1"))

	// Another handler of the topic sees the message again; a renamed one, with its alias, does not.
	for _, name := range []string{"charge-card", "other"} {
		again := newPlantOn(t, p.db)
		m := again.middleware(idempotency.Config{Aliases: map[string]string{"charge-card": "charge"}})
		again.router.AddConsumerHandler(name, "in", again.sub, m.Handle(apply))
		again.process(text("a", "1"))
		if name == "charge-card" {
			assert.EqualValues(t, 1, m.Report().Replayed)
			continue
		}
		assert.EqualValues(t, 1, m.Report().Handled)
	}
	assert.Equal(t, 2, p.count(`SELECT count(*) FROM effects`))
}

func TestIdentityRefusedAndPermanentAndCorrected(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	m := p.middleware(idempotency.Config{Validate: func(msg *message.Message) error {
		if string(msg.Payload) == "malformed" {
			return errors.New("malformed")
		}
		return nil
	}})
	p.router.AddConsumerHandler("charge", "in", p.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		if err := apply(ctx, tx, msg); err != nil {
			return err
		}
		if string(msg.Payload) == "impossible" {
			return idempotency.Permanent(errors.New("no such account"))
		}
		return nil
	}))
	p.process(
		text("a", "malformed"), text("a", "corrected"), // refused without a receipt, so the second is new
		text("b", "impossible"), text("b", "impossible"), text("b", "corrected"), // a receipt: replay, then conflict
		text("", "no id"), text("c", "malformed"), text("c", "malformed"),
	)
	report := m.Report()
	assert.Equal(t, []uint64{1, 1, 1, 1, 4}, []uint64{report.Handled, report.Diverted, report.Replayed, report.Conflicted, report.Refused})
	assert.Equal(t, 1, p.count(`SELECT count(*) FROM effects`))
	assert.Equal(t, 5, p.count(`SELECT count(*) FROM penstock_dead_letters`), "a and c apart, one for both copies of c")
}

func TestIdentityFieldHasNoFallThrough(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	m := p.middleware(idempotency.Config{IdentityField: "order"})
	p.router.AddConsumerHandler("charge", "in", p.sub, m.Handle(apply))
	with := text("x", "1")
	with.Metadata.Set("order", "4711")
	other := text("y", "1")
	other.Metadata.Set("order", "4711")
	other.Metadata.Set("fingerprint", "is of the payload only")
	p.process(with, other, text("z", "1"), text("z", "1"), text("z", "2"), text("w", "1"))
	report := m.Report()
	assert.Equal(t, []uint64{1, 1, 4}, []uint64{report.Handled, report.Replayed, report.Refused})
	assert.Equal(t, 3, p.count(`SELECT count(*) FROM penstock_dead_letters`), "equal copies share one")
}

// recorder is a publisher that fails as often as it is told.
type recorder struct {
	mu    sync.Mutex
	fails int
	sent  []string
}

func (r *recorder) Publish(topic string, msgs ...*message.Message) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fails > 0 {
		r.fails--
		return errors.New("not now")
	}
	for _, msg := range msgs {
		r.sent = append(r.sent, topic+"/"+msg.UUID)
	}
	return nil
}

func (r *recorder) Close() error { return nil }

func TestOutputsOfAllKinds(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	outputs := &recorder{}
	m := p.middleware(idempotency.Config{Outputs: outputs})
	var attempt atomic.Int32
	bus, err := cqrs.NewEventBusWithConfig(m.Publisher(nil), cqrs.EventBusConfig{
		GeneratePublishTopic: func(cqrs.GenerateEventPublishTopicParams) (string, error) { return "events", nil },
		Marshaler:            cqrs.JSONMarshaler{GenerateName: func(any) string { return "shipped" }, NewUUID: func() string { return "from-bus" }},
	})
	require.NoError(t, err)
	p.router.AddConsumerHandler("ship", "in", p.sub, m.HandleOutputs("shipped",
		func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
			if err := bus.Publish(ctx, struct{}{}); err != nil {
				return nil, err
			}
			if attempt.Add(1) == 1 {
				return []*message.Message{text("of a failed attempt", "")}, errors.New("once")
			}
			return []*message.Message{text("returned", "")}, apply(ctx, tx, msg)
		}))
	p.process(text("a", "1"))
	assert.ElementsMatch(t, []string{"shipped/returned", "events/from-bus"}, outputs.sent)
}

func TestOutputsAreSentByAReplayAndNeedAPublisher(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	outputs := &recorder{fails: 1}
	m := p.middleware(idempotency.Config{Outputs: outputs})
	p.router.AddConsumerHandler("ship", "in", p.sub, m.HandleOutputs("shipped",
		func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
			return []*message.Message{text("out", "")}, apply(ctx, tx, msg)
		}))
	p.process(text("a", "1"), text("a", "1")) // the first is acknowledged although its publish failed
	assert.Equal(t, []string{"shipped/out"}, outputs.sent)
	assert.EqualValues(t, 1, m.Report().OutputsFailed)

	without := p.middleware(idempotency.Config{})
	msg := text("b", "1")
	msg.SetContext(context.Background())
	handler := without.HandleOutputs("shipped", func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{text("out", "")}, apply(ctx, tx, msg)
	})
	err := handler(msg)
	require.ErrorContains(t, err, "Config.Scope", "no router: the handler has no name")
	assert.False(t, idempotency.IsFailure(err))
}

func TestShutdownLetsWhatIsHandledFinish(t *testing.T) {
	t.Parallel()
	p := newPlant(t)
	m := p.middleware(idempotency.Config{})
	began, finish := make(chan struct{}), make(chan struct{})
	p.router.AddConsumerHandler("charge", "in", p.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		close(began)
		<-finish
		return apply(ctx, tx, msg)
	}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- sdk.Run(ctx, p.router, p.sub) }()
	<-p.router.Running()
	require.NoError(t, p.pub.Publish("in", text("a", "1"), text("b", "1")))
	<-began
	cancel()
	close(finish)
	require.NoError(t, <-ended)
	event := <-p.acked
	assert.Equal(t, sdk.SettleOutcomeConfirmed, event.Outcome)
	assert.Equal(t, 1, p.count(`SELECT count(*) FROM effects`))
	assert.Zero(t, p.count(`SELECT count(*) FROM penstock_dead_letters`))
	_, err := p.sub.Subscribe(t.Context(), "in")
	require.ErrorIs(t, err, sdk.ErrClosed)
}

func TestDriversRegistryRefusesWhatItDoesNotKnow(t *testing.T) {
	t.Parallel()
	var registry sdk.Registry
	require.NoError(t, registry.Add("memory", memory.NewNetwork(memory.Options{}).Open))
	driver, err := registry.Open(t.Context(), "memory://orders?capacity=1000")
	require.NoError(t, err)
	require.NoError(t, driver.Close(t.Context()))
	for _, url := range []string{"memory://orders?size=3", "amqp://host", "orders"} {
		_, err := registry.Open(t.Context(), url)
		require.Error(t, err, url)
	}
	_, err = sdk.NewSubscriber(driver, sdk.SubscriberConfig{})
	require.ErrorContains(t, err, "Group is empty")
}
