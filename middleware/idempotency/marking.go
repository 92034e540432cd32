package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// maxMarked is the most outputs that are marked in one transaction, as far as they are not all of one message.
const maxMarked = 1024

// errStoreLeft is the failure of a store that did not return.
var errStoreLeft = errors.New("the store called runtime.Goexit")

// marking collects what was sent while marks are being written: each write is a transaction, with a flush, and the outputs of
// many messages share it.
type marking struct {
	mu      sync.Mutex
	waiting []sentOutputs
	writing bool
}

// sentOutputs are one message's, or the relay's.
type sentOutputs struct {
	refs []receipts.OutputRef
	done chan<- error
}

// add puts outputs into the line. first: nobody writes marks, so the caller has to see to it.
func (k *marking) add(s sentOutputs) (first bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.waiting = append(k.waiting, s)
	first = !k.writing
	k.writing = true
	return first
}

// take gives what one transaction marks; empty: all is marked.
func (k *marking) take() []sentOutputs {
	k.mu.Lock()
	defer k.mu.Unlock()
	n, outputs := 0, 0
	for n < len(k.waiting) && (n == 0 || outputs+len(k.waiting[n].refs) <= maxMarked) {
		outputs += len(k.waiting[n].refs)
		n++
	}
	group := k.waiting[:n:n]
	if k.waiting = k.waiting[n:]; len(k.waiting) == 0 {
		k.waiting = nil
	}
	k.writing = n > 0
	return group
}

// markSent notes what was sent, and returns when that is durable or has failed. Where it fails, the relay sends those outputs
// again, with the same ids.
func (m *Middleware[T]) markSent(sent []receipts.OutputRef) {
	if len(sent) == 0 {
		return
	}
	done := make(chan error, 1)
	if m.marking.add(sentOutputs{sent, done}) {
		go m.writeMarks()
	}
	if err := <-done; err != nil {
		m.log.Error("Cannot mark outputs as sent; they will be sent again, with the same ids", err, watermill.LogFields{"outputs": len(sent)})
	}
}

// writeMarks writes marks until nobody waits for some. A store that ends the goroutine does not end that.
func (m *Middleware[T]) writeMarks() {
	finished := false
	defer func() {
		if !finished {
			go m.writeMarks()
		}
	}()
	for group := m.marking.take(); len(group) > 0; group = m.marking.take() {
		m.writeGroup(group)
	}
	finished = true
}

// writeGroup marks in one transaction, and tells everybody who waits for it.
func (m *Middleware[T]) writeGroup(group []sentOutputs) {
	err := errStoreLeft
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("the store panicked: %v", value)
		}
		for _, s := range group {
			s.done <- err
		}
	}()
	var refs []receipts.OutputRef
	for _, s := range group {
		refs = append(refs, s.refs...)
	}
	ctx, cancel := context.WithTimeout(context.Background(), m.cfg.TxBudget)
	defer cancel()
	lane, waited := m.lanes.acquire(ctx) // it writes: beside a single writer it would only meet contention
	if waited != nil {
		err = waited
		return
	}
	defer lane.release()
	err = m.store.MarkSent(ctx, refs, time.Now())
}
