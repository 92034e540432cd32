package idempotency

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// maxFingerprint is the longest payload fingerprint, in bytes.
const maxFingerprint = 64

// pending is one delivery on its way through the middleware: what is known of it, and how far it came. One goroutine at a
// time works on it.
type pending[T any] struct {
	msg      *message.Message
	ctx      context.Context // the message's, as it arrived
	delivery *sdk.DeliveryInfo
	arrived  time.Time

	handler, topic string // as the router knows them
	route

	scope       string
	key         []byte
	fingerprint []byte
	sum         [sha256.Size]byte // where the usual fingerprint lives

	refused   string // why it is refused; "" otherwise
	permanent error  // the handler said so: divert it in the next transaction
	claimed   bool   // AtMostOnce: its receipt is committed

	owns string // its outputs, in the table of what is being published, until they are handed over; "" means none

	contentions int       // transactions in a row that met contention
	outages     int       // rounds that found the database away
	patience    time.Time // until when it waits for the database; zero: it has not waited yet
}

func (m *Middleware[T]) newPending(msg *message.Message, consumerOnly bool) *pending[T] {
	ctx := msg.Context()
	p := &pending[T]{
		msg: msg, ctx: ctx, arrived: time.Now(),
		handler: message.HandlerNameFromCtx(ctx),
		topic:   message.SubscribeTopicFromCtx(ctx),
		route:   route{publishTopic: message.PublishTopicFromCtx(ctx)},
	}
	if consumerOnly {
		p.publishTopic = ""
	}
	if info, ok := sdk.DeliveryFrom(ctx); ok {
		p.delivery = info
	}
	return p
}

func (m *Middleware[T]) takeFingerprint(p *pending[T]) error {
	if m.cfg.Fingerprint == nil {
		p.sum = sha256.Sum256(p.msg.Payload)
		p.fingerprint = p.sum[:]
		return nil
	}
	p.fingerprint = m.cfg.Fingerprint(p.msg)
	if n := len(p.fingerprint); n == 0 || n > maxFingerprint {
		return fmt.Errorf("config: Fingerprint gave %d bytes: it must give between 1 and %d", n, maxFingerprint)
	}
	return nil
}

// checkLease refuses a delivery that could be taken away from us while its transaction is still open.
func (m *Middleware[T]) checkLease(p *pending[T]) error {
	if p.delivery == nil {
		return nil
	}
	if lease := p.delivery.Limits.Lease; lease > 0 && lease <= m.cfg.TxBudget {
		return fmt.Errorf("%w: lease %v, TxBudget %v: lower TxBudget or raise the subscriber's Lease", ErrLease, lease, m.cfg.TxBudget)
	}
	return nil
}

// failed wraps an error for the router.
func (p *pending[T]) failed(err error, charged bool) error {
	return &deliveryError{handler: p.handler, topic: p.topic, uuid: p.msg.UUID, charged: charged, err: err}
}
