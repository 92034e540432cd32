package idempotency

import (
	"context"
	"database/sql"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// Three lives of a consumer over a real database: in the first two everything of one key fails, and something of others. All
// effects are applied once, per key in the order of the source, under either policy.
func TestOrderOverSQLite(t *testing.T) {
	for name, policy := range map[string]OrderPolicy{"stand still": StandStill, "park": ParkKeys} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, sdk.SubscriberConfig{MaxInFlight: 16})
			uuids := keyedUUIDs(150)
			if err := e.driver.Prepare(t.Context(), sdk.Binding{Topic: "orders", Group: "billing", Declare: true}); err != nil {
				t.Fatal(err)
			}
			sent := make(chan struct{})
			go func() { defer close(sent); send(t, e.driver, uuids) }()
			var broken atomic.Bool
			broken.Store(true)
			handler := newUnreliable(11, 0.1)
			life := func(e *engine) *Middleware[*sql.Tx] {
				cfg := Config{OrderPolicy: policy, OrderKey: func(msg *message.Message) string { return msg.Metadata.Get("key") }}
				cfg.RetryBackoff = sdk.Backoff{Min: 5 * time.Millisecond, Max: 50 * time.Millisecond}
				m := e.middleware(cfg)
				e.router.AddSubscriberDecorators(m.Ordered)
				e.router.AddMiddleware(limiter(8))
				e.router.AddConsumerHandler("charge", "orders", e.sub, m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
					if err := apply(ctx, tx, msg.UUID); err != nil {
						return err
					}
					if broken.Load() && orderKeyOf(msg.UUID) == "b" {
						return errUnreliable
					}
					return handler.handle(msg)
				}))
				return m
			}
			m := life(e)
			stop := e.run()
			if policy == ParkKeys { // all others go on
				until(t, "what does not fail is handled", func() bool { return len(e.inOrder()) == countOthers(uuids, "b") })
				until(t, "one key is parked", func() bool { return m.Report().Health.ParkedKeys == 1 }) // others were for a while
				if h := m.Report().Health; h.StandsStill {
					t.Errorf("health %+v", h)
				}
			} else {
				until(t, "it stands still", func() bool { return m.Report().Health.StandsStill })
			}
			stop()
			second := e.restart(sdk.SubscriberConfig{MaxInFlight: 16})
			m = life(second)
			stop = second.run()
			until(t, "it fails again", func() bool { r := m.Report(); return r.Failed > 3 })
			stop()
			broken.Store(false)
			third := e.restart(sdk.SubscriberConfig{MaxInFlight: 16})
			life(third)
			stop = third.run()
			until(t, "everything is handled", func() bool { return len(e.inOrder()) == len(uuids) })
			stop()
			<-sent
			checkOrder(t, e.inOrder(), uuids)
			for uuid, n := range e.effects() {
				if n != 1 {
					t.Errorf("the effect of %s was applied %d times", uuid, n)
				}
			}
			e.wantRows(len(uuids), 0, 0, 0)
			stats, err := e.store.Stats(t.Context())
			if err != nil || stats.Parked != 0 {
				t.Errorf("%d messages are parked, %v", stats.Parked, err)
			}
			if n := e.broker.Unsettled("orders", "billing") + e.broker.Pending("orders", "billing"); n != 0 {
				t.Errorf("the broker holds %d messages", n)
			}
		})
	}
}

func countOthers(uuids []string, key string) int {
	n := 0
	for _, uuid := range uuids {
		if orderKeyOf(uuid) != key {
			n++
		}
	}
	return n
}

// inOrder lists the names of effects in the order in which they were applied.
func (d *database) inOrder() []string {
	d.Helper()
	rows, err := d.db.Query(`SELECT name FROM effects ORDER BY rowid`)
	if err != nil {
		d.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var names []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			d.Fatal(err)
		}
		names = append(names, name)
	}
	if err := rows.Err(); err != nil {
		d.Fatal(err)
	}
	return names
}
