package idempotency

import (
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// maxReason bounds a dead letter's reason, in bytes.
const maxReason = 300

// letter makes a message's dead letter.
func (m *Middleware[T]) letter(p *pending[T], why receipts.DeadLetterKind, reason string) receipts.DeadLetter {
	p.reason = brief(reason, maxReason)
	return receipts.DeadLetter{
		Scope: p.scope, Key: p.key, Fingerprint: p.fingerprint,
		Kind: why, Reason: p.reason,
		Consumer: m.cfg.Consumer, Handler: p.handler, Topic: p.topic,
		UUID: p.msg.UUID, Metadata: maps.Clone(p.msg.Metadata), Payload: p.msg.Payload,
		At: time.Now(),
	}
}

// logDiverted tells of a dead letter that is durable now.
func (m *Middleware[T]) logDiverted(p *pending[T]) {
	if p.v.diverted != "" {
		m.log.Info("Diverted a message into the dead-letter table", m.fields(p).Add(watermill.LogFields{
			"kind": string(p.v.diverted), "reason": p.reason,
		}))
	}
}
