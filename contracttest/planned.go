package contracttest

// Planned lists the clauses of the contract that nothing checks yet. Their Check is nil; Name says what they wait for.
// The caller owns the slice.
func Planned() []Clause {
	const (
		sqlQueue = "the SQL driver"
		failures = "the failure policy"
		pruning  = "retention"
	)
	plan := []Clause{
		{ID: "D15", Name: sqlQueue, Capability: "tx-settle", Text: "settling inside the caller's transaction: commit settles, rollback does not, also across kill -9"},
		{ID: "O04", Name: sqlQueue, Text: "late commits: a transaction that started earlier and commits later is not skipped"},
		{ID: "T11", Name: failures, Text: "outputs of an input that never comes back are still sent by the relay"},
		{ID: "T17", Name: failures, Text: "attempts survive restart and are never the broker's count; MaxAttempts diverts; receipt and dead letter commit together; Permanent diverts at once"},
		{ID: "T18", Name: failures, Text: "a message that kills the process, in the middle of a window of 512, is diverted after at most log2 n + MaxAttempts crashes; its neighbours are applied and not charged; a connection cut every second for a minute charges nobody"},
		{ID: "T19", Name: failures, Text: "replay of a dead letter: applied once, by the consumer that diverted it and no other group; redelivery of the old copy at the same time: still once"},
		{ID: "T22", Name: pruning, Text: "prune: never inside the horizon, never a pinned receipt, bounded per step, five janitors and four writers without a surfaced deadlock"},
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
