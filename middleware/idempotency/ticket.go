package idempotency

import "context"

// ticket is a delivery's place in the line of its order key, given by Ordered. All methods may be called on nil, which is
// a delivery without order.
type ticket struct{}

// ticketFrom gives the ticket that a delivery of this middleware carries, or nil.
func (m *Middleware[T]) ticketFrom(context.Context) *ticket { return nil }

// line names the order key; "" where there is none.
func (t *ticket) line() string { return "" }

// reached says that the delivery has its place in the queue: the next one of its key may come.
func (t *ticket) reached() {}

// behind tells whether an earlier delivery of the key failed and has not passed since: this one has to go back.
func (t *ticket) behind() bool { return false }

// stumbled says that the delivery goes back unhandled: from now on later ones of its key are behind.
func (t *ticket) stumbled() {}

// passed says that the delivery is done.
func (t *ticket) passed() {}
