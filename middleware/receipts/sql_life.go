package receipts

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"time"
)

// txLife tells who may end a transaction: its caller, or the end of its budget. Only one of them gets to.
type txLife struct {
	nonce   Nonce
	budget  time.Duration
	budgets *budgets
	clock   *budget // nil: no budget, or it has not begun
	// ended is closed when the connection is back in the pool, or closed.
	ended chan struct{}

	mu      sync.Mutex
	closing bool
	expired bool
}

// start begins the budget, at whose end outlive is called.
func (l *txLife) start(outlive func()) {
	if l.budget > 0 {
		l.clock = l.budgets.begin(l.budget, outlive)
	}
}

// Nonce names the transaction.
func (l *txLife) Nonce() Nonce { return l.nonce }

// take claims the right to end the transaction. Only one caller gets it.
func (l *txLife) take() (expired, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return l.expired, false
	}
	l.closing = true
	l.budgets.end(l.clock)
	return false, true
}

// expire is take for the end of the budget.
func (l *txLife) expire() (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return false
	}
	l.closing, l.expired = true, true
	return true
}

func (l *txLife) isExpired() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.expired
}

// alreadyEnded answers a Commit that came too late.
func (l *txLife) alreadyEnded(ctx context.Context, expired bool) error {
	if !expired {
		return fmt.Errorf("receipts: transaction %s: commit after commit or rollback: %w", l.nonce, sql.ErrTxDone)
	}
	select {
	case <-l.ended:
	case <-ctx.Done():
	}
	return fmt.Errorf("receipts: transaction %s: %w", l.nonce, budgetError(l.budget))
}
