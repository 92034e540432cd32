package idempotency

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// lanes bounds the transactions that run at a time, and hands lanes out in the order in which they were asked for. A lane
// is held from before Begin until the transaction has ended, and through the pause that follows contention; never while a
// message waits for something else. Batches of several messages run in goroutines of lanes, which end when nothing is pending.
type lanes[T any] struct {
	m   *Middleware[T]
	all int

	mu     sync.Mutex
	free   int
	line   []candidate[T]      // who waits for a lane
	locked map[string]struct{} // rows, as Config.LockKeys names them, that the transactions of messages will lock
}

// candidate is a queue with pending deliveries, or somebody who writes without being a delivery.
type candidate[T any] struct {
	queue *queue[T]
	grant chan<- struct{}
}

// lane is the right to run one transaction.
type lane struct {
	of    interface{ put(*phase) }
	freed atomic.Bool
	phase *phase // nil in the side lane, and of those who have no handlers
}

// release gives the lane up. It may be called again, by several goroutines.
func (l *lane) release() {
	if l.freed.CompareAndSwap(false, true) {
		l.of.put(l.phase)
	}
}

// phase is the time of one transaction of a queue's. While there are young ones, what comes for the same handler collects until
// it is a lane's share: lanes that take small batches from each other make more work than they do.
type phase struct {
	of    interface{ end(*phase) }
	since time.Time
}

// end ends it. It may be called again, and for nil. It wants the lock of the lanes held.
func (p *phase) end() {
	if p != nil && p.of != nil {
		p.of.end(p)
		p.of = nil
	}
}

// acquire waits for a lane. Its error is the context's.
func (l *lanes[T]) acquire(ctx context.Context) (*lane, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	grant := make(chan struct{}, 1)
	l.mu.Lock()
	l.line = append(l.line, candidate[T]{grant: grant})
	l.staff()
	l.mu.Unlock()
	select {
	case <-grant:
		return &lane{of: l}, nil
	case <-ctx.Done():
		if !l.withdraw(grant) {
			<-grant
			l.put(nil)
		}
		return nil, ctx.Err()
	}
}

// withdraw takes somebody out of the line. It fails where the lane was granted.
func (l *lanes[T]) withdraw(grant chan<- struct{}) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.line, func(c candidate[T]) bool { return c.grant == grant })
	if i < 0 {
		return false
	}
	l.line = slices.Delete(l.line, i, i+1)
	return true
}

// list puts a queue into the line, once. It wants the lock held.
func (l *lanes[T]) list(q *queue[T]) {
	if !q.listed && len(q.pending) > 0 {
		q.listed = true
		l.line = append(l.line, candidate[T]{queue: q})
	}
}

// staff starts workers while lanes are free and somebody waits. It wants the lock held.
func (l *lanes[T]) staff() {
	for l.free > 0 {
		b := l.next()
		if b == nil {
			return
		}
		l.free--
		l.begin(b)
	}
}

// next finds what a lane can do: it gives the batch of the first queue in the line that has one and does not collect. Where
// somebody else is first, one of the free lanes is his. nil: nobody waits who could go on. It wants the lock held, and a lane
// counted as free.
func (l *lanes[T]) next() *batch[T] {
	for i := 0; i < len(l.line) && l.free > 0; {
		c := l.line[i]
		if c.grant == nil && c.queue.collects() {
			i++
			continue
		}
		l.line = slices.Delete(l.line, i, i+1)
		if c.grant != nil {
			l.free--
			c.grant <- struct{}{}
			continue
		}
		c.queue.listed = false
		if members := c.queue.take(); len(members) > 0 {
			l.list(c.queue) // behind the others
			b := &batch[T]{m: l.m, q: c.queue, members: members}
			b.lane = &lane{of: l, phase: c.queue.begin()}
			return b
		}
	}
	return nil
}

// begin lets a batch run: one message takes the lane into its own goroutine, several get a worker.
func (l *lanes[T]) begin(b *batch[T]) {
	if b.several() {
		go l.work(b)
		return
	}
	p := b.members[0]
	p.v, p.lane = verdict{}, b.lane
	p.wake <- struct{}{}
}

// work runs batches in a lane while there are some of several messages, or until one has given the lane up. Nobody is there
// to recover what the store, say, panics with: so it ends the batch and this goroutine, and not the process.
func (l *lanes[T]) work(b *batch[T]) {
	running := false
	defer func() {
		if running {
			b.broke(recover())
			b.finish(context.Background())
			b.lane.release()
		}
	}()
	for b != nil {
		held := b.lane
		running = true
		b.run()
		running = false
		b.finish(context.Background())
		if !held.freed.CompareAndSwap(false, true) {
			return
		}
		if b = l.turn(held.phase); b != nil && !b.several() {
			l.begin(b)
			return
		}
	}
}

// turn gives a worker its next batch, or takes its lane back.
func (l *lanes[T]) turn(over *phase) *batch[T] {
	l.mu.Lock()
	defer l.mu.Unlock()
	over.end()
	l.free++
	b := l.next()
	if b != nil {
		l.free--
	}
	return b
}

// put takes a lane back, with the phase that ended if there was one, and lets the next one have it.
func (l *lanes[T]) put(over *phase) {
	l.mu.Lock()
	defer l.mu.Unlock()
	over.end()
	l.free++
	l.staff()
}

// busy tells how many lanes are held.
func (l *lanes[T]) busy() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all - l.free
}
