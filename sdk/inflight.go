package sdk

import (
	"container/heap"
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// phase is where a delivery stands. Every change is made under the subscription's lock.
type phase uint8

const (
	// phaseReady: waits to be handed out, or is being offered to the reader of the channel.
	phaseReady phase = iota + 1
	// phaseRunning: handed out, or in the poison path.
	phaseRunning
	// phaseHeld: nacked; waits in the engine for its next attempt or its requeue.
	phaseHeld
	// phaseSettling: has a verdict, which waits for the settler, is with the driver, or waits to be tried again.
	phaseSettling
	// phaseOrphaned: handed out, but its source or lease is lost: whatever its handler decides is ignored.
	phaseOrphaned
	// phaseGone: no longer ours.
	phaseGone
)

// inflight is one delivery taken from the broker. It is on its session's live list until it is settled, lost or given up.
type inflight struct {
	session  *session
	delivery Delivery
	attempt  int
	phase    phase
	try      *try      // the present attempt, or the last one
	first    try       // the first attempt, which most messages need no other than: one allocation less
	deadline time.Time // MaxProcessing, while running or orphaned
	held     bool      // its reader holds it back: MaxProcessing does not run
	leaseEnd time.Time // zero without a lease

	// The verdict.
	settlement Settlement
	tries      int  // of settling
	sending    bool // the driver has it

	// The alarm: what happens to a held one, or to a settlement that is tried again.
	alarm int  // tells a live alarm from a stale one
	again bool // at the alarm: a new attempt, else the settlement

	prev, next *inflight
}

// try is one attempt: a message and a context of its own. Whoever waits for a decision keeps the try it waits for, so that
// a late one cannot be taken for that of the next attempt. It is the message's context, too: one allocation less.
type try struct {
	deliveryContext
	info   DeliveryInfo
	msg    *message.Message // nil in the poison path
	cancel context.CancelCauseFunc
}

// nextTry gives the place of the next attempt, which no earlier one has had.
func (e *inflight) nextTry() *try {
	if e.try == nil {
		return &e.first
	}
	return &try{}
}

// inflights is a list in the order of arrival.
type inflights struct {
	first, last *inflight
	count       int
}

func (l *inflights) push(e *inflight) {
	e.prev, e.next = l.last, nil
	if l.last == nil {
		l.first = e
	} else {
		l.last.next = e
	}
	l.last = e
	l.count++
}

func (l *inflights) remove(e *inflight) {
	if e.prev == nil {
		l.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		l.last = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.prev, e.next = nil, nil
	l.count--
}

// all gives the list's elements, so that they may be removed while walking.
func (l *inflights) all() []*inflight {
	out := make([]*inflight, 0, l.count)
	for e := l.first; e != nil; e = e.next {
		out = append(out, e)
	}
	return out
}

// fifo is a queue that keeps its memory, and no more than that: one that never runs empty must not grow.
type fifo struct {
	items []*inflight
	head  int
}

func (q *fifo) push(e *inflight) {
	if len(q.items) == cap(q.items) && 2*q.head >= len(q.items) && q.head > 0 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, e)
}

func (q *fifo) pop() *inflight {
	if q.head == len(q.items) {
		return nil
	}
	e := q.items[q.head]
	q.items[q.head] = nil
	q.head++
	return e
}

// alarm is a moment at which a delivery wants attention. It is stale when the delivery's own count moved on.
type alarm struct {
	at  time.Time
	e   *inflight
	seq int
}

// alarms is a heap of alarms, the earliest first.
type alarms []alarm

func (a alarms) Len() int           { return len(a) }
func (a alarms) Less(i, j int) bool { return a[i].at.Before(a[j].at) }
func (a alarms) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }

// Push is for package heap.
func (a *alarms) Push(x any) { *a = append(*a, x.(alarm)) }

// Pop is for package heap.
func (a *alarms) Pop() any {
	last := len(*a) - 1
	x := (*a)[last]
	(*a)[last] = alarm{}
	*a = (*a)[:last]
	return x
}

// set arms the alarm of e, in place of an earlier one.
func (a *alarms) set(e *inflight, at time.Time) {
	e.alarm++
	heap.Push(a, alarm{at: at, e: e, seq: e.alarm})
}

// due takes the first alarm that is due and not stale.
func (a *alarms) due(now time.Time) *inflight {
	for len(*a) > 0 {
		top := (*a)[0]
		if stale := top.seq != top.e.alarm; !stale && top.at.After(now) {
			return nil
		} else if heap.Pop(a); !stale {
			top.e.alarm++
			return top.e
		}
	}
	return nil
}

// attemptLog remembers how often messages failed that were requeued through the broker, so that their backoff goes on
// where the broker does not count. It forgets the oldest. It is used under the subscription's lock.
type attemptLog struct {
	limit  int
	counts map[string]int
	order  []string
}

func (l *attemptLog) of(id string) int { return l.counts[id] }

func (l *attemptLog) remember(id string, attempt int) {
	if id == "" {
		return
	}
	if l.counts == nil {
		l.counts = map[string]int{}
	}
	if _, known := l.counts[id]; !known {
		l.order = append(l.order, id)
	}
	l.counts[id] = attempt
	for len(l.order) > l.limit {
		delete(l.counts, l.order[0])
		l.order = l.order[1:]
	}
}

// forget drops the count of a message that was acknowledged. Its place in the order ages out.
func (l *attemptLog) forget(id string) {
	if len(l.counts) > 0 {
		delete(l.counts, id)
	}
}
