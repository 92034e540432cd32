package idempotency

import (
	"errors"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// attribute tells the store, where it can hold back what handlers write, whose handler runs next.
func (b *batch[T]) attribute(turn int) {
	if tx, ok := b.tx.(receipts.Attributing); ok {
		tx.Member(turn)
	}
}

// guilty tells whose statement it was that failed, where the store had held it back: the error comes to whoever has it sent,
// the handler of a later message or COMMIT. nil: it was none, or contention or an outage, which are nobody's fault.
func (b *batch[T]) guilty(v verdict) *receipts.MemberError {
	var held *receipts.MemberError
	if v.kind == kindContention || v.kind == kindOutage || !errors.As(v.err, &held) {
		return nil
	}
	if held.Member < 0 || held.Member >= len(b.turns) {
		return nil
	}
	return held
}

// blame decides after a statement that a message's handler had left to the store failed. The transaction is lost. Alone the
// message is charged; where there are others it runs again alone, because it may have met what they wrote.
func (b *batch[T]) blame(held *receipts.MemberError) {
	p, v := b.turns[held.Member], failed(held) // and not what the handler said that met the error
	switch {
	case !b.several():
		p.v = v
	case b.m.cfg.Atomicity == PerBatch:
		b.undoAll(p, v)
	default:
		b.cutOut(p, v, b.turns, held.Member)
	}
}
