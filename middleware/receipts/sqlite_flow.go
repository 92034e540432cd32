package receipts

import (
	"crypto/rand"
	"fmt"
	"strings"
)

// flow numbers the statements of the flow of messages: those of every transaction, and of every message in it. They are
// prepared once on each connection and bound to a transaction once, and their text does not change.
//
// The statements that take many rows exist for 1, 2, 4 … 256 rows: the number of the one for 2^n rows is n higher. Their
// rows share a scope, which is bound once; binding a value costs as much as a good part of looking for a row.
type flow uint8

// flowSizes is how many statements there are of one that takes many rows, and flowMost the most rows of one statement.
const (
	flowSizes = 9
	flowMost  = 1 << (flowSizes - 1)
)

const (
	flowGuard flow = iota
	flowSeal
	flowPart
	flowKeep
	flowUndo
	flowMarker
	flowCount
	flowAddOutput

	flowClaim   = flowAddOutput + 1
	flowHeld    = flowClaim + flowSizes
	flowUnclaim = flowHeld + flowSizes
	flowLen     = flowUnclaim + flowSizes
)

// newFlow writes the statements. The names of the savepoints are drawn anew for each store: a handler that used the name of
// its part for a savepoint of its own would make Undo go back to that one.
func newFlow(prefix func(sql string) string) (q [flowLen]string) {
	guard, part := prefix("penstock_guard_")+rand.Text(), prefix("penstock_part_")+rand.Text()
	q[flowGuard] = "SAVEPOINT " + guard
	q[flowSeal] = "RELEASE " + guard
	q[flowPart] = "SAVEPOINT " + part
	q[flowKeep] = "RELEASE " + part
	q[flowUndo] = "ROLLBACK TO " + part
	q[flowCount] = prefix(`SELECT count(*) FROM penstock_receipts WHERE identity_key = ? AND scope = ? AND nonce = ?`)
	q[flowMarker] = prefix(`INSERT INTO penstock_markers (nonce, claims, created_at) SELECT ?1, ?5, ?2
	FROM penstock_receipts WHERE scope = ?3 AND identity_key = ?4 AND nonce = ?1`)
	q[flowAddOutput] = prefix(`INSERT INTO penstock_outputs (nonce, position, scope, identity_key, topic, uuid, metadata, payload,
	created_at, via_router) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`)
	for i := range flow(flowSizes) {
		rows := 1 << i
		// OR FAIL: the usual ABORT would make SQLite keep a journal for a statement of many rows, to undo half of it. A claim
		// that fails is followed by a rollback anyway.
		q[flowClaim+i] = prefix(`INSERT OR FAIL INTO penstock_receipts (nonce, scope, state, identity_key, fingerprint, created_at)
	VALUES ` + tuples(rows, "(?1,?2,?3,?,?,?)") + ` ON CONFLICT DO NOTHING`)
		q[flowHeld+i] = prefix(fmt.Sprintf(`WITH w(i, identity_key) AS (VALUES %s)
	SELECT w.i, r.fingerprint, r.nonce, r.state, r.created_at, m.nonce IS NOT NULL FROM w
	CROSS JOIN penstock_receipts r ON r.scope = ?%d AND r.identity_key = w.identity_key
	LEFT JOIN penstock_markers m ON m.nonce = r.nonce`, numbered(rows), rows+1))
		q[flowUnclaim+i] = prefix(`DELETE FROM penstock_receipts WHERE scope = ?1 AND nonce = ?2
	AND identity_key IN (` + tuples(rows, "?") + `)`)
	}
	return q
}

// sized cuts n rows into what the statements for many rows take, and calls do with each: which statement, and its rows
// from and to.
func sized(n int, do func(size flow, from, to int) error) error {
	for from := 0; from < n; {
		size := flow(flowSizes - 1)
		for 1<<size > n-from {
			size--
		}
		to := from + 1<<size
		if err := do(size, from, to); err != nil {
			return err
		}
		from = to
	}
	return nil
}

// tuples gives a tuple of placeholders for each of rows rows.
func tuples(rows int, tuple string) string {
	return strings.TrimSuffix(strings.Repeat(tuple+",", rows), ",")
}

// numbered gives "(0,?),(1,?)": each row with its number.
func numbered(rows int) string {
	var b strings.Builder
	for i := range rows {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "(%d,?)", i)
	}
	return b.String()
}
