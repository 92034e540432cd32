package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// ledger writes down what the transactions of a store came to: which messages shared one, and what was committed. The
// clauses about batches take it as what the database saw. It changes nothing.
type ledger struct {
	mu  sync.Mutex
	txs []*entry
}

// entry is one transaction, from Begin on.
type entry struct {
	calls     [][]string                // the identity keys of each Claim
	fresh     map[string]bool           // and those whose receipt is this transaction's
	claims    map[string]receipts.Claim // by identity key, as they were asked for
	committed bool
}

// ledgerStore is a store whose transactions go into the ledger.
type ledgerStore[T any] struct {
	receipts.Store[T]
	l *ledger
}

// Begin begins and opens an entry.
func (s ledgerStore[T]) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
	tx, err := s.Store.Begin(ctx, opts)
	if err != nil {
		return nil, err
	}
	e := &entry{fresh: map[string]bool{}, claims: map[string]receipts.Claim{}}
	s.l.note(func() { s.l.txs = append(s.l.txs, e) })
	return ledgerTx[T]{Tx: tx, l: s.l, e: e}, nil
}

type ledgerTx[T any] struct {
	receipts.Tx[T]
	l *ledger
	e *entry
}

// Claim claims and writes down.
func (t ledgerTx[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.Tx.Claim(ctx, claims)
	t.l.note(func() {
		call := make([]string, len(claims))
		for i, c := range claims {
			call[i] = string(c.Key)
			t.e.claims[call[i]] = c
			if i < len(results) && results[i].Status == receipts.ClaimFresh {
				t.e.fresh[call[i]] = true
			}
		}
		t.e.calls = append(t.e.calls, call)
	})
	return results, err
}

// Unclaim gives up and writes down.
func (t ledgerTx[T]) Unclaim(ctx context.Context, claims []receipts.Claim) error {
	err := t.Tx.Unclaim(ctx, claims)
	t.l.note(func() {
		for _, c := range claims {
			delete(t.e.fresh, string(c.Key))
		}
	})
	return err
}

// Commit commits and writes down. What may have arrived counts as committed.
func (t ledgerTx[T]) Commit(ctx context.Context) error {
	err := t.Tx.Commit(ctx)
	t.l.note(func() { t.e.committed = err == nil || errors.Is(err, receipts.ErrCommitUnknown) })
	return err
}

func (l *ledger) note(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

// now is a place in the ledger: how many transactions have begun.
func (l *ledger) now() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.txs)
}

// together fails unless one Claim asked for all those identities, in a transaction begun at that place or after it: without
// that a clause about batches shows nothing.
func (l *ledger) together(from int, ids ...string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	most := 0
	for _, e := range l.txs[from:] {
		for _, call := range e.calls {
			n := 0
			for _, id := range ids {
				if slices.Contains(call, id) {
					n++
				}
			}
			if most = max(most, n); n == len(ids) {
				return nil
			}
		}
	}
	return fmt.Errorf("no transaction claimed the %d messages that were pending together; the most was %d", len(ids), most)
}

// claim gives the claim of an identity as the middleware asked for it, with its scope.
func (l *ledger) claim(id string) (receipts.Claim, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.txs {
		if c, ok := e.claims[id]; ok {
			return c, true
		}
	}
	return receipts.Claim{}, false
}

// committed tells in which transaction, by its number, each identity's receipt was committed.
func (l *ledger) committed() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	in := map[string]int{}
	for i, e := range l.txs {
		for id := range e.fresh {
			if e.committed {
				in[id] = i
			}
		}
	}
	return in
}

// wrote lists the transactions begun at that place or after it which were committed, although they asked for nothing but
// those identities.
func (l *ledger) wrote(from int, ids ...string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, e := range l.txs[from:] {
		others := false
		for id := range e.claims {
			others = others || !slices.Contains(ids, id)
		}
		if e.committed && !others {
			n++
		}
	}
	return n
}
