package memstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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

// Check always finds one lane, one writer and the tables.
func (s *Store) Check(ctx context.Context) (receipts.Info, error) {
	return receipts.Info{Dialect: "memory", Lanes: 1, Parts: true, Schema: 1}, s.there(ctx)
}

// Migrate has nothing to do.
func (s *Store) Migrate(ctx context.Context) error { return s.there(ctx) }

// Begin waits until no other transaction is open.
func (s *Store) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[*Tx], error) {
	if err := s.there(ctx); err != nil {
		return nil, err
	}
	if err := s.db.lock(ctx); err != nil {
		return nil, err
	}
	t := &transaction{s: s, tx: &Tx{db: s.db, work: s.db.read()}, nonce: receipts.NewNonce()}
	if opts.Budget > 0 {
		t.timer = time.AfterFunc(opts.Budget, func() { _ = t.tx.Rollback() }) // over already: nothing to undo
	}
	return t, nil
}

// Resolve looks for the marker.
func (s *Store) Resolve(ctx context.Context, nonce receipts.Nonce) (bool, error) {
	return s.db.read().markers[nonce], s.there(ctx)
}

// Unsent lists unsent outputs in commit order.
func (s *Store) Unsent(ctx context.Context, q receipts.UnsentQuery) ([]receipts.Output, error) {
	var found []receipts.Output
	for _, o := range s.db.read().outputs {
		switch {
		case o.Sent, o.ViaRouter:
		case !q.Before.IsZero() && !o.At.Before(q.Before):
		case !strings.HasPrefix(o.Scope, q.Prefix):
		case q.Scope != "" && (o.Scope != q.Scope || string(o.Key) != string(q.Key)):
		case len(found) < q.Limit:
			found = append(found, o)
		}
	}
	return found, s.there(ctx)
}

// Outputs lists one receipt's outputs.
func (s *Store) Outputs(ctx context.Context, scope string, key []byte) ([]receipts.Output, error) {
	var found []receipts.Output
	for _, o := range s.db.read().outputs {
		if o.Scope == scope && string(o.Key) == string(key) {
			found = append(found, o)
		}
	}
	return found, s.there(ctx)
}

// MarkSent marks outputs.
func (s *Store) MarkSent(ctx context.Context, refs []receipts.OutputRef, _ time.Time) error {
	if err := s.there(ctx); err != nil {
		return err
	}
	return s.db.change(ctx, func(st *state) {
		st.outputs = slices.Clone(st.outputs)
		for i := range st.outputs {
			if slices.Contains(refs, st.outputs[i].OutputRef) {
				st.outputs[i].Sent = true
			}
		}
	})
}

// DeadLetters lists the oldest ones.
func (s *Store) DeadLetters(ctx context.Context, limit int) ([]receipts.DeadLetter, error) {
	letters := s.db.read().letters
	return letters[:min(limit, len(letters))], s.there(ctx)
}

// Stats counts.
func (s *Store) Stats(ctx context.Context) (receipts.Stats, error) {
	st := s.db.read()
	stats := receipts.Stats{DeadLetters: map[receipts.DeadLetterKind]int{}, Outputs: len(st.outputs)}
	for _, r := range st.receipts {
		switch {
		case !st.markers[r.Nonce]:
			stats.Torn++
		case r.State == receipts.StateDone:
			stats.Done++
		default:
			stats.Diverted++
		}
	}
	for _, o := range st.outputs {
		if o.Sent || o.ViaRouter {
			continue
		}
		if stats.Unsent++; stats.OldestUnsent.IsZero() || o.At.Before(stats.OldestUnsent) {
			stats.OldestUnsent = o.At
		}
	}
	for _, l := range st.letters {
		stats.DeadLetters[l.Kind]++
	}
	return stats, s.there(ctx)
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

// transaction is an open transaction as the middleware sees it.
type transaction struct {
	s     *Store
	tx    *Tx
	nonce receipts.Nonce
	timer *time.Timer
	fresh []id
	next  int
	part  state
}

var _ receipts.Tx[*Tx] = (*transaction)(nil)

// Raw gives what a handler writes with.
func (t *transaction) Raw() *Tx { return t.tx }

// Nonce names the transaction.
func (t *transaction) Nonce() receipts.Nonce { return t.nonce }

// Claim inserts receipts.
func (t *transaction) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results := make([]receipts.ClaimResult, len(claims))
	err := t.write(ctx, func(st *state) {
		for i, c := range claims {
			key := id{c.Scope, string(c.Key)}
			r, there := st.receipts[key]
			switch {
			case !there:
				st.receipts[key] = receipts.Receipt{Fingerprint: c.Fingerprint, Nonce: t.nonce, State: c.State, At: c.At}
				t.fresh = append(t.fresh, key)
				results[i].Status = receipts.ClaimFresh
			case st.markers[r.Nonce]:
				results[i] = receipts.ClaimResult{Status: receipts.ClaimHeld, Receipt: r}
			default:
				results[i] = receipts.ClaimResult{Status: receipts.ClaimTorn, Receipt: r}
			}
		}
	})
	return results, err
}

