package receipts

import "strings"

// sqliteChunk is the most rows of one statement: with six parameters a row it stays far below SQLite's limit of 32,766
// variables, and larger calls are cut into several statements of the same transaction.
const sqliteChunk = 1000

// sqliteQueries holds the SQL text of one prefix, built once. A %s stands for a list that depends on the number of rows.
type sqliteQueries struct {
	// flow are the statements of the flow of messages.
	flow [flowLen]string

	divert                       string
	unsent, unsentOf, outputsOf  string
	markSentOne, markSentMany    string
	deadLetters                  string
	park, parkedKeys             string
	parked, unpark               string
	stats                        string
	resolve, hasSchema, versions string
	tables                       string
}

const (
	outputColumns = `o.nonce, o.position, o.scope, o.identity_key, o.topic, o.uuid, o.metadata, o.payload, o.created_at,
	o.via_router, o.sent_at IS NOT NULL`

	// unsentOutputs leaves out the outputs of a torn receipt: they belong to a transaction that is not proven whole.
	unsentOutputs = `SELECT ` + outputColumns + ` FROM penstock_outputs o
	LEFT JOIN penstock_receipts r ON r.scope = o.scope AND r.identity_key = o.identity_key AND r.nonce = o.nonce
	LEFT JOIN penstock_markers m ON m.nonce = r.nonce
	WHERE o.sent_at IS NULL AND o.via_router = 0 AND (r.nonce IS NULL OR m.nonce IS NOT NULL) AND o.created_at < ?`
)

// newSQLiteQueries writes the prefix into every statement. Each names tables by the default prefix.
func newSQLiteQueries(prefix string) sqliteQueries {
	p := func(sql string) string { return strings.ReplaceAll(sql, defaultPrefix, prefix) }
	return sqliteQueries{
		flow: newFlow(p),

		divert: p(`INSERT INTO penstock_dead_letters (scope, identity_key, fingerprint, kind, reason, consumer, handler, topic,
	uuid, metadata, payload, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`),

		unsent:   p(unsentOutputs + ` AND substr(o.scope, 1, ?) = ? ORDER BY o.created_at, o.nonce, o.position LIMIT ?`),
		unsentOf: p(unsentOutputs + ` AND o.scope = ? AND o.identity_key = ? ORDER BY o.created_at, o.nonce, o.position LIMIT ?`),
		outputsOf: p(`SELECT ` + outputColumns + ` FROM penstock_outputs o WHERE o.scope = ? AND o.identity_key = ?
	ORDER BY o.created_at, o.nonce, o.position`),
		markSentOne: p(`UPDATE penstock_outputs SET sent_at = ? WHERE sent_at IS NULL AND nonce = ? AND position = ?`),
		markSentMany: p(`UPDATE penstock_outputs SET sent_at = ? WHERE sent_at IS NULL
	AND (nonce, position) IN (VALUES %s)`),
		deadLetters: p(`SELECT scope, identity_key, fingerprint, kind, reason, consumer, handler, topic, uuid, metadata, payload,
	created_at FROM penstock_dead_letters ORDER BY created_at, id LIMIT ?`),

		park: p(`INSERT INTO penstock_parked (scope, order_key, digest, handler, topic, uuid, metadata, payload, created_at)
	VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`),
		parkedKeys: p(`SELECT order_key, count(*) FROM penstock_parked WHERE scope = ? GROUP BY order_key ORDER BY min(position)`),
		parked: p(`SELECT position, scope, order_key, handler, topic, uuid, metadata, payload, created_at FROM penstock_parked
	WHERE scope = ? AND order_key = ? AND position > ? ORDER BY position LIMIT ?`),
		unpark: p(`DELETE FROM penstock_parked WHERE position IN (%s)`),

		stats: p(`SELECT CASE WHEN m.nonce IS NULL THEN 'torn' WHEN r.state = 2 THEN 'diverted' ELSE 'done' END, '', count(*), NULL
	FROM penstock_receipts r LEFT JOIN penstock_markers m ON m.nonce = r.nonce GROUP BY 1
	UNION ALL SELECT 'dead', kind, count(*), NULL FROM penstock_dead_letters GROUP BY kind
	UNION ALL SELECT 'outputs', '', count(*), NULL FROM penstock_outputs
	UNION ALL SELECT 'parked', '', count(*), NULL FROM penstock_parked
	UNION ALL SELECT 'unsent', '', count(*), min(created_at) FROM (` + unsentOutputs + `)`),

		resolve: p(`SELECT count(*) FROM penstock_markers WHERE nonce = ?`),
		tables: p(`SELECT column1 FROM (VALUES ('penstock_receipts'), ('penstock_markers'), ('penstock_outputs'), ('penstock_dead_letters'),
	('penstock_parked'))
	WHERE NOT EXISTS (SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = column1 COLLATE NOCASE) LIMIT 1`),
		hasSchema: p(`SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'penstock_schema' COLLATE NOCASE`),
		versions:  p(`SELECT version, compatible_from FROM penstock_schema ORDER BY version DESC LIMIT 1`),
	}
}
