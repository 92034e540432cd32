package idempotency

import (
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// ticket is a delivery's place in the line of its order key, given by Ordered for one hand-out. All methods may be called
// on nil, which is a delivery without order. None blocks, and none calls back: they may be called under any lock.
//
// What takes a delivery through the middleware uses it like this, each time the delivery comes in (an outer Retry brings
// the same one, with the same ticket, several times):
//
//  1. ticketFor, before anything else.
//  2. behind: if it is true the delivery goes back at once, uncharged. Else it takes its place in the queue, and then says
//     reached: only now the next one of its line is handed out. The queue keeps that order within a line.
//  3. behind again, just before its handler runs: an earlier one may have failed since.
//  4. passed once it is durable, or stumbled when it goes back for whatever reason (error, panic, Goexit, cancelled,
//     behind), before anything later of its line may run. after, where a delay was asked for, comes before the return.
//
// Whatever goes back is held by Ordered, not by the middleware, also for a foreign subscriber.
type ticket struct{}

// ticketFor gives the ticket of a delivery: nil where there is no OrderKey, or where it gives "". Its error is
// ErrNotOrdered: the delivery has an order key, but did not come through Ordered.
func (m *Middleware[T]) ticketFor(*message.Message) (*ticket, error) { return nil, nil }

// line names the order key; "" where there is none.
func (t *ticket) line() string { return "" }

// reached says that the delivery has its place in the queue: the next one of its key may come.
func (t *ticket) reached() {}

// behind tells whether an earlier delivery of the key is not in its place: it failed and has not passed since, or is on its
// way again. Then this one has to go back, uncharged.
func (t *ticket) behind() bool { return false }

// stumbled says that the delivery goes back unhandled: from now on later ones of its key are behind.
func (t *ticket) stumbled() {}

// passed says that the delivery is done, durably.
func (t *ticket) passed() {}

// after asks for a delay before the delivery is handed out again; otherwise Config.RetryBackoff applies. Not positive means
// nothing was asked for.
func (t *ticket) after(time.Duration) {}
