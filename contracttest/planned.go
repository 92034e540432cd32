package contracttest

// Planned lists the clauses of the contract that nothing checks yet. Their Check is nil; Name says what they wait for.
// The caller owns the slice.
func Planned() []Clause {
	const (
		batches  = "batches and order"
		database = "PostgreSQL and MySQL"
		sqlQueue = "the SQL driver"
		failures = "the failure policy"
		pruning  = "retention"
		upgrades = "upgrades"
	)
	plan := []Clause{
		{ID: "D15", Name: sqlQueue, Capability: "tx-settle", Text: "settling inside the caller's transaction: commit settles, rollback does not, also across kill -9"},
		{ID: "O04", Name: sqlQueue, Text: "late commits: a transaction that started earlier and commits later is not skipped"},
		{ID: "T11", Name: failures, Text: "outputs of an input that never comes back are still sent by the relay"},
		{ID: "T12", Name: batches, Text: "batch, per message: one bad message leaves the others committed and acked once"},
		{ID: "T13", Name: batches, Text: "batch, all or nothing: one bad message, nothing of that batch acked or applied; earlier batches stay"},
		{ID: "T14", Name: batches, Text: "a duplicate inside one batch takes its first copy's outcome; a batch of only duplicates writes nothing (TxSettler apart)"},
		{ID: "T15", Name: database, Text: "40001, 40P01, 1213, 1205, SQLITE_BUSY and a read-then-write SQLite handler: retried, counted as contention, not as attempts"},
		{ID: "T16", Name: database, Text: "the handler swallows an SQL error: 25P02 on PostgreSQL; 1213, 1205 and DDL on MySQL/MariaDB; an SQLite error that ends the transaction: no effect without its receipt, no receipt without its effect, no neighbour harmed"},
		{ID: "T17", Name: failures, Text: "attempts survive restart and are never the broker's count; MaxAttempts diverts; receipt and dead letter commit together; Permanent diverts at once"},
		{ID: "T18", Name: failures, Text: "a message that kills the process, in the middle of a window of 512, is diverted after at most log2 n + MaxAttempts crashes; its neighbours are applied and not charged; a connection cut every second for a minute charges nobody"},
		{ID: "T19", Name: failures, Text: "replay of a dead letter: applied once, by the consumer that diverted it and no other group; redelivery of the old copy at the same time: still once"},
		{ID: "T22", Name: pruning, Text: "prune: never inside the horizon, never a pinned receipt, bounded per step, five janitors and four writers without a surfaced deadlock"},
		{ID: "T24", Name: batches, Text: "order key, also under outer middleware that filters, delays or limits: a failing message holds back later ones of its key, not those of other keys, while the held fit into half the window; no deadlock, none at shutdown"},
		{ID: "T29", Name: batches, Text: "one duplicate held open elsewhere for 5 s: the other 255 of the batch are acked within 1 s"},
		{ID: "T33", Name: upgrades, Text: "two versions of the consumer side by side, switched on in a running system; schema N and N+1; a role without DDL; through PgBouncer in transaction mode"},
	}
	built := map[string]bool{}
	for _, id := range TxClauseIDs() {
		built[id] = true
	}
	var left []Clause
	for _, c := range plan {
		if !built[c.ID] {
			left = append(left, c)
		}
	}
	return left
}

// TxClauses lists the transaction clauses, which [RunTx] checks, in the order of their ids. Their Check is nil, because it
// needs a store; the caller owns the slice.
func TxClauses() []Clause {
	var all []Clause
	for _, c := range txClauses[struct{}]() {
		clause := c.Clause
		clause.Check = nil
		all = append(all, clause)
	}
	return all
}
