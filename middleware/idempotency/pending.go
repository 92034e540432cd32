package idempotency

import (
	"context"
	"crypto/sha256"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
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

	refused   string // why it is refused; "" otherwise
	permanent error  // the handler said so: divert it in the next transaction
	claimed   bool   // AtMostOnce: its receipt is committed
	reason    string // of its dead letter

	before, after *pending[T] // in the list of what is inside
	owns          []string    // its outputs, in the table of what is being published, until they are handed over

	id        identity
	leads     bool          // others of its identity wait for its outcome; of inside
	followers []*pending[T] // deliveries of the same identity that wait for this one; of inside

	ticket *ticket  // its place among those of its order key; nil without order
	line   string   // the order key
	locks  []string // Config.LockKeys, sorted

	// What is known of it in the queue and in the transaction that has it.
	wake     chan struct{} // its lane, or its verdict, is there
	began    atomic.Int64  // when a transaction first took it, Unix nanoseconds; 0: none has
	lane     *lane         // it runs alone, in its own goroutine
	v        verdict
	kept     bool    // its part is in the transaction: then is what the commit is worth
	then     verdict // see kept
	lost     unknown // see kept
	fresh    bool    // its receipt was inserted by the transaction
	gone     bool    // its handler outlived the transaction: it is decided elsewhere
	probing  bool    // it may go through although the database was away
	blocked  bool    // it is in the side lane
	most     int     // the most messages of its next transaction; 0 for any number
	foreseen *sight  // of its next transaction
	shadow   *message.Message
	carrier  *carrier
	handling atomic.Pointer[handling] // the handler's context
	called   time.Time                // when its handler was called
	produced []*message.Message       // the handler's answer
	err      error                    // the handler's answer

	contentions int       // transactions in a row that met contention
	outages     int       // rounds that found the database away
	patience    time.Time // until when it waits for the database; zero: it has not waited yet
}

func (m *Middleware[T]) newPending(msg *message.Message, consumerOnly bool) *pending[T] {
	ctx := msg.Context()
	p, used := m.spare.Get().(*pending[T])
	if !used {
		p = &pending[T]{wake: make(chan struct{}, 1)}
	}
	p.msg, p.ctx, p.arrived = msg, ctx, time.Now()
	p.handler, p.topic = message.HandlerNameFromCtx(ctx), message.SubscribeTopicFromCtx(ctx)
	p.publishTopic = message.PublishTopicFromCtx(ctx)
	if consumerOnly {
		p.publishTopic = ""
	}
	if info, ok := sdk.DeliveryFrom(ctx); ok {
		p.delivery = info
	}
	return p
}

// recycle keeps the memory of a delivery that is over for another one: a kilobyte for each message is what the collector would
// have most to do with. Nobody else may have it any more, as the batch has that was given up because of its handler.
func (m *Middleware[T]) recycle(p *pending[T]) {
	if p.gone || len(p.wake) > 0 {
		return
	}
	*p = pending[T]{wake: p.wake}
	m.spare.Put(p)
}

// claim asks for its receipt.
func (p *pending[T]) claim(now time.Time) receipts.Claim {
	state := receipts.StateDone
	if p.permanent != nil {
		state = receipts.StateDiverted
	}
	return receipts.Claim{Scope: p.scope, Key: p.key, Fingerprint: p.fingerprint, State: state, At: now}
}

func (m *Middleware[T]) takeFingerprint(p *pending[T]) error {
	if m.cfg.Fingerprint == nil {
		sum := sha256.Sum256(p.msg.Payload)
		p.fingerprint = sum[:]
		return nil
	}
	p.fingerprint = m.cfg.Fingerprint(p.msg)
	if n := len(p.fingerprint); n == 0 || n > maxFingerprint {
		return fmt.Errorf("config: Fingerprint gave %d bytes: it must give between 1 and %d", n, maxFingerprint)
	}
	return nil
}

// behind tells whether an earlier message of its order key comes first, so that it has to go back. At most once one whose
// receipt is committed would be lost by that: it goes on, and the earlier one, if that is claimed too, is lost already.
func (p *pending[T]) behind() bool { return !p.claimed && p.ticket.behind() }

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
