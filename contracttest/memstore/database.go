// Package memstore is a receipts store without a database: for tests that want every rule of [receipts.Store] kept and
// nothing on disk. It is a small model of a server's database at READ COMMITTED: any number of transactions are open at a
// time, each keeps what it changed to itself until it commits, and rows are locked. Where two want the same row, one waits.
//
// A [Database] holds what is committed, a [Store] is one handle on it, and [Tx] is what a handler writes with: counters,
// the effect that the transaction clauses count. All waiting is on channels and timers, so that it works in the bubble of
// [testing/synctest].
//
//	database.go     what is committed          store.go        a handle, faults on request
//	locks.go        rows, waiting, deadlocks   transaction.go  what the middleware does with a transaction
//	tx.go           an open transaction        rows.go         reading what is committed
package memstore

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// The errors of this package, with what Classify makes of them.
var (
	// ErrBusy: another open transaction was in the way for too long, or the two waited for each other; contention. The
	// transaction that got it has failed: see ErrFailed.
	ErrBusy = errors.New("memstore: another open transaction is in the way")
	// ErrAway: the store was told to be away, or to be full; an outage.
	ErrAway = errors.New("memstore: the database is away")
	// ErrEnded: the transaction is over.
	ErrEnded = errors.New("memstore: the transaction is over")
	// ErrFailed: an earlier statement of the transaction met ErrBusy or ErrAway. As in PostgreSQL nothing more can be done in
	// it: its part can be undone, if that is where it happened, or the whole be rolled back.
	ErrFailed = errors.New("memstore: an earlier statement of the transaction failed")
	// ErrNoParts: Part, Keep or Undo on a database without them.
	ErrNoParts = errors.New("memstore: this database has no parts")
)

// Lanes is the number of lanes that Check names, unless there is one writer only.
const Lanes = 16

// defaultLockWait is the longest wait for a counter.
const defaultLockWait = 5 * time.Second

// Options says what kind of database it is. The zero value is a server with many writers.
type Options struct {
	// Serial allows one open transaction at a time, as SQLite does; further ones wait in Begin, in the order in which they
	// came. Check then names one lane.
	Serial bool
	// WithoutParts makes Part, Keep and Undo fail and Check say so.
	WithoutParts bool
	// LockWait is how long Tx.Add waits for a counter that another open transaction changed, before it fails with ErrBusy; 0
	// means 5 s. Transactions that wait for each other do not wait: the last one fails at once.
	LockWait time.Duration
}

// Database is what all handles share. It is safe for concurrent use.
type Database struct {
	opts Options

	mu       sync.Mutex
	locks    map[row]*lock               // guarded by mu, as all below
	counters map[string]int64            // committed, as all below
	receipts map[id]receipts.Receipt     //
	markers  map[receipts.Nonce]struct{} //
	outputs  []receipts.Output           // in commit order
	refs     map[receipts.OutputRef]int  // where in outputs
	letters  []receipts.DeadLetter       // in commit order
	lettered map[letterID]struct{}       //
}

// NewDatabase makes an empty database of the usual kind.
func NewDatabase() *Database { return NewDatabaseWith(Options{}) }

// NewDatabaseWith makes an empty database of another kind.
func NewDatabaseWith(opts Options) *Database {
	if opts.LockWait <= 0 {
		opts.LockWait = defaultLockWait
	}
	return &Database{
		opts: opts, locks: map[row]*lock{}, counters: map[string]int64{}, receipts: map[id]receipts.Receipt{},
		markers: map[receipts.Nonce]struct{}{}, refs: map[receipts.OutputRef]int{}, lettered: map[letterID]struct{}{},
	}
}

// Store gives a new handle, which needs no closing.
func (d *Database) Store() *Store { return &Store{db: d} }

// Counters gives the committed counters. The caller owns the map.
func (d *Database) Counters() map[string]int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.counters)
}

// begin opens a transaction. Where there is one writer it waits for its turn.
func (d *Database) begin(ctx context.Context, s *Store) (*Tx, error) {
	t := &Tx{db: d, s: s, nonce: receipts.NewNonce(), over: make(chan struct{})}
	if !d.opts.Serial {
		return t, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.acquire(t, row{table: writers}, &patience{ctx: ctx}); err != nil {
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, ctx.Err()
		}
		return nil, err
	}
	return t, nil
}

// apply commits changes. It is called under the lock.
func (d *Database) apply(c changes) {
	for name, by := range c.counters {
		d.counters[name] += by
	}
	maps.Copy(d.receipts, c.receipts)
	for _, o := range c.outputs {
		d.refs[o.OutputRef] = len(d.outputs)
		d.outputs = append(d.outputs, o)
	}
	for _, l := range c.letters {
		d.lettered[letterIDOf(l)] = struct{}{}
		d.letters = append(d.letters, l)
	}
}

// whole tells whether the transaction of that nonce wrote its marker. It is called under the lock.
func (d *Database) whole(n receipts.Nonce) bool {
	_, there := d.markers[n]
	return there
}

// id names a receipt. Strings of Go are bytes and are compared as such.
type id struct{ scope, key string }

// letterID is what makes a dead letter unique.
type letterID struct{ scope, key, fingerprint string }

func letterIDOf(l receipts.DeadLetter) letterID {
	return letterID{l.Scope, string(l.Key), string(l.Fingerprint)}
}

// changes are what a transaction, or a part of it, has written.
type changes struct {
	counters map[string]int64 // what was added
	receipts map[id]receipts.Receipt
	outputs  []receipts.Output
	letters  []receipts.DeadLetter
}

// add adds those of a part.
func (c *changes) add(part changes) {
	if c.counters == nil {
		c.counters = part.counters
	} else {
		for name, by := range part.counters {
			c.counters[name] += by
		}
	}
	c.outputs = append(c.outputs, part.outputs...)
	c.letters = append(c.letters, part.letters...)
}
