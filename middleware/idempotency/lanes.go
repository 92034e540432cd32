package idempotency

import (
	"context"
	"sync/atomic"
)

// lanes bounds the transactions that run at a time. A lane is held from before Begin until the transaction ended, and
// never while a message waits for something else.
type lanes chan struct{}

// lane is the right to run one transaction.
type lane struct {
	of    lanes
	freed atomic.Bool
}

// acquire waits for a lane. Its error is the context's.
func (l lanes) acquire(ctx context.Context) (*lane, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case l <- struct{}{}:
		if err := ctx.Err(); err != nil { // both were ready
			<-l
			return nil, err
		}
		return &lane{of: l}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// release frees the lane. It may be called again, by several goroutines.
func (l *lane) release() {
	if l.freed.CompareAndSwap(false, true) {
		<-l.of
	}
}
