package receipts

import (
	"context"
	"database/sql"
	"fmt"
	"math"
)

// listQueries are the questions about what is stored, in a dialect's words. Their values come in the order of the methods
// below that ask them.
type listQueries struct {
	// unsent: before, length of a prefix of the scope, that prefix, limit; unsentOf: before, scope, key, limit.
	unsent, unsentOf string
	// outputsOf: scope, key.
	outputsOf string
	// deadLetters: limit.
	deadLetters string
	// parkedKeys: scope; parked: scope, order key, position, limit.
	parkedKeys, parked string
	// stats: a time, for unsent outputs before it. Rows are what, label, number and the oldest time or NULL: see Stats.add.
	stats string
}

const (
	outputColumns = `o.nonce, o.position, o.scope, o.identity_key, o.topic, o.uuid, o.metadata, o.payload, o.created_at,
	o.via_router, o.sent_at IS NOT NULL`

	// unsentOutputs leaves out the outputs of a torn receipt: they belong to a transaction that is not proven whole. A marker
	// without claims is a fence (see Resolve of the servers' dialects) and proves nothing.
	unsentOutputs = `SELECT ` + outputColumns + ` FROM penstock_outputs o
	LEFT JOIN penstock_receipts r ON r.scope = o.scope AND r.identity_key = o.identity_key AND r.nonce = o.nonce
	LEFT JOIN penstock_markers m ON m.nonce = r.nonce AND m.claims > 0
	WHERE o.sent_at IS NULL AND o.via_router = 0 AND (r.nonce IS NULL OR m.nonce IS NOT NULL) AND o.created_at < ?`
)

// newListQueries writes the questions with ? for values, null being a NULL of the type of the times.
func newListQueries(prefix, null string) listQueries {
	p := func(query string) string { return named(prefix, query) }
	return listQueries{
		unsent:   p(unsentOutputs + ` AND substr(o.scope, 1, ?) = ? ORDER BY o.created_at, o.nonce, o.position LIMIT ?`),
		unsentOf: p(unsentOutputs + ` AND o.scope = ? AND o.identity_key = ? ORDER BY o.created_at, o.nonce, o.position LIMIT ?`),
		outputsOf: p(`SELECT ` + outputColumns + ` FROM penstock_outputs o WHERE o.scope = ? AND o.identity_key = ?
	ORDER BY o.created_at, o.nonce, o.position`),
		deadLetters: p(`SELECT ` + letterRow + ` FROM penstock_dead_letters ORDER BY created_at, id LIMIT ?`),
		parkedKeys:  p(`SELECT order_key, count(*) FROM penstock_parked WHERE scope = ? GROUP BY order_key ORDER BY min(position)`),
		parked: p(`SELECT position, scope, order_key, handler, topic, uuid, metadata, payload, created_at FROM penstock_parked
	WHERE scope = ? AND order_key = ? AND position > ? ORDER BY position LIMIT ?`),
		stats: p(`SELECT CASE WHEN m.nonce IS NULL THEN 'torn' WHEN r.state = 2 THEN 'diverted' ELSE 'done' END, '', count(*), ` + null + `
	FROM penstock_receipts r LEFT JOIN penstock_markers m ON m.nonce = r.nonce AND m.claims > 0 GROUP BY 1
	UNION ALL SELECT 'dead', kind, count(*), ` + null + ` FROM penstock_dead_letters GROUP BY kind
	UNION ALL SELECT 'outputs', '', count(*), ` + null + ` FROM penstock_outputs
	UNION ALL SELECT 'parked', '', count(*), ` + null + ` FROM penstock_parked
	UNION ALL SELECT 'unsent', '', count(*), min(created_at) FROM (` + unsentOutputs + `) u`),
	}
}

