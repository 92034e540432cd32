package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// tooMuch is the verdict on a message that met contention too often in a row.
func (p *pending[T]) tooMuch(cause error) verdict {
	return returned(fmt.Errorf("%w in %d transactions in a row: %w", ErrContention, p.contentions, cause))
}

// resolve asks the database what became of a transaction whose COMMIT was not answered, within TxBudget and whatever
// happens to the messages meanwhile. Done: it did commit. Not committed: another transaction, like contention. Undecided:
// never an acknowledgement.
func (m *Middleware[T]) resolve(p *pending[T], nonce receipts.Nonce, cause error) verdict {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), m.cfg.TxBudget)
	defer cancel()
	backoff := sdk.Backoff{Min: 20 * time.Millisecond, Max: time.Second}
	for try := 1; ; try++ {
		committed, err := m.store.Resolve(ctx, nonce)
		switch {
		case err == nil && committed:
			m.log.Info("A COMMIT without an answer did commit", m.fields(p))
			return verdict{kind: kindDone}
		case err == nil:
			m.log.Info("A COMMIT without an answer did not commit", m.fields(p))
			return contention(cause)
		case ctx.Err() != nil:
			if m.classify(err, returned).kind == kindOutage {
				m.databaseAway(err)
			}
			m.log.Error("A COMMIT without an answer stays undecided", err, m.fields(p))
			return returned(fmt.Errorf("%w: %w: asking for it: %w", ErrUndecided, cause, err))
		}
		pause(ctx, backoff.Delay(try))
	}
}

// fields name a message in a log line.
func (m *Middleware[T]) fields(p *pending[T]) watermill.LogFields {
	return watermill.LogFields{"handler_name": p.handler, "topic": p.topic, "message_uuid": brief(p.msg.UUID, 80)}
}
