package memstore

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// table is a kind of row.
type table uint8

const (
	writers table = iota // one row: the right to write, where there is a single writer
	counters
	claims
	letters
)

// row is what can be locked, whether it exists or not: an insert locks a row that is not there yet.
type row struct {
	table   table
	a, b, c string
}

// lock is held by a transaction until its end, or until the part is undone that took it. Those who wait get it in the order
// in which they came.
type lock struct {
	owner *Tx
	queue []*waiter
}

// waiter is a statement of a transaction that waits for a row.
type waiter struct {
	tx      *Tx
	row     row
	granted chan struct{} // closed, under the database's mutex, by whoever hands the row over
}

func (w *waiter) isGranted() bool {
	select {
	case <-w.granted:
		return true
	default:
		return false
	}
}

// patience bounds the waiting of one statement.
type patience struct {
	ctx   context.Context //nolint:containedctx // lives as long as the call it came with
	limit time.Duration   // for all its waits together; 0: as long as ctx
	until time.Time       // when the limit is over, once it has begun
}

// timer gives a channel that is ready when the patience is over, nil where it has no limit of its own.
func (p *patience) timer() (<-chan time.Time, func() bool) {
	if p.limit <= 0 {
		return nil, func() bool { return false }
	}
	if p.until.IsZero() {
		p.until = time.Now().Add(p.limit)
	}
	timer := time.NewTimer(time.Until(p.until))
	return timer.C, timer.Stop
}

// acquire locks a row for a transaction and waits for it where it must. It is called under the mutex and returns under it,
// but not while it waits. Its error is ErrBusy, or ErrEnded where the transaction ended meanwhile.
func (d *Database) acquire(t *Tx, r row, p *patience) error {
	l, taken := d.locks[r]
	switch {
	case !taken:
		d.locks[r] = &lock{owner: t}
		t.held = append(t.held, r)
		return nil
	case l.owner == t:
		return nil
	case d.waitsFor(l.owner, t, map[*Tx]struct{}{}):
		return fmt.Errorf("%w: the two wait for each other", ErrBusy)
	}
	w := &waiter{tx: t, row: r, granted: make(chan struct{})}
	l.queue = append(l.queue, w)
	t.waits = append(t.waits, w)
	d.mu.Unlock()
	why := t.await(w, p)
	d.mu.Lock()
	t.waits = slices.DeleteFunc(t.waits, func(o *waiter) bool { return o == w })
	if t.isOver() {
		return ErrEnded // that end has taken care of the row
	}
	if !w.isGranted() { // else perhaps in the very moment of giving up
		l.leave(w)
		return why
	}
	if t.failed {
		return ErrFailed // by another goroutine
	}
	return nil
}

// await returns when the row is granted, the transaction is over, or the patience, with the error that says so.
func (t *Tx) await(w *waiter, p *patience) error {
	over, stop := p.timer()
	defer stop()
	select {
	case <-w.granted:
		return nil
	case <-t.over:
		return ErrEnded
	case <-p.ctx.Done():
		return fmt.Errorf("%w: %w", ErrBusy, p.ctx.Err())
	case <-over:
		return fmt.Errorf("%w: no end of it within %v", ErrBusy, p.limit)
	}
}

// waitsFor tells whether a transaction waits for another one, directly or through others.
func (d *Database) waitsFor(t, other *Tx, seen map[*Tx]struct{}) bool {
	if t == other {
		return true
	}
	if _, known := seen[t]; known {
		return false
	}
	seen[t] = struct{}{}
	for _, w := range t.waits {
		if !w.isGranted() && d.waitsFor(d.locks[w.row].owner, other, seen) {
			return true
		}
	}
	return false
}

// leave takes a waiter out of the queue, if it is still there.
func (l *lock) leave(w *waiter) {
	l.queue = slices.DeleteFunc(l.queue, func(o *waiter) bool { return o == w })
}

// release hands a row to the transaction that has waited longest. It is called under the mutex.
func (d *Database) release(r row) {
	l := d.locks[r]
	if len(l.queue) == 0 {
		delete(d.locks, r)
		return
	}
	l.owner = l.queue[0].tx
	l.owner.held = append(l.owner.held, r)
	l.queue = slices.DeleteFunc(l.queue, func(w *waiter) bool {
		if w.tx != l.owner {
			return false
		}
		close(w.granted)
		return true
	})
}