// Unclaim deletes fresh receipts.
func (t *transaction) Unclaim(ctx context.Context, claims []receipts.Claim) error {
	return t.write(ctx, func(st *state) {
		for _, c := range claims {
			key := id{c.Scope, string(c.Key)}
			if st.receipts[key].Nonce == t.nonce {
				delete(st.receipts, key)
				t.fresh = slices.DeleteFunc(t.fresh, func(f id) bool { return f == key })
			}
		}
	})
}

// Part remembers the state.
func (t *transaction) Part(ctx context.Context) error {
	return t.write(ctx, func(st *state) { t.part = st.clone() })
}

// Keep forgets what Part remembered.
func (t *transaction) Keep(ctx context.Context) error {
	return t.write(ctx, func(*state) { t.part = state{} })
}

// Undo goes back to what Part remembered.
func (t *transaction) Undo(ctx context.Context) error {
	return t.write(ctx, func(st *state) { *st, t.part = t.part, state{} })
}

// AddOutputs stores outputs.
func (t *transaction) AddOutputs(ctx context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	stored := slices.Clone(outputs)
	err := t.write(ctx, func(st *state) {
		for i := range stored {
			stored[i].OutputRef = receipts.OutputRef{Nonce: t.nonce, Position: t.next}
			t.next++
		}
		st.outputs = append(st.outputs, stored...)
	})
	return stored, err
}

// Divert stores dead letters that are not there yet.
func (t *transaction) Divert(ctx context.Context, letters []receipts.DeadLetter) error {
	return t.write(ctx, func(st *state) {
		for _, l := range letters {
			if !slices.ContainsFunc(st.letters, func(o receipts.DeadLetter) bool {
				return o.Scope == l.Scope && string(o.Key) == string(l.Key) && string(o.Fingerprint) == string(l.Fingerprint)
			}) {
				st.letters = append(st.letters, l)
			}
		}
	})
}

// write changes the transaction's copy.
func (t *transaction) write(ctx context.Context, f func(*state)) error {
	if err := t.s.there(ctx); err != nil {
		return err
	}
	if err := t.tx.change(f); err != nil {
		return fmt.Errorf("%w: %w", receipts.ErrTxEnded, err)
	}
	return nil
}

// Commit writes the marker and commits.
func (t *transaction) Commit(ctx context.Context) error {
	if err := cmp.Or(t.s.there(context.WithoutCancel(ctx)), t.s.room()); err != nil {
		return errors.Join(err, t.Rollback(ctx))
	}
	whole := true
	err := t.write(context.WithoutCancel(ctx), func(st *state) {
		for _, key := range t.fresh {
			whole = whole && st.receipts[key].Nonce == t.nonce
		}
		if len(t.fresh) > 0 && whole {
			st.markers[t.nonce] = true
		}
	})
	if err != nil || !whole {
		return errors.Join(receipts.ErrTxEnded, err, t.Rollback(ctx))
	}
	lost := t.s.nextLost()
	if lost != nil && !lost.forwarded {
		return errors.Join(receipts.ErrCommitUnknown, t.Rollback(ctx))
	}
	if err := t.tx.Commit(); err != nil {
		return errors.Join(receipts.ErrTxEnded, err)
	}
	t.stop()
	if lost != nil {
		return receipts.ErrCommitUnknown
	}
	return nil
}

// Rollback undoes the transaction, unless it is over.
func (t *transaction) Rollback(context.Context) error {
	t.stop()
	if err := t.tx.Rollback(); err != nil && !errors.Is(err, ErrEnded) {
		return err
	}
	return nil
}

func (t *transaction) stop() {
	if t.timer != nil {
		t.timer.Stop()
	}
}
