package idempotency

import (
	"context"
	"fmt"
	"maps"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// maxReason bounds a dead letter's reason, in bytes.
const maxReason = 300

// divert stores the message's dead letter in the open transaction and commits; only then is the message done. Storing
// the same dead letter again adds nothing.
func (m *Middleware[T]) divert(p *pending[T], r *running[T], why receipts.DeadLetterKind, reason string, count *atomic.Uint64, lost unknown) verdict {
	letter := receipts.DeadLetter{
		Scope: p.scope, Key: p.key, Fingerprint: p.fingerprint,
		Kind: why, Reason: brief(reason, maxReason),
		Consumer: m.cfg.Consumer, Handler: p.handler, Topic: p.topic,
		UUID: p.msg.UUID, Metadata: maps.Clone(p.msg.Metadata), Payload: p.msg.Payload,
		At: time.Now(),
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), m.cfg.TxBudget)
	defer cancel()
	if err := r.tx.Divert(ctx, []receipts.DeadLetter{letter}); err != nil {
		return m.classify(fmt.Errorf("divert as %s: %w", why, err), returnedAndHeld)
	}
	v := m.commit(p, r, done(count), lost, returnedAndHeld)
	if v.kind == kindDone {
		m.log.Info("Diverted a message into the dead-letter table", m.fields(p).Add(watermill.LogFields{
			"kind": string(why), "reason": letter.Reason,
		}))
	}
	return v
}
