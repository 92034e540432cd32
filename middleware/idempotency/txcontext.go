package idempotency

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"
)

type carrierKey struct{}

// carrier travels in the shadow's context: it is how TxFrom, Publisher and a joined level find the open transaction, and
// what they leave behind for the level that claimed. There is one for each transaction.
type carrier struct {
	owner  any      // the *Middleware[T] it belongs to
	store  any      // and the store of that one
	parent *carrier // of an enclosing middleware, over another database
	tx     any      // the T that handlers get
	scope  string
	key    []byte
	route  route
	asked  atomic.Bool
	// together: of several messages, so that no output can be told whose it is.
	together bool

	mu      sync.Mutex
	over    bool
	fault   error
	outputs []*message.Message
}

// carrierIn gives the innermost transaction a context carries, or nil.
func carrierIn(ctx context.Context) *carrier {
	c, _ := ctx.Value(carrierKey{}).(*carrier)
	return c
}

// carrierOf gives the innermost transaction that belongs to owner, or nil.
func carrierOf(ctx context.Context, owner any) *carrier {
	c := carrierIn(ctx)
	for c != nil && c.owner != owner {
		c = c.parent
	}
	return c
}

// sharesStore tells whether an open transaction of another middleware, over the same store, is in this context: a second
// one beside it would wait for the first, which waits for it.
func (m *Middleware[T]) sharesStore(ctx context.Context) bool {
	for c := carrierIn(ctx); c != nil; c = c.parent {
		if reflect.TypeOf(c.store).Comparable() && c.store == any(m.store) && !c.isOver() {
			return true
		}
	}
	return false
}

// TxFrom gives the open transaction of the message whose context this is, and marks it as asked for. With two middlewares
// on one path it gives the innermost transaction of type T. Its error is ErrNoTx or ErrTxOver. The transaction must not be
// ended, must not be used after the handler returned, and by one goroutine at a time only.
func TxFrom[T any](ctx context.Context) (T, error) {
	var none T
	other := ""
	for c := carrierIn(ctx); c != nil; c = c.parent {
		tx, ok := c.tx.(T)
		if !ok {
			other = fmt.Sprintf(" (there is one of type %T)", c.tx)
			continue
		}
		if c.isOver() {
			return none, ErrTxOver
		}
		c.asked.Store(true)
		return tx, nil
	}
	return none, fmt.Errorf("transaction of type %T%s: %w", none, other, ErrNoTx)
}

func (c *carrier) isOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over
}

// end makes the transaction unreachable. What comes later gets ErrTxOver. It may be called again.
func (c *carrier) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
}

// spoil makes a commit impossible: the first reason stays.
func (c *carrier) spoil(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fault == nil {
		c.fault = err
	}
}

// spoiled gives the reason why the transaction must not commit, or nil.
func (c *carrier) spoiled() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fault
}

// add keeps messages as outputs of this transaction. It takes them over: the caller has made copies.
func (c *carrier) add(outputs []*message.Message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return ErrTxOver
	}
	if c.together {
		return errWhose
	}
	c.outputs = append(c.outputs, outputs...)
	return nil
}

// take gives the outputs kept so far, once.
func (c *carrier) take() []*message.Message {
	c.mu.Lock()
	defer c.mu.Unlock()
	outputs := c.outputs
	c.outputs = nil
	return outputs
}

// guard runs one level of the handler inside the transaction. If that level failed, by error, panic or Goexit, the
// transaction cannot commit, whatever the levels around it make of it; and once it cannot commit, no level runs any more.
func (c *carrier) guard(msg *message.Message, h message.HandlerFunc) (outputs []*message.Message, err error) {
	if fault := c.spoiled(); fault != nil {
		return nil, fmt.Errorf("%w: %w", ErrTxFailed, fault)
	}
	returned := false
	defer func() {
		if !returned {
			c.spoil(errPanicked)
		}
	}()
	outputs, err = h(msg)
	returned = true
	if err != nil {
		c.spoil(err)
	}
	return outputs, err
}
