package memory

import (
	"math"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// stored is a message as the broker keeps it, once for all groups. It is never changed.
type stored struct {
	sdk.Message
	err  error // for a message that cannot be decoded
	size int64
}

// item is one message in the queue of one group. It is in exactly one of: the fresh deque, the returned heap (rank is
// seq), its key's blocked heap (seq), the delayed heap (the due time), or the lease heap (the end of the lease).
type item struct {
	node
	msg     *stored
	seq     int64
	attempt int
	src     *source // where it is in flight, or nil
	token   sdk.Token
}

// waiter is one Receive that found nothing.
type waiter struct {
	src   *source
	limit int
	got   []sdk.Delivery
	// ready is closed when got is filled or the source ended; the waiter is then out of the queue's list.
	ready chan struct{}
}

// queue holds one group's messages. The broker's mutex guards it.
type queue struct {
	b     *Broker
	topic *topic
	group string

	count   int // messages, unsettled ones included
	bytes   int64
	nextSeq int64

	fresh    deque[*item] // never handed out, nor met by a source that may not have them
	returned heap[*item]  // handed out before, ready again
	delayed  heap[*item]  // requeued with a delay that is not over
	leases   heap[*item]  // in flight
	keys     map[string]*keyState
	freeKeys heap[*keyState] // keys with blocked messages that any source may have

	sources map[*source]struct{}
	waiters []*waiter // in the order in which they came

	timer   *time.Timer // armed only while somebody waits
	timerAt int64
}

func newQueue(t *topic, group string) *queue {
	return &queue{
		b: t.b, topic: t, group: group,
		keys: make(map[string]*keyState), sources: make(map[*source]struct{}),
	}
}

// fits tells whether one more message of that size has room.
func (q *queue) fits(size int64) bool {
	return q.count < q.b.opts.Capacity && size <= q.b.opts.CapacityBytes-q.bytes
}

func (q *queue) add(m *stored) {
	q.nextSeq++
	q.count++
	q.bytes += m.size
	q.fresh.push(&item{msg: m, seq: q.nextSeq})
}

// forget takes a message, that is in none of the structures any more, out of the accounts.
func (q *queue) forget(it *item) {
	q.count--
	q.bytes -= it.msg.size
}

// pump brings the queue up to date: what is due comes back, who waits gets what is there, the timer fits what is left.
// Everyone who changed the queue calls it before letting go of the mutex.
func (q *queue) pump(now int64) {
	q.advance(now)
	q.dispatch(now)
	q.rearm(now)
}

// advance takes back the leases and ends the delays that are over.
func (q *queue) advance(now int64) {
	for q.leases.len() > 0 && q.leases.min().rank <= now {
		q.restore(q.recall(q.leases.min()))
	}
	for q.delayed.len() > 0 && q.delayed.min().rank <= now {
		q.restore(q.delayed.pop())
	}
}

// next takes out the oldest message that s may have, or gives nil. Messages met on the way that belong to another source
// by their key move to that key's blocked heap: each at most once, so a long backlog is not scanned again.
func (q *queue) next(s *source) *item {
	for {
		seq, from := int64(math.MaxInt64), (*heap[*keyState])(nil)
		if q.freeKeys.len() > 0 {
			seq, from = q.freeKeys.min().rank, &q.freeKeys
		}
		if s.keys.len() > 0 && s.keys.min().rank < seq {
			seq, from = s.keys.min().rank, &s.keys
		}
		it := q.pick(seq)
		if it == nil {
			if from == nil {
				return nil
			}
			return q.unblock(from.min())
		}
		if !q.block(it, s) {
			return it
		}
	}
}

// pick takes out the oldest message of the fresh and the returned ones if it is older than before.
func (q *queue) pick(before int64) *item {
	useReturned := false
	if q.returned.len() > 0 && q.returned.min().seq < before {
		before, useReturned = q.returned.min().seq, true
	}
	switch {
	case q.fresh.len() > 0 && q.fresh.front().seq < before:
		return q.fresh.pop()
	case useReturned:
		return q.returned.pop()
	}
	return nil
}

// hand gives up to n messages to s, appended to got.
func (q *queue) hand(s *source, n int, got []sdk.Delivery, now int64) []sdk.Delivery {
	for ; n > 0; n-- {
		it := q.next(s)
		if it == nil {
			break
		}
		it.attempt++
		it.src = s
		it.token = s.nextToken()
		it.rank = after(now, s.lease)
		q.leases.push(it)
		q.own(it, s)
		s.inFlight[it.token] = it
		got = append(got, sdk.Delivery{
			Message: it.msg.Message, Token: it.token, Attempt: it.attempt, Redelivered: it.attempt > 1, Err: it.msg.err,
		})
	}
	return got
}

// recall takes a message back from its source. The caller puts it somewhere at once, by restore, delay or forget, and
// then, except after restore, calls disown.
func (q *queue) recall(it *item) *item {
	q.leases.remove(it)
	delete(it.src.inFlight, it.token)
	it.src, it.token = nil, ""
	if ks := q.keys[it.msg.Key]; ks != nil {
		ks.inFlight--
	}
	return it
}

// restore puts a message back in its old place.
func (q *queue) restore(it *item) {
	it.rank = it.seq
	if ks := q.keys[it.msg.Key]; ks != nil {
		ks.blocked.push(it)
		q.place(ks)
		return
	}
	q.returned.push(it)
}

// delay keeps a message until the delay is over.
func (q *queue) delay(it *item, until int64) {
	it.rank = until
	q.delayed.push(it)
}

// dispatch hands what is ready to those who wait. Where several wait, each gets its share first, so that one large
// window does not take everything.
func (q *queue) dispatch(now int64) {
	if len(q.waiters) == 0 || q.b.gate != nil {
		return
	}
	ready := q.fresh.len() + q.returned.len() + q.freeKeys.len()
	share := max(1, (ready+len(q.waiters)-1)/len(q.waiters))
	for progress := true; progress; {
		progress = false
		for _, w := range q.waiters {
			had := len(w.got)
			n := min(share, w.limit-had, w.src.room())
			w.got = q.hand(w.src, n, w.got, now)
			progress = progress || len(w.got) > had
		}
	}
	kept := q.waiters[:0]
	for _, w := range q.waiters {
		if len(w.got) == 0 {
			kept = append(kept, w)
			continue
		}
		close(w.ready)
	}
	clear(q.waiters[len(kept):])
	q.waiters = kept
}

// rearm makes the timer fit: armed for the next lease or delay that ends while somebody waits, off otherwise. A timer
// that is too early is left alone; it sets itself again.
func (q *queue) rearm(now int64) {
	next := int64(math.MaxInt64)
	if len(q.waiters) > 0 {
		if q.leases.len() > 0 {
			next = q.leases.min().rank
		}
		if q.delayed.len() > 0 {
			next = min(next, q.delayed.min().rank)
		}
	}
	if q.timer != nil && (next == math.MaxInt64 || next < q.timerAt) {
		q.timer.Stop()
		q.timer = nil
	}
	if q.timer == nil && next < math.MaxInt64 {
		q.timerAt = next
		q.timer = time.AfterFunc(time.Duration(next-now), q.onTimer)
	}
}

func (q *queue) onTimer() {
	q.b.mu.Lock()
	defer q.b.mu.Unlock()
	now := q.b.now()
	// A timer that was stopped too late finds its successor armed for later, or nothing due; both are harmless.
	if q.timer != nil && q.timerAt <= now {
		q.timer.Stop()
		q.timer = nil
	}
	q.pump(now)
}

// leave takes a waiter off the list, if it is still there.
func (q *queue) leave(w *waiter) {
	for i := range q.waiters {
		if q.waiters[i] == w {
			q.waiters = append(q.waiters[:i], q.waiters[i+1:]...)
			return
		}
	}
}

// end ends a source: its unsettled messages go back and its Receive returns. It is idempotent. The caller pumps.
func (q *queue) end(s *source, why error) {
	if s.err != nil {
		s.err = why
		return
	}
	s.err = why
	close(s.done)
	delete(q.sources, s)
	delete(s.d.sources, s)
	for _, w := range s.waits {
		for _, d := range w.got {
			// It was never handed out: nobody saw this attempt.
			s.inFlight[d.Token].attempt--
		}
		if len(w.got) == 0 {
			q.leave(w)
			close(w.ready)
		}
		w.got = nil
	}
	for _, it := range s.inFlight {
		q.restore(q.recall(it))
	}
}

// after adds without overflow. A delay that is not positive ends now.
func after(now int64, d time.Duration) int64 {
	if d <= 0 {
		return now
	}
	if sum := now + int64(d); sum > now {
		return sum
	}
	return math.MaxInt64
}