// Unsent lists what the relay has to send: outputs that are not marked as sent, without those that go through the router
// and those of torn receipts.
func (h *sqlHandle) Unsent(ctx context.Context, q UnsentQuery) ([]Output, error) {
	if q.Limit < 1 {
		return nil, fmt.Errorf("receipts: unsent outputs: limit %d is below 1", q.Limit)
	}
	before := int64(math.MaxInt64)
	if !q.Before.IsZero() {
		before = q.Before.UnixMicro()
	}
	query, args := h.lists.unsent, []any{before, len(q.Prefix), blob([]byte(q.Prefix)), q.Limit}
	if q.Scope != "" {
		query, args = h.lists.unsentOf, []any{before, []byte(q.Scope), blob(q.Key), q.Limit}
	}
	outputs, err := list(ctx, h, query, args, scanOutput)
	if err != nil {
		return nil, fmt.Errorf("receipts: listing unsent outputs: %w", err)
	}
	return outputs, nil
}

// Outputs lists the outputs of one receipt; none and nil where there are none.
func (h *sqlHandle) Outputs(ctx context.Context, scope string, key []byte) ([]Output, error) {
	outputs, err := list(ctx, h, h.lists.outputsOf, []any{[]byte(scope), blob(key)}, scanOutput)
	if err != nil {
		return nil, fmt.Errorf("receipts: listing the outputs of %q in scope %q: %w", key, scope, err)
	}
	return outputs, nil
}

// DeadLetters lists dead letters by the time they were stored with. limit is at least 1.
func (h *sqlHandle) DeadLetters(ctx context.Context, limit int) ([]DeadLetter, error) {
	if limit < 1 {
		return nil, fmt.Errorf("receipts: dead letters: limit %d is below 1", limit)
	}
	letters, err := list(ctx, h, h.lists.deadLetters, []any{limit}, scanDeadLetter)
	if err != nil {
		return nil, fmt.Errorf("receipts: listing dead letters: %w", err)
	}
	return letters, nil
}

// ParkedKeys counts the parked messages of each order key.
func (h *sqlHandle) ParkedKeys(ctx context.Context, scope string) ([]ParkedKey, error) {
	keys, err := list(ctx, h, h.lists.parkedKeys, []any{[]byte(scope)}, func(scan scanFunc) (k ParkedKey, err error) {
		err = scan(&k.OrderKey, &k.Messages)
		return k, err
	})
	if err != nil {
		return nil, fmt.Errorf("receipts: listing parked order keys: %w", err)
	}
	return keys, nil
}

// Parked lists parked messages of one order key. limit is at least 1.
func (h *sqlHandle) Parked(ctx context.Context, scope, orderKey string, after int64, limit int) ([]Parked, error) {
	if limit < 1 {
		return nil, fmt.Errorf("receipts: parked messages: limit %d is below 1", limit)
	}
	parked, err := list(ctx, h, h.lists.parked, []any{[]byte(scope), []byte(orderKey), after, limit}, scanParked)
	if err != nil {
		return nil, fmt.Errorf("receipts: listing parked messages: %w", err)
	}
	return parked, nil
}

// Stats counts the rows of all tables in one statement, so that the counts fit together.
func (h *sqlHandle) Stats(ctx context.Context) (Stats, error) {
	var stats Stats
	err := h.read(ctx, func(conn *sql.Conn) error {
		stats = Stats{DeadLetters: map[DeadLetterKind]int{}}
		return queryAll(ctx, conn, h.lists.stats, []any{int64(math.MaxInt64)}, func(scan scanFunc) error {
			var what, label string
			var n int
			var oldest sql.NullInt64
			if err := scan(&what, &label, &n, &oldest); err != nil {
				return err
			}
			stats.add(what, label, n, oldest)
			return nil
		})
	})
	if err != nil {
		return Stats{}, fmt.Errorf("receipts: counting: %w", err)
	}
	return stats, nil
}

// list reads all rows of a query.
func list[R any](ctx context.Context, h *sqlHandle, query string, args []any, scan func(scanFunc) (R, error)) ([]R, error) {
	var rows []R
	err := h.read(ctx, func(conn *sql.Conn) error {
		rows = nil // a dead connection in the middle begins again
		return queryAll(ctx, conn, query, args, func(next scanFunc) error {
			row, err := scan(next)
			rows = append(rows, row)
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	return rows, nil
}
