package receipts

// sqliteChunk is the most rows of one statement: with six parameters a row it stays far below SQLite's limit of 32,766
// variables, and larger calls are cut into several statements of the same transaction.
const sqliteChunk = 1000

// sqliteQueries holds the SQL text of one prefix, built once. A %s stands for a list that depends on the number of rows.
type sqliteQueries struct {
	// flow are the statements of the flow of messages.
	flow [flowLen]string

	divert                    string
	markSentOne, markSentMany string
	park, unpark              string
	resolve                   string
}

// newSQLiteQueries writes the prefix into every statement. Each names tables by the default prefix.
func newSQLiteQueries(prefix string) sqliteQueries {
	p := func(query string) string { return named(prefix, query) }
	return sqliteQueries{
		flow: newFlow(p),

		divert: p(`INSERT INTO penstock_dead_letters (` + letterRow + `) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`),

		markSentOne: p(`UPDATE penstock_outputs SET sent_at = ? WHERE sent_at IS NULL AND nonce = ? AND position = ?`),
		markSentMany: p(`UPDATE penstock_outputs SET sent_at = ? WHERE sent_at IS NULL
	AND (nonce, position) IN (VALUES %s)`),

		park:   p(`INSERT INTO penstock_parked (` + parkedRow + `) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`),
		unpark: p(`DELETE FROM penstock_parked WHERE position IN (%s)`),

		resolve: p(`SELECT count(*) FROM penstock_markers WHERE nonce = ?`),
	}
}

func newSQLiteSchema(prefix string, own int) schemaQueries {
	return schemaQueries{
		missing: named(prefix, `SELECT column1 FROM (VALUES ('penstock_receipts'), ('penstock_markers'), ('penstock_outputs'),
	('penstock_dead_letters'), ('penstock_parked'))
	WHERE NOT EXISTS (SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = column1 COLLATE NOCASE) LIMIT 1`),
		hasSchema: named(prefix, `SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'penstock_schema' COLLATE NOCASE`),
		versions:  named(prefix, `SELECT version, compatible_from FROM penstock_schema ORDER BY version DESC LIMIT 1`),
		remedy:    "call Migrate, or run the files of SQLiteMigrations",
		own:       own,
	}
}
