package memstore

import (
	"cmp"
	"context"
	"errors"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// Tx is an open transaction, what a handler writes with. It is safe for concurrent use.
type Tx struct {
	db    *Database
	s     *Store
	nonce receipts.Nonce
	over  chan struct{} // closed at its end, under the database's mutex

	// All below is guarded by the database's mutex.

	expired  bool // its budget ended it
	killed   bool // its session was killed
	failed   bool // a statement failed
	all      changes
	part     *changes // nil outside a part
	failedIn *changes // the part in which it failed; nil outside
	held     []row    // the rows it has locked, in the order in which it did
	before   int      // how many of them when the part began
	waits    []*waiter
}

// Add adds to a counter and locks it until the transaction ends. Where another open transaction has changed the counter it
// waits for that one's end, for at most Options.LockWait: then, or at once where that one waits for this one, it returns
// ErrBusy. It returns ErrEnded once the transaction is over, and ErrFailed after an error of its own.
func (t *Tx) Add(counter string, by int64) error {
	return t.write(context.Background(), func() error {
		p := &patience{ctx: context.Background(), limit: t.db.opts.LockWait}
		if err := t.db.acquire(t, row{table: counters, a: counter}, p); err != nil {
			return err
		}
		c := t.current()
		if c.counters == nil {
			c.counters = map[string]int64{}
		}
		c.counters[counter] += by
		return nil
	})
}

// Get reads a counter and locks it, as SELECT … FOR UPDATE does: what it gave stays true until the transaction changes it or
// ends. It waits, and fails, as Add does.
func (t *Tx) Get(counter string) (n int64, err error) {
	err = t.write(context.Background(), func() error {
		p := &patience{ctx: context.Background(), limit: t.db.opts.LockWait}
		if err := t.db.acquire(t, row{table: counters, a: counter}, p); err != nil {
			return err
		}
		n = t.db.counters[counter] + t.all.counters[counter]
		if t.part != nil {
			n += t.part.counters[counter]
		}
		return nil
	})
	return n, err
}

// Commit commits what was written so far. A handler must not: it is here so that tests can show what happens if one does.
func (t *Tx) Commit() error {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if t.isOver() {
		return ErrEnded
	}
	if t.failed {
		t.end()
		return ErrFailed // PostgreSQL rolls back, too
	}
	t.commit()
	return nil
}

// Rollback undoes what was written so far. A handler must not.
func (t *Tx) Rollback() error {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if t.isOver() {
		return ErrEnded
	}
	t.end()
	return nil
}

// Kill ends the transaction as the end of its session does: from then on everything in it fails with ErrAway. A handler must
// not.
func (t *Tx) Kill() {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if !t.isOver() {
		t.killed = true
		t.end()
	}
}

// write runs a statement under the mutex, which acquire may leave meanwhile. An error that a database would not survive
// fails the transaction.
func (t *Tx) write(ctx context.Context, statement func() error) error {
	away := t.s.there(ctx)
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if t.killed {
		return ErrAway
	}
	if t.isOver() {
		return ErrEnded
	}
	if t.failed {
		return ErrFailed
	}
	err := away
	if err == nil {
		err = statement()
	}
	if errors.Is(err, ErrBusy) || errors.Is(err, ErrAway) {
		t.fail()
	}
	return err
}

// current is where changes go.
func (t *Tx) current() *changes { return cmp.Or(t.part, &t.all) }

// isOver tells whether the transaction has ended. It is called under the mutex.
func (t *Tx) isOver() bool {
	select {
	case <-t.over:
		return true
	default:
		return false
	}
}

// fail undoes the part, or all outside one, and releases its rows at once, so that what it was in the way of goes on.
func (t *Tx) fail() {
	t.failed, t.failedIn = true, t.part
	if t.part != nil {
		*t.part = changes{}
		t.releaseFrom(t.before)
		return
	}
	t.all = changes{}
	t.releaseFrom(0)
}

// forgive forgets a failure of the part, which has no changes since.
func (t *Tx) forgive() {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if t.part != nil && t.failedIn == t.part {
		t.failed, t.failedIn = false, nil
	}
}

func (t *Tx) releaseFrom(n int) {
	rows := t.held[n:]
	t.held = t.held[:n:n]
	for _, r := range rows {
		t.db.release(r)
	}
}

// keepPart makes the part's changes those of the transaction.
func (t *Tx) keepPart() {
	if t.part != nil {
		t.all.add(*t.part)
		t.part = nil
	}
}

// commit ends the transaction and makes its changes durable.
func (t *Tx) commit() {
	t.keepPart()
	t.db.apply(t.all)
	t.end()
}

// expire ends a transaction whose budget is over.
func (t *Tx) expire() {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if !t.isOver() {
		t.expired = true
		t.end()
	}
}

// end releases everything and wakes the statements that still wait.
func (t *Tx) end() {
	close(t.over)
	for _, w := range t.waits {
		if !w.isGranted() {
			t.db.locks[w.row].leave(w)
		}
	}
	t.releaseFrom(0)
}
