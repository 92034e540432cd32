package receipts

import (
	"strconv"
	"strings"
)

// pgQueries holds the SQL text of one prefix, built once. Everything is one statement, of a text that does not depend on the
// number of rows, so that a client may prepare it or not, and nothing is left in the session: a pooler may stand between.
type pgQueries struct {
	bounds                            string
	claim, held, unclaim              string
	marker, markerCounting, open      string
	outputs, divert                   string
	fence, fenced, fenceWait          string
	kill                              string
	markSent, park, unpark, parkOrder string
	migrateOrder                      string
}

const (
	// pgOwn is true in the transaction that bounds was sent in: the setting ends with it, however it ends.
	pgOwn = `current_setting('penstock.nonce', true) IS NOT DISTINCT FROM `
	// pgChanged counts the receipts that were deleted or updated in this transaction. While one is open, nothing else moves
	// these counters. Claims that met a concurrent one count, too, so only differences say something.
	pgChanged = `(pg_stat_get_xact_tuples_deleted('penstock_receipts'::regclass)
	+ pg_stat_get_xact_tuples_updated('penstock_receipts'::regclass))`
	// pgMicros is when the transaction began.
	pgMicros = `(extract(epoch FROM transaction_timestamp()) * 1000000)::bigint`
)

// newPgQueries writes the prefix into every statement. Each names tables by the default prefix.
func newPgQueries(prefix string) *pgQueries {
	p := func(query string) string { return named(prefix, query) }
	return &pgQueries{
		// Settings of the server that are stricter already stay. transaction_timeout came with version 17.
		bounds: p(`SELECT set_config('penstock.nonce', $1::text, true),
	set_config('statement_timeout', ` + pgStricter("statement_timeout", "$2") + `, true),
	set_config('idle_in_transaction_session_timeout', ` + pgStricter("idle_in_transaction_session_timeout", "$3") + `, true),
	CASE WHEN current_setting('server_version_num')::integer >= 170000
		THEN set_config('transaction_timeout', ` + pgStricter("transaction_timeout", "$3") + `, true) END`),

		// The lock_timeout is the claim's alone: w is read before the first row is inserted, and the outer SELECT gives its row
		// after the last one.
		claim: p(`WITH w AS MATERIALIZED (
	SELECT current_setting('lock_timeout') AS own, ` + pgChanged + ` AS changed, set_config('lock_timeout', $1::text, true)),
c AS (INSERT INTO penstock_receipts (scope, identity_key, fingerprint, nonce, state, created_at)
	SELECT $2::bytea, u.k, u.f, $3::bytea, $4::smallint, u.a FROM w CROSS JOIN unnest($5::bytea[], $6::bytea[], $7::bigint[]) AS u (k, f, a)
	WHERE ` + pgOwn + `$8::text ON CONFLICT DO NOTHING RETURNING 1)
SELECT count(*), ` + pgOwn + `$8::text, ` + pgChanged + ` - (SELECT changed FROM w), ` + pgChanged + `, pg_backend_pid(), ` + pgMicros + `,
	set_config('lock_timeout', (SELECT own FROM w), true) FROM c`),
		held: p(`SELECT (u.i - 1)::integer, r.fingerprint, r.nonce, r.state, r.created_at, m.nonce IS NOT NULL
	FROM unnest($1::bytea[]) WITH ORDINALITY AS u (k, i)
	JOIN penstock_receipts r ON r.scope = $2::bytea AND r.identity_key = u.k
	LEFT JOIN penstock_markers m ON m.nonce = r.nonce AND m.claims > 0`),
		unclaim: p(`DELETE FROM penstock_receipts r USING unnest($1::bytea[]) AS u (k)
	WHERE r.scope = $2::bytea AND r.identity_key = u.k AND r.nonce = $3::bytea AND ` + pgOwn + `$4::text`),

		// A marker that may not be is a negative number of claims, which fails the statement, and with it whatever was sent
		// behind it. Counting the receipts costs half as much as claiming them; what has changed is known for nothing.
		marker: p(`INSERT INTO penstock_markers (nonce, claims, created_at)
	SELECT $1::bytea, CASE WHEN ` + pgOwn + `$4::text AND ` + pgChanged + ` = $5::bigint THEN $2::integer ELSE -1 END, $3::bigint`),
		markerCounting: p(`INSERT INTO penstock_markers (nonce, claims, created_at)
	SELECT $1::bytea, CASE WHEN ` + pgOwn + `$4::text AND count(r.nonce) = $2::integer THEN $2::integer ELSE -1 END, $3::bigint
	FROM unnest($5::bytea[], $6::bytea[]) AS u (s, k)
	LEFT JOIN penstock_receipts r ON r.scope = u.s AND r.identity_key = u.k AND r.nonce = $1::bytea`),
		open: `SELECT 1 / CASE WHEN ` + pgOwn + `$1::text THEN 1 ELSE 0 END`,

		outputs: p(`INSERT INTO penstock_outputs (` + outputRow + `)
	SELECT $1::bytea, u.* FROM unnest($2::integer[], $3::bytea[], $4::bytea[], $5::bytea[], $6::bytea[], $7::bytea[], $8::bytea[],
	$9::bigint[], $10::smallint[]) AS u WHERE ` + pgOwn + `$11::text`),
		divert: p(`INSERT INTO penstock_dead_letters (` + letterRow + `)
	SELECT u.* FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::text[], $5::text[], $6::bytea[], $7::bytea[], $8::bytea[],
	$9::bytea[], $10::bytea[], $11::bytea[], $12::bigint[]) AS u WHERE ` + pgOwn + `$13::text ON CONFLICT DO NOTHING`),

		fenceWait: `SELECT set_config('lock_timeout', $1::text, true)`,
		fence:     p(`INSERT INTO penstock_markers (nonce, claims, created_at) VALUES ($1::bytea, 0, $2::bigint) ON CONFLICT DO NOTHING`),
		fenced:    p(`SELECT claims FROM penstock_markers WHERE nonce = $1::bytea`),
		kill: `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
	WHERE pid = $1::integer AND (extract(epoch FROM xact_start) * 1000000)::bigint = $2::bigint`,

		markSent: p(`UPDATE penstock_outputs o SET sent_at = $1::bigint FROM unnest($2::bytea[], $3::integer[]) AS u (nonce, position)
	WHERE o.sent_at IS NULL AND o.nonce = u.nonce AND o.position = u.position`),
		park: p(`INSERT INTO penstock_parked (` + parkedRow + `)
	SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::bytea[], $5::bytea[], $6::bytea[], $7::bytea[], $8::bytea[],
	$9::bigint[]) ON CONFLICT DO NOTHING`),
		unpark:       p(`DELETE FROM penstock_parked WHERE position = ANY ($1::bigint[])`),
		parkOrder:    p(`SELECT pg_advisory_xact_lock(hashtextextended('penstock_parked', 1727))`),
		migrateOrder: p(`SELECT pg_advisory_xact_lock(hashtextextended('penstock_schema', 1727))`),
	}
}

