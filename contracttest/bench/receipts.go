package main

import (
	"context"
	"crypto/md5" //nolint:gosec // it only has to scatter
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// manyReceipts asks what a message costs where the table holds many receipts already, with identities that are all over it, as
// random UUIDs are.
func manyReceipts(opts options) study {
	s := study{name: receiptsStudy, pair: "memory → PostgreSQL", window: usualWindow, warmUp: 200, span: time.Second}
	sizes := []int{0, 1_000_000}
	if opts.large {
		sizes = append(sizes, 10_000_000)
	}
	var all []*filled
	for _, size := range sizes {
		f := &filled{place: postgres(opts.servers, 0), rows: size}
		if opts.quick {
			f.rows /= 1000
		}
		all = append(all, f)
		c := contender{name: strconv.Itoa(size) + " receipts", round: f.round}
		if size > 0 {
			c.rivals = []string{"0 receipts"}
		}
		s.contenders = append(s.contenders, c)
	}
	s.end = func() (err error) {
		for _, f := range all {
			if f.at.drop != nil {
				err = errors.Join(err, f.at.drop())
			}
		}
		return err
	}
	return s
}

// scattered is the identity of message i.
func scattered(i int) string {
	sum := md5.Sum([]byte(strconv.Itoa(i))) //nolint:gosec // see above
	return hex.EncodeToString(sum[:])
}

// filled is a database with receipts, kept for all rounds. Each round has messages of its own.
type filled struct {
	place place
	rows  int

	at   site
	used int
}

func (f *filled) round(ctx context.Context, w work) (o outcome, err error) {
	w.place, w.scattered = f.place, true
	if f.at.open == nil {
		if err := f.fill(ctx, w); err != nil {
			return o, fmt.Errorf("fill the table of receipts: %w", err)
		}
	}
	w.first, w.url = f.used, f.at.url
	f.used += w.messages
	o.receipts = noReceipts // counting them would take longer than the round
	return o, f.at.open(func(db *sql.DB) error {
		if _, err := db.ExecContext(ctx, `UPDATE counters SET value = 0`); err != nil {
			return err
		}
		if o.took, o.values, err = drain(withPenstock)(ctx, w, db); err != nil {
			return err
		}
		o.effects, err = readCounters(ctx, db)
		return err
	})
}

// fill makes the tables, lets one message through to know the scope, and copies its receipt under other keys.
func (f *filled) fill(ctx context.Context, w work) (err error) {
	if f.at, err = f.place.make(ctx, w); err != nil {
		return err
	}
	return f.at.open(func(db *sql.DB) error {
		if err := errors.Join(createCounters(ctx, db, f.place), penstock().prepare(ctx, db, f.place)); err != nil {
			return err
		}
		w.messages, w.first = 1, 0
		if _, _, err := drain(withPenstock)(ctx, w, db); err != nil {
			return err
		}
		f.used = 1
		for _, statement := range []string{
			`INSERT INTO penstock_receipts (scope, identity_key, fingerprint, nonce, state, created_at)
				SELECT r.scope, convert_to(md5('old ' || i), 'UTF8'), r.fingerprint, r.nonce, r.state, r.created_at
				FROM penstock_receipts r, generate_series(1, ` + strconv.Itoa(f.rows) + `) i`,
			`VACUUM ANALYZE penstock_receipts`,
		} {
			if _, err := db.ExecContext(ctx, statement); err != nil {
				return err
			}
		}
		_, _ = db.ExecContext(ctx, `CHECKPOINT`) // where we may: what was written now is not to be flushed in a round
		return nil
	})
}
