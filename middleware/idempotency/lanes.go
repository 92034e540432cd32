package idempotency

import "context"

// lanes bounds the transactions that run at a time. A lane is held from before Begin until the transaction ended, and
// never while a message waits for something else.
type lanes chan struct{}

// acquire waits for a lane. Its error is the context's, and then no lane is held.
func (l lanes) acquire(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case l <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l lanes) release() { <-l }
