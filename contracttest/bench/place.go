package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// place is a kind of database, and how its contenders write to it.
type place struct {
	// loops is how many workers the loop by hand has, pipelines that of the pipelined one: what does best there.
	loops, pipelines int
	// bump is the effect; seen inserts a receipt written by hand, unless it is there.
	bump, seen string
	// tables make the counters and the receipts by hand.
	tables [2]string
	// store is Penstock's.
	store func(db *sql.DB) (receipts.Store[*sql.Tx], error)
	// make makes a database for one round.
	make func(ctx context.Context, w work) (site, error)
}

// site is one round's database.
type site struct {
	// open lets it be used through a handle of its own, any number of times.
	open func(use func(*sql.DB) error) error
	// drop ends it.
	drop func() error
	// url is its address, for clients that are not of database/sql; "" where there are none.
	url string
}

// config is Penstock's. Where several transactions run at a time it names the row that a message touches, as the loop sorts
// its messages by it.
func (p place) config(limits sdk.Limits, batch int) idempotency.Config {
	cfg := idempotency.Config{Consumer: consumer, Limits: limits, BatchSize: batch}
	if p.loops > 1 {
		cfg.LockKeys = func(msg *message.Message) []string { return []string{counterOf(msg.Payload)} }
	}
	return cfg
}

// scheme says how a contender keeps its receipts.
type scheme struct {
	// prepare makes the tables, count is a query for the number of receipts.
	prepare func(ctx context.Context, db *sql.DB, p place) error
	count   string
}

// handWritten is what people write: one row for a message, without fingerprint or marker.
func handWritten() scheme {
	return scheme{
		prepare: func(ctx context.Context, db *sql.DB, p place) error {
			_, err := db.ExecContext(ctx, p.tables[1])
			return err
		},
		count: `SELECT count(*) FROM seen`,
	}
}

// penstock has the tables of its migrations.
func penstock() scheme {
	return scheme{
		prepare: func(ctx context.Context, db *sql.DB, p place) error {
			store, err := p.store(db)
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

// on gives a contender a database of its own, and reads the result back through another handle.
func (p place) on(s scheme, do body) func(ctx context.Context, w work) (outcome, error) {
	return func(ctx context.Context, w work) (o outcome, err error) {
		w.place = p
		at, err := p.make(ctx, w)
		if err != nil {
			return o, err
		}
		w.url = at.url
		defer func() { err = errors.Join(err, at.drop()) }()
		err = at.open(func(db *sql.DB) error {
			if err := createCounters(ctx, db, p); err != nil {
				return fmt.Errorf("make the counters: %w", err)
			}
			if err := s.prepare(ctx, db, p); err != nil {
				return fmt.Errorf("make the receipts' tables: %w", err)
			}
			o.took, o.values, err = do(ctx, w, db)
			return err
		})
		if err != nil {
			return o, err
		}
		return o, at.open(func(db *sql.DB) error {
			if err := db.QueryRowContext(ctx, s.count).Scan(&o.receipts); err != nil {
				return fmt.Errorf("count the receipts: %w", err)
			}
			o.effects, err = readCounters(ctx, db)
			return err
		})
	}
}

func createCounters(ctx context.Context, db *sql.DB, p place) error {
	if _, err := db.ExecContext(ctx, p.tables[0]); err != nil {
		return err
	}
	names := make([]string, counterCount)
	for i := range names {
		names[i] = "('" + counterName(i) + "', 0)"
	}
	_, err := db.ExecContext(ctx, `INSERT INTO counters (name, value) VALUES `+strings.Join(names, ", "))
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