// pgStricter gives the smaller one of a setting and a number of milliseconds, 0 being none at all.
func pgStricter(setting, millis string) string {
	own := `current_setting('` + setting + `', true)`
	bound := `(` + millis + `::text || 'ms')`
	return `CASE WHEN ` + millis + `::text = '0' OR ` + own + `::interval > interval '0' AND ` + own + `::interval < ` + bound + `::interval
		THEN ` + own + ` ELSE ` + bound + ` END`
}

func newPgSchema(prefix string, own int) schemaQueries {
	return schemaQueries{
		missing: named(prefix, `SELECT t FROM (VALUES ('penstock_receipts'), ('penstock_markers'), ('penstock_outputs'),
	('penstock_dead_letters'), ('penstock_parked')) AS v (t) WHERE to_regclass(t) IS NULL LIMIT 1`),
		hasSchema: named(prefix, `SELECT CASE WHEN to_regclass('penstock_schema') IS NULL THEN 0 ELSE 1 END`),
		versions:  named(prefix, `SELECT version, compatible_from FROM penstock_schema ORDER BY version DESC LIMIT 1`),
		remedy:    "call Migrate with a role that may create tables, or run the files of PostgresMigrations",
		own:       own,
	}
}

// dollars gives the questions with $1, $2 … for values.
func (q listQueries) dollars() listQueries {
	for _, text := range []*string{&q.unsent, &q.unsentOf, &q.outputsOf, &q.deadLetters, &q.parkedKeys, &q.parked, &q.stats} {
		var b strings.Builder
		n := 0
		for part := range strings.SplitSeq(*text, "?") {
			if n > 0 {
				b.WriteString("$" + strconv.Itoa(n))
			}
			b.WriteString(part)
			n++
		}
		*text = b.String()
	}
	return q
}
