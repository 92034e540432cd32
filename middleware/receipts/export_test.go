package receipts

import (
	"database/sql"
	"fmt"
	"time"
)

// FlowQueries gives the statements of the flow of messages, for a look at their plans.
func (s *SQLite) FlowQueries() map[string]string {
	return map[string]string{
		"claim one":      s.q.flow[flowClaim],
		"claim many":     s.q.flow[flowClaim+2],
		"held one":       s.q.flow[flowHeld],
		"held many":      s.q.flow[flowHeld+2],
		"marker":         s.q.flow[flowMarker],
		"count":          s.q.flow[flowCount],
		"unclaim one":    s.q.flow[flowUnclaim],
		"unclaim many":   s.q.flow[flowUnclaim+2],
		"seal":           s.q.flow[flowSeal],
		"keep":           s.q.flow[flowKeep],
		"unsent":         s.lists.unsent,
		"unsent of one":  s.lists.unsentOf,
		"outputs of one": s.lists.outputsOf,
		"mark sent one":  s.q.markSentOne,
		"mark sent many": fmt.Sprintf(s.q.markSentMany, tuples(3, "(?,?)")),
		"dead letters":   s.lists.deadLetters,
		"resolve":        s.q.resolve,
	}
}

// EncodeMetadata and DecodeMetadata are the stored form of metadata.
var (
	EncodeMetadata = encodeMetadata
	DecodeMetadata = decodeMetadata
)

// Timed says how long the steps of a commit took.
type Timed struct{ Guard, Marker, Commit time.Duration }

// TimedCommit is Commit with a clock, for benchmarks, and without a marker if asked for: such receipts are torn.
func TimedCommit(tx Tx[*sql.Tx], marker bool) (took Timed, err error) {
	t := tx.(*sqliteTx)
	start := time.Now()
	t.take()
	if err := t.releaseGuard(); err != nil {
		return took, err
	}
	released := time.Now()
	if marker {
		if err := t.mark(); err != nil {
			return took, err
		}
	}
	marked := time.Now()
	err = t.commit()
	took = Timed{Guard: released.Sub(start), Marker: marked.Sub(released), Commit: time.Since(marked)}
	t.giveBack(err)
	return took, err
}

// FindHook gives a driver connection's way to set SQLite's commit hook; nil where there is none.
func FindHook(driverConn any) (set func(veto func() bool), lasting bool) {
	d := findHookSetter(driverConn)
	return d.set, d.lasting
}

// LastingHooks counts the connections whose hook is remembered.
func (s *SQLite) LastingHooks() int {
	s.hooks.mu.Lock()
	defer s.hooks.mu.Unlock()
	return len(s.hooks.on)
}

// StandStill keeps a transaction's client from noticing the end of its budget.
func StandStill(tx Tx[*sql.Tx]) { t := tx.(*sqlTx); t.budgets.end(t.clock) }

// MySQLStatements and MySQLInserts cut SQL into what a client sends at a time.
var (
	MySQLStatements = mysqlStatements
	MySQLInserts    = mysqlInserts
)

// RememberedSessions counts the connections whose session's number is remembered.
func (s *MySQL) RememberedSessions() int {
	s.sessions.mu.Lock()
	defer s.sessions.mu.Unlock()
	return len(s.sessions.on)
}
