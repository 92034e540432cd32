package memstore

import "sync"

// Tx is what a handler writes with. It is safe for concurrent use.
type Tx struct {
	db *Database

	mu   sync.Mutex
	over bool
	work state
}

// Add adds to a counter. It returns ErrEnded once the transaction is over.
func (t *Tx) Add(counter string, by int64) error {
	return t.change(func(st *state) { st.counters[counter] += by })
}

// Commit commits what was written so far. A handler must not: it is here so that tests can show what happens if one does.
func (t *Tx) Commit() error { return t.end(true) }

// Rollback undoes what was written so far. A handler must not.
func (t *Tx) Rollback() error { return t.end(false) }

func (t *Tx) end(commit bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return ErrEnded
	}
	t.over = true
	if commit {
		t.db.commit(t.work)
	}
	t.db.unlock()
	return nil
}

func (t *Tx) change(f func(*state)) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return ErrEnded
	}
	f(&t.work)
	return nil
}
