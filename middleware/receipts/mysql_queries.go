package receipts

import "crypto/rand"

// mysqlQueries holds the fixed parts of statements, with the store's prefix, built once.
type mysqlQueries struct {
	// guard is the name of a savepoint, drawn anew for each store: a handler's own are others, whatever they are called.
	guard string

	// held and count are followed by a scope and a list of keys.
	held, count    string
	claim, unclaim string
	// marker inserts values, or the result of a query; fenced is followed by a nonce.
	marker, fenced   string
	output, markSent string
	divert           string
	park, unpark     string
	parkOrder        string
	engines          string
	// rights change nothing, and fail where a right is missing.
	rights []string
}

func newMySQLQueries(prefix string) *mysqlQueries {
	p := func(query string) string { return named(prefix, query) }
	return &mysqlQueries{
		guard: "penstock_guard_" + rand.Text(),

		held: p(`SELECT r.identity_key, r.fingerprint, r.nonce, r.state, r.created_at, m.nonce IS NOT NULL
	FROM penstock_receipts r LEFT JOIN penstock_markers m ON m.nonce = r.nonce AND m.claims > 0 WHERE r.scope = `),
		count:   p(`(SELECT count(*) FROM penstock_receipts WHERE scope = `),
		claim:   p(`INSERT INTO penstock_receipts (scope, identity_key, fingerprint, nonce, state, created_at)`),
		unclaim: p(`DELETE FROM penstock_receipts WHERE nonce = `),

		marker: p(`INSERT INTO penstock_markers (nonce, claims, created_at)`),
		fenced: p(`SELECT claims FROM penstock_markers WHERE nonce = `),

		output:   p(`INSERT INTO penstock_outputs (` + outputRow + `)`),
		markSent: p(`UPDATE penstock_outputs SET sent_at = `),
		divert:   p(`INSERT INTO penstock_dead_letters (` + letterRow + `)`),
		park:     p(`INSERT INTO penstock_parked (` + parkedRow + `)`),
		unpark:   p(`DELETE FROM penstock_parked WHERE position IN (`),
		// The row of a nonce that no transaction has is what parking transactions queue up for.
		parkOrder: p(`INSERT INTO penstock_markers (nonce, claims, created_at) VALUES (x'00000000000000000000000000000000', 0, 0)`) + mysqlKeepMarker,
		engines: p(`SELECT table_name, coalesce(engine, '') FROM information_schema.tables
	WHERE table_schema = database() AND table_name IN ('penstock_receipts', 'penstock_markers', 'penstock_outputs',
	'penstock_dead_letters', 'penstock_parked')`),
		rights: []string{
			p(`UPDATE penstock_receipts SET state = state WHERE scope = x'' AND identity_key = x''`),
			p(`DELETE FROM penstock_receipts WHERE scope = x'' AND identity_key = x''`),
			p(`UPDATE penstock_outputs SET sent_at = 0 WHERE nonce = x'' AND position = 0`),
			p(`UPDATE penstock_dead_letters SET id = id WHERE id = 0`),
			p(`UPDATE penstock_parked SET position = position WHERE position = 0`),
			p(`DELETE FROM penstock_parked WHERE position = 0`),
		},
	}
}

// The ends of inserts that leave a row alone that is there. INSERT IGNORE would also cut what is too long.
const (
	mysqlKeepClaim  = " ON DUPLICATE KEY UPDATE state = state"
	mysqlKeepMarker = " ON DUPLICATE KEY UPDATE claims = claims"
	mysqlKeepLetter = " ON DUPLICATE KEY UPDATE id = id"
	mysqlKeepParked = " ON DUPLICATE KEY UPDATE position = position"
)

func newMySQLSchema(prefix string, own int) schemaQueries {
	return schemaQueries{
		missing: named(prefix, `SELECT name FROM (SELECT 'penstock_receipts' AS name UNION ALL SELECT 'penstock_markers'
	UNION ALL SELECT 'penstock_outputs' UNION ALL SELECT 'penstock_dead_letters' UNION ALL SELECT 'penstock_parked') t
	WHERE NOT EXISTS (SELECT 1 FROM information_schema.tables WHERE table_schema = database() AND table_name = t.name) LIMIT 1`),
		hasSchema: named(prefix, `SELECT count(*) FROM information_schema.tables
	WHERE table_schema = database() AND table_name = 'penstock_schema'`),
		versions: named(prefix, `SELECT version, compatible_from FROM penstock_schema ORDER BY version DESC LIMIT 1`),
		remedy:   "call Migrate, or run the files of MySQLMigrations",
		own:      own,
	}
}
