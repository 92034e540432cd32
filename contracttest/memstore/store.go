package memstore

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// Store is one handle on a Database. It is safe for concurrent use.
type Store struct {
	db *Database

	mu     sync.Mutex
	away   error
	full   error
	refuse int
	lose   *lostCommit
}

var _ receipts.Store[*Tx] = (*Store)(nil)

// lostCommit is a COMMIT that is to be lost.
type lostCommit struct {
	forwarded bool
	fired     int
}

// LoseCommit makes the answer to this handle's next COMMIT be lost, after it is carried out (forwarded) or instead of it.
// fired tells how often that happened.
func (s *Store) LoseCommit(forwarded bool) (fired func() int) {
	lost := &lostCommit{forwarded: forwarded}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lose = lost
	return func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return lost.fired
	}
}

// Away makes everything on this handle fail with ErrAway until end is called. fired tells how often it did.
func (s *Store) Away() (end func(), fired func() int) { return s.failing(&s.away) }

// Full makes every COMMIT on this handle roll back and fail with ErrAway until end is called. fired tells how often it did.
func (s *Store) Full() (end func(), fired func() int) { return s.failing(&s.full) }

func (s *Store) failing(state *error) (end func(), fired func() int) {
	set := func(err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		*state, s.refuse = err, 0
	}
	set(ErrAway)
	return func() { set(nil) }, func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.refuse
	}
}

// room fails while there is none for a COMMIT.
func (s *Store) room() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.full != nil {
		s.refuse++
	}
	return s.full
}

// there fails while the database is away.
func (s *Store) there(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away != nil {
		s.refuse++
		return s.away
	}
	return ctx.Err()
}

// nextLost gives the lost COMMIT, once.
func (s *Store) nextLost() *lostCommit {
	s.mu.Lock()
	defer s.mu.Unlock()
	lost := s.lose
	if lost != nil {
		lost.fired++
	}
	s.lose = nil
	return lost
}

// Check finds the lanes and the tables.
func (s *Store) Check(ctx context.Context) (receipts.Info, error) {
	info := receipts.Info{Dialect: "memory", Lanes: Lanes, Parts: !s.db.opts.WithoutParts, Schema: 1}
	if s.db.opts.Serial {
		info.Lanes = 1
	}
	return info, s.there(ctx)
}

// Migrate has nothing to do.
func (s *Store) Migrate(ctx context.Context) error { return s.there(ctx) }

// Begin opens a transaction. With Options.Serial it waits, as long as ctx, until no other one is open.
func (s *Store) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[*Tx], error) {
	if err := s.there(ctx); err != nil {
		return nil, err
	}
	tx, err := s.db.begin(ctx, s)
	if err != nil {
		return nil, err
	}
	t := &transaction{tx: tx, claimWait: opts.ClaimWait}
	if opts.Budget > 0 {
		t.budget = time.AfterFunc(opts.Budget, tx.expire)
	}
	return t, nil
}

// Classify knows this package's errors.
func (s *Store) Classify(err error) receipts.Class {
	switch {
	case errors.Is(err, ErrAway):
		return receipts.ClassOutage
	case errors.Is(err, ErrBusy):
		return receipts.ClassContention
	default:
		return receipts.ClassOther
	}
}
