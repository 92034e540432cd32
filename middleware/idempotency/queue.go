package idempotency

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// queue holds the deliveries of one handler that wait for a lane, in the order in which they run. A delivery does not wait
// for others to come: it waits while the transactions before it run, and whoever waits with it then shares its own.
type queue[T any] struct {
	m      *Middleware[T]
	handle message.HandlerFunc // Config.Inside around the handler
	batch  batchHandler[T]     // what HandleBatch was given, or nil
	scope  atomic.Pointer[scopeOfHandler]

	// The rest belongs to the lock of m.lanes.
	pending []*pending[T]
	inside  int                 // deliveries that are pending or in a transaction
	busy    map[string]struct{} // order keys of which a message is in a transaction, or has to be in the next one before others
	listed  bool                // it is in the line for a lane
	limit   int                 // the most messages of the next batch; 0 means Config.BatchSize
	mean    time.Duration       // about how long a handler runs
	phases  []*phase            // of its transactions, the oldest first
	pace    pace                // how many of them make sense
	alarm   *time.Timer         // set while it collects
}

func (m *Middleware[T]) newQueue(handle message.HandlerFunc, batch batchHandler[T]) *queue[T] {
	return &queue[T]{m: m, handle: handle, batch: batch, pace: pace{most: m.lanes.all}}
}

// run brings one delivery through transactions until it is decided. Where a lane is free it runs at once, in this
// goroutine; else it waits for its batch.
func (q *queue[T]) run(p *pending[T]) verdict {
	p.v, p.foreseen = verdict{}, q.m.foresee(p)
	l := q.enter(p)
	p.ticket.reached()
	for {
		if l == nil { // it is the queue's until it is woken up
			if v := q.await(p); v.kind != kindNone {
				return v
			}
			l = p.lane
		}
		if q.runAlone(p, l) {
			return p.v
		}
		l = nil
	}
}

// runAlone runs a delivery in a transaction that it shares with nobody. It tells whether the delivery is decided; else it is
// pending again.
func (q *queue[T]) runAlone(p *pending[T], l *lane) (decided bool) {
	b := &batch[T]{m: q.m, q: q, self: p, lane: l}
	b.one[0] = p
	b.members = b.one[:]
	defer l.release()
	defer func() { decided = b.finish(p.ctx) }() // also where the handler did not return
	b.run()
	return false
}

// await waits for the verdict; none: for a lane to run alone in. A delivery whose context ends while it is pending leaves;
// inside a transaction it stays, for at most TxBudget.
func (q *queue[T]) await(p *pending[T]) verdict {
	select {
	case <-p.wake:
		return p.v
	case <-p.ctx.Done():
	}
	if q.withdraw(p) {
		return returned(p.ctx.Err())
	}
	if ctx := p.handling.Load(); ctx != nil {
		ctx.end(p.ctx.Err())
	}
	<-p.wake
	return p.v
}

// enter gives a lane where one is free; else the delivery is pending, and nil is returned.
func (q *queue[T]) enter(p *pending[T]) *lane {
	l := q.m.lanes
	l.mu.Lock()
	defer l.mu.Unlock()
	q.inside++
	if l.free > 0 && len(q.pending) == 0 && !q.occupied(p) && !q.collects() {
		l.free--
		q.occupy(p)
		return &lane{of: l, phase: q.begin()}
	}
	q.pending = append(q.pending, p)
	l.list(q)
	l.staff()
	return nil
}

// withdraw takes a delivery out of the queue. It fails where a transaction has it.
func (q *queue[T]) withdraw(p *pending[T]) bool {
	q.m.lanes.mu.Lock()
	defer q.m.lanes.mu.Unlock()
	i := slices.Index(q.pending, p)
	if i < 0 {
		return false
	}
	q.pending = slices.Delete(q.pending, i, i+1)
	q.inside--
	p.ticket.stumbled() // before later ones of its order key may run
	return true
}

