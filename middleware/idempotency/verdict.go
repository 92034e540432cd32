package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// kind is what one round through a transaction came to.
type kind uint8

const (
	kindNone       kind = iota // it did not return: a panic or Goexit passes
	kindDone                   // durable, or proven before: acknowledge
	kindClaimed                // AtMostOnce: the receipt is committed, the handler comes next
	kindFailed                 // the handler failed: charged
	kindPermanent              // the handler failed for good: divert
	kindReturned               // back to the broker, nobody's failed attempt
	kindContention             // another transaction was in the way
	kindOutage                 // the database is away
	kindPaused                 // somebody else found the database away meanwhile: nothing was tried
	kindAgain                  // nothing is known of it: another transaction
	kindBlocked                // its identity is claimed elsewhere: set it aside
)

// verdict is the result of one round.
type verdict struct {
	kind kind
	err  error
	// hold: returned to a foreign subscriber, it would come back at once: slow it down.
	hold bool
	// count is the counter that a done message belongs to.
	count *atomic.Uint64
	// applied: the receipt says that the message was processed, with this payload, and other copies need to know no more.
	applied bool
	// replay: the effect was there before; its unsent outputs are looked up.
	replay bool
	// diverted is the kind of the dead letter that was stored.
	diverted receipts.DeadLetterKind
	// outputs are those stored by this transaction.
	outputs []receipts.Output
	// most is the most messages of the next transaction, 0 for any number, and contended: this one counts as contention.
	most      int
	contended bool
}

func done(count *atomic.Uint64) verdict { return verdict{kind: kindDone, count: count} }
func failed(err error) verdict          { return verdict{kind: kindFailed, err: err} }
func returned(err error) verdict        { return verdict{kind: kindReturned, err: err} }
func returnedAndHeld(err error) verdict { return verdict{kind: kindReturned, err: err, hold: true} }
func contention(err error) verdict      { return verdict{kind: kindContention, err: err} }
func outage(err error) verdict          { return verdict{kind: kindOutage, err: err} }
func again(most int, err error) verdict {
	return verdict{kind: kindAgain, err: err, most: max(most, 0)}
}
func permanent(err error) verdict           { return verdict{kind: kindPermanent, err: err} }
func wasCancelled(ctx context.Context) bool { return errors.Is(ctx.Err(), context.Canceled) }

// reached tells whether the round proves that the database answers.
func (v verdict) reached() bool {
	switch v.kind {
	case kindDone, kindClaimed, kindFailed, kindPermanent, kindContention, kindBlocked:
		return true
	default:
		return false
	}
}

// classify tells what an error of the database, or of a handler that met one, means. Anything that is neither contention
// nor an outage is the other verdict.
func (m *Middleware[T]) classify(err error, other func(error) verdict) verdict {
	switch m.store.Classify(err) {
	case receipts.ClassContention:
		return contention(err)
	case receipts.ClassOutage:
		return outage(err)
	case receipts.ClassEnded:
		return other(fmt.Errorf("%w: %w", receipts.ErrTxEnded, err)) // a driver's words do not say so
	default:
		return other(err)
	}
}
