// Package memstore is a receipts store without a database: for tests that want every rule of [receipts.Store] kept and
// nothing on disk. One writer at a time, snapshots by copying, so it is meant for small contents.
//
// A [Database] holds what is committed, a [Store] is one handle on it, and [Tx] is what a handler writes with: counters,
// the effect that the transaction clauses count.
package memstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// The errors of this package, with what Classify makes of them.
var (
	// ErrBusy: another transaction is open and did not end in time; contention.
	ErrBusy = errors.New("memstore: another transaction is open")
	// ErrAway: the store was told to be away; an outage.
	ErrAway = errors.New("memstore: the database is away")
	// ErrEnded: the transaction is over.
	ErrEnded = errors.New("memstore: the transaction is over")
)

// Database is what all handles share. It is safe for concurrent use.
type Database struct {
	writer chan struct{} // holds one value while a transaction is open

	mu    sync.Mutex
	state state
}

// NewDatabase makes an empty database.
func NewDatabase() *Database {
	return &Database{writer: make(chan struct{}, 1), state: state{
		counters: map[string]int64{}, receipts: map[id]receipts.Receipt{}, markers: map[receipts.Nonce]bool{},
	}}
}

// Store gives a new handle, which needs no closing.
func (d *Database) Store() *Store { return &Store{db: d} }

// Counters gives the committed counters. The caller owns the map.
func (d *Database) Counters() map[string]int64 { return d.read().counters }

// read gives a copy of what is committed.
func (d *Database) read() state {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state.clone()
}

// lock waits for the right to write.
func (d *Database) lock(ctx context.Context) error {
	select {
	case d.writer <- struct{}{}:
		return nil
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("%w: %w", ErrBusy, ctx.Err())
		}
		return ctx.Err()
	}
}

func (d *Database) unlock() { <-d.writer }

// commit makes a transaction's copy the committed state.
func (d *Database) commit(s state) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state = s
}

// change changes the committed state outside of a transaction, behind any open one.
func (d *Database) change(ctx context.Context, f func(*state)) error {
	if err := d.lock(ctx); err != nil {
		return err
	}
	defer d.unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	f(&d.state)
	return nil
}

// id names a receipt. Strings of Go are bytes and are compared as such.
type id struct{ scope, key string }

type state struct {
	counters map[string]int64
	receipts map[id]receipts.Receipt
	markers  map[receipts.Nonce]bool
	outputs  []receipts.Output
	letters  []receipts.DeadLetter
}

func (s state) clone() state {
	return state{
		counters: maps.Clone(s.counters), receipts: maps.Clone(s.receipts), markers: maps.Clone(s.markers),
		outputs: slices.Clone(s.outputs), letters: slices.Clone(s.letters),
	}
}
