package idempotency

import (
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// counters are those of Report.
type counters struct {
	handled, replayed, conflicted, refused, diverted, torn atomic.Uint64
	failed, returned                                       atomic.Uint64
	contention, outages, unknownCommits, withoutTx         atomic.Uint64
	outputsSent, outputsFailed                             atomic.Uint64
	transactions, inTransactions, largest, repeated        atomic.Uint64
}

// Report is what the middleware tells of itself. Counters start at zero with New and only grow. Every delivery that was
// acknowledged is counted in exactly one of Handled, Replayed, Conflicted, Refused, Diverted and Torn, and every other in
// exactly one of Failed and Returned.
type Report struct {
	// Handled: the handler's effect committed, now.
	Handled uint64
	// Replayed: a receipt with the same payload was there; nothing was written.
	Replayed uint64
	// Conflicted: a receipt with another payload was there. With HoldConflicts such a delivery is counted in Returned too,
	// each time it comes.
	Conflicted uint64
	// Refused: no valid identity, or refused by Validate; its dead letter is stored.
	Refused uint64
	// Diverted: the handler said Permanent; its dead letter is stored.
	Diverted uint64
	// Torn: its receipt is torn; its dead letter is stored.
	Torn uint64
	// Failed: the handler failed, by error, Nack, panic or Goexit; the message comes again, with AtMostOnce as a replay.
	Failed uint64
	// Returned: it went back to the broker without being charged.
	Returned uint64
	// Contention counts transactions that met contention, or whose COMMIT turned out not to have arrived.
	Contention uint64
	// Outages counts how often the database went away.
	Outages uint64
	// UnknownCommits counts COMMITs whose answer was lost, whatever became of them.
	UnknownCommits uint64
	// WithoutTx counts handler runs that never asked for their transaction.
	WithoutTx uint64
	// OutputsSent counts outputs that Config.Outputs took; OutputsFailed those of a Publish that failed.
	OutputsSent, OutputsFailed uint64

	// Batches tells how messages shared transactions.
	Batches Batches
	Health  Health
	// Unchecked names the limits of Config.Limits that are unknown, so that nothing is checked against them.
	Unchecked []string
	// Store is what the store's Check found in New.
	Store receipts.Info
}

// Batches counts transactions that committed, and what was in them.
type Batches struct {
	// Transactions that committed, and Messages whose outcome they made durable. Divided they give the mean batch.
	Transactions, Messages uint64
	// Largest is the most messages of one.
	Largest uint64
	// Repeated counts messages that ran again, because of a neighbour or of contention.
	Repeated uint64
}

// Health is a snapshot of what goes on.
type Health struct {
	// Paused: the database is away, since PausedSince, because of Reason.
	Paused      bool
	PausedSince time.Time
	Reason      string
	// LastCommit is when a transaction last committed; zero: none yet.
	LastCommit time.Time
	// Pending is the number of deliveries inside the middleware, and OldestPending when the first of them arrived.
	Pending       int
	OldestPending time.Time
	// Lanes is the most transactions that run at a time, and LanesBusy how many are running.
	Lanes, LanesBusy int
	// RelayRunning: a Run has not returned.
	RelayRunning bool
	// FailingKeys is the number of order keys, in all subscriptions, one of whose messages failed or was lost and has not
	// passed since. Held is the number of messages of these keys.
	FailingKeys, Held int
	// ParkedKeys is the number of order keys whose messages are parked in the database, and Parked the number of these messages,
	// as far as this process has parked or found them.
	ParkedKeys, Parked int
	// StandsStill: a subscription takes no more messages because too many are held, since StandsStillSince.
	StandsStill      bool
	StandsStillSince time.Time
}

// Report gives a snapshot. It asks the database nothing and does not block.
func (m *Middleware[T]) Report() Report {
	c := &m.counters
	return Report{
		Handled: c.handled.Load(), Replayed: c.replayed.Load(), Conflicted: c.conflicted.Load(),
		Refused: c.refused.Load(), Diverted: c.diverted.Load(), Torn: c.torn.Load(),
		Failed: c.failed.Load(), Returned: c.returned.Load(),
		Contention: c.contention.Load(), Outages: c.outages.Load(),
		UnknownCommits: c.unknownCommits.Load(), WithoutTx: c.withoutTx.Load(),
		OutputsSent: c.outputsSent.Load(), OutputsFailed: c.outputsFailed.Load(),
		Batches: Batches{
			Transactions: c.transactions.Load(), Messages: c.inTransactions.Load(),
			Largest: c.largest.Load(), Repeated: c.repeated.Load(),
		},
		Health: m.health(), Unchecked: m.cfg.unchecked(), Store: m.info,
	}
}

func (m *Middleware[T]) health() Health {
	h := Health{Lanes: m.lanes.all, LanesBusy: m.lanes.busy(), RelayRunning: m.relaying.Load()}
	h.PausedSince, h.Reason = m.gate.state()
	h.Paused = !h.PausedSince.IsZero()
	h.Pending, h.OldestPending = m.inside.state()
	m.order.health(&h)
	if at := m.lastCommit.Load(); at != 0 {
		h.LastCommit = time.Unix(0, at)
	}
	return h
}

// committed notes that a transaction of n messages committed.
func (m *Middleware[T]) committed(n int) {
	m.lastCommit.Store(time.Now().UnixNano())
	c, size := &m.counters, uint64(max(n, 0)) //nolint:gosec // it is not negative
	c.transactions.Add(1)
	c.inTransactions.Add(size)
	for largest := c.largest.Load(); size > largest && !c.largest.CompareAndSwap(largest, size); largest = c.largest.Load() {
	}
}

func (c Config) unchecked() []string {
	var names []string
	if c.Limits.MaxInFlight == 0 {
		names = append(names, "MaxInFlight")
	}
	if c.Limits.Lease == 0 {
		names = append(names, "Lease")
	}
	if c.Limits.Horizon == 0 {
		names = append(names, "Horizon")
	}
	return names
}
