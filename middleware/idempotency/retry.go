package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/sdk"
)

// awaitTurn follows a round that met contention: it waits a little, without lane or transaction, and returns nil for
// another round, or the reason why there is none.
func (m *Middleware[T]) awaitTurn(p *pending[T], cause error) error {
	m.counters.contention.Add(1)
	p.contentions++
	if p.contentions > m.cfg.ContentionRetries {
		return fmt.Errorf("%w in %d transactions in a row: %w", ErrContention, p.contentions, cause)
	}
	pause(p.ctx, sdk.Backoff{Min: 5 * time.Millisecond, Max: 500 * time.Millisecond}.Delay(p.contentions))
	return p.ctx.Err()
}

// resolve asks the database what became of a transaction whose COMMIT was not answered, within TxBudget and whatever
// happens to the message meanwhile. Committed: the round is worth what it would have been. Not committed: another round,
// like contention. Undecided: never an acknowledgement.
func (m *Middleware[T]) resolve(p *pending[T], v verdict) verdict {
	m.counters.unknownCommits.Add(1)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), m.cfg.TxBudget)
	defer cancel()
	backoff := sdk.Backoff{Min: 20 * time.Millisecond, Max: time.Second}
	for try := 1; ; try++ {
		committed, err := m.store.Resolve(ctx, v.nonce)
		switch {
		case err == nil && committed:
			m.log.Info("A COMMIT without an answer did commit", m.fields(p))
			m.committed()
			return *v.then
		case err == nil:
			m.log.Info("A COMMIT without an answer did not commit", m.fields(p))
			return contention(v.err)
		case ctx.Err() != nil:
			if m.classify(err, returned).kind == kindOutage {
				m.databaseAway(err)
			}
			m.log.Error("A COMMIT without an answer stays undecided", err, m.fields(p))
			return returned(fmt.Errorf("%w: %w: asking for it: %w", ErrUndecided, v.err, err))
		}
		pause(ctx, backoff.Delay(try))
	}
}

// fields name a message in a log line.
func (m *Middleware[T]) fields(p *pending[T]) watermill.LogFields {
	return watermill.LogFields{"handler_name": p.handler, "topic": p.topic, "message_uuid": brief(p.msg.UUID, 80)}
}