// take gives the next batch, empty where nothing can run now. What has to wait for a transaction under way stays: for a message
// of its order key, or for the rows it will lock. What is behind it may go first, unless it is of the same order key. It wants
// the lock held.
func (q *queue[T]) take() []*pending[T] {
	most := q.most()
	batch := make([]*pending[T], 0, min(most, len(q.pending)))
	var stay []*pending[T]
	var passed map[string]struct{} // order keys of which one stays
	n := 0
	for ; n < len(q.pending) && len(batch) < most; n++ {
		p := q.pending[n]
		if _, behind := passed[p.line]; behind || q.occupied(p) {
			if stay = append(stay, p); p.line != "" {
				passed = with(passed, p.line)
			}
			continue
		}
		if p.most > 0 && p.most < most {
			most = p.most
		}
		if len(batch) >= most || len(batch) > 0 && p.claimed != batch[0].claimed {
			break
		}
		batch = append(batch, p)
	}
	if q.pending = q.pending[n:]; len(stay) > 0 {
		q.pending = append(stay, q.pending...)
	}
	for _, p := range batch {
		q.occupy(p)
	}
	return batch
}

// most is the most messages of the next batch: fewer where contention was met, and no more than run within BatchTime.
func (q *queue[T]) most() int {
	most := q.m.cfg.BatchSize
	if q.limit > 0 {
		most = min(most, q.limit)
	}
	if q.mean > 0 {
		most = min(most, int(q.time()/q.mean))
	}
	return max(most, 1)
}

// time is how long the handlers of a batch should run. A function for batches has them all in one call, which may take as
// long for few as for many: BatchTime would make its batches ever smaller without making them shorter. It only has to be
// well below the budget.
func (q *queue[T]) time() time.Duration {
	if q.batch == nil {
		return q.m.cfg.BatchTime
	}
	return max(q.m.cfg.BatchTime, q.m.cfg.TxBudget/4)
}

// occupied tells whether a message has to wait for a transaction under way: for one of its order key, because no other lane may
// take the next one; or for the rows that it will lock, because a lane that waits for another one's rows does nothing, holds
// others, and makes fast handlers look slow.
func (q *queue[T]) occupied(p *pending[T]) bool {
	if _, busy := q.busy[p.line]; busy {
		return true
	}
	for _, row := range p.locks {
		if _, locked := q.m.lanes.locked[row]; locked {
			return true
		}
	}
	return false
}

func (q *queue[T]) occupy(p *pending[T]) {
	if p.line != "" {
		q.busy = with(q.busy, p.line)
	}
	for _, row := range p.locks {
		q.m.lanes.locked = with(q.m.lanes.locked, row)
	}
}

func with(set map[string]struct{}, key string) map[string]struct{} {
	if set == nil {
		set = make(map[string]struct{})
	}
	set[key] = struct{}{}
	return set
}

// halve follows a batch of n that met contention, grow one that did not.
func (q *queue[T]) halve(n int) { q.limit = max(1, n/2) }

func (q *queue[T]) grow() {
	if q.limit == 0 {
		return
	}
	if q.limit += max(1, q.m.cfg.BatchSize/16); q.limit >= q.m.cfg.BatchSize {
		q.limit = 0
	}
}

// ran notes how long handlers ran. One that took very long is not to make the next batches small for long.
func (q *queue[T]) ran(n int, took time.Duration) {
	each := min(took/time.Duration(n), 2*q.m.cfg.BatchTime)
	if q.mean == 0 {
		q.mean = each
		return
	}
	q.mean += (each - q.mean) / 4
}

// begin notes that one of its transactions begins.
func (q *queue[T]) begin() *phase {
	p := &phase{of: q, since: time.Now()}
	q.phases = append(q.phases, p)
	return p
}

func (q *queue[T]) end(p *phase) {
	if i := slices.Index(q.phases, p); i >= 0 {
		q.phases = slices.Delete(q.phases, i, i+1)
	}
}

// collects tells whether what is pending waits although a lane may be free: while transactions of the same handler are under
// way and it is less than a batch, and less than a lane's share of all that is here. It does not wait for those that have taken
// longer than a usual batch does. It wants the lock held.
func (q *queue[T]) collects() bool {
	running := len(q.phases)
	if running == 0 {
		return false
	}
	lanes := q.pace.now()
	share := (q.inside + lanes - 1) / lanes
	if running < lanes && len(q.pending) >= min(q.most(), share) {
		return false
	}
	left := 2*q.m.cfg.BatchTime - time.Since(q.phases[running-1].since)
	if left > 0 && q.alarm == nil {
		q.alarm = time.AfterFunc(left, q.wake)
	}
	return left > 0
}

// wake looks again when a transaction is not young any more.
func (q *queue[T]) wake() {
	l := q.m.lanes
	l.mu.Lock()
	defer l.mu.Unlock()
	q.alarm = nil
	l.staff()
}
