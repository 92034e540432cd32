package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

const (
	// maxDone is the most parked messages that are deleted at a time.
	maxDone = 500
	// lastDeletion is how long the end of a subscription waits for the deletion of what was handled. What is left is handled
	// again, as a replay.
	lastDeletion = 5 * time.Second
)

// clerk is the goroutine that asks the database on behalf of parked order keys, one thing at a time. What fails is tried
// again; nothing is acknowledged before it is stored.
func (s *orderedSubscription) clerk() {
	failures := 0
	for {
		select {
		case <-s.over:
			s.lastDeletions()
			return
		default:
		}
		job := s.nextJob()
		if job == nil {
			select {
			case <-s.lot.wake:
			case <-s.over:
			}
			continue
		}
		if err := s.perform(job); err == nil {
			failures = 0
			continue
		}
		failures++
		select {
		case <-time.After(sdk.Backoff{Max: 5 * time.Second}.Delay(failures)):
		case <-s.over:
		}
	}
}

func (s *orderedSubscription) perform(job func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.lot.budget)
	defer cancel()
	err := job(ctx)
	s.mu.Lock()
	first := err != nil && s.lot.trouble == nil
	s.lot.trouble = err
	s.mu.Unlock()
	if first {
		s.order.log.Error("Order: the database does not take or give parked messages; it is asked again", err,
			watermill.LogFields{"topic": s.topic})
	}
	signal(s.wake)
	return err
}

// nextJob is what is to be asked: what was parked before this process began; then deletions, so that nothing is read that was
// handled; then what is to be parked, so that the subscription goes on; then what is to be read.
func (s *orderedSubscription) nextJob() func(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	lot := s.lot
	switch {
	case lot.template == nil:
		return nil
	case !lot.open:
		return s.openLot
	case len(lot.done) > 0:
		return s.delete
	}
	if places := s.toPark(); len(places) > 0 {
		return func(ctx context.Context) error { return s.park(ctx, places) }
	}
	if len(lot.wanting) > 0 && lot.loaded < s.window && !s.ends() {
		k := lot.wanting[0]
		lot.wanting = lot.wanting[1:]
		after, limit := k.after, readAhead
		if k.failures > 0 {
			limit = 1
		}
		return func(ctx context.Context) error { return s.load(ctx, k, after, limit) }
	}
	return nil
}

// openLot finds out which keys are parked. Until then nothing is handed out.
func (s *orderedSubscription) openLot(ctx context.Context) error {
	keys, err := s.lot.store.ParkedKeys(ctx, s.lot.scope)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, found := range keys {
		k := &parkedKey{key: found.OrderKey, messages: found.Messages}
		s.lot.keys[k.key] = k
		s.lot.messages += k.messages
		s.want(k)
	}
	s.lot.open = true
	return nil
}

// delete removes the rows of what was handled.
func (s *orderedSubscription) delete(ctx context.Context) error {
	s.mu.Lock()
	done := s.lot.done[:min(len(s.lot.done), maxDone)]
	s.mu.Unlock()
	if err := s.lot.store.Unpark(ctx, done); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lot.done = s.lot.done[len(done):]
	return nil
}

func (s *orderedSubscription) lastDeletions() {
	ctx, cancel := context.WithTimeout(context.Background(), lastDeletion)
	defer cancel()
	for {
		s.mu.Lock()
		left := len(s.lot.done)
		s.mu.Unlock()
		if left == 0 || s.delete(ctx) != nil {
			return
		}
	}
}

// toPark takes the messages that are to be parked out of the flow: those of lines none of whose messages is out any more. It
// is called under the mutex.
func (s *orderedSubscription) toPark() []*place {
	var places []*place
	for l := range s.lot.leaving {
		if s.ends() || !l.leaves() || l.count == l.rows {
			delete(s.lot.leaving, l)
			continue
		}
		n := len(places)
		for p := l.first; p != nil; p = p.next {
			if p.row != nil {
				continue
			}
			if p.state != placeWaiting || p.ctx.Err() != nil {
				places = places[:n]
				break
			}
			places = append(places, p)
		}
	}
	for _, p := range places {
		s.unwatch(p)
		p.state = placeParking
	}
	return places
}

// park stores messages, and acknowledges them once they are durable.
func (s *orderedSubscription) park(ctx context.Context, places []*place) error {
	now := time.Now()
	messages := make([]receipts.Parked, len(places))
	for i, p := range places {
		messages[i] = receipts.Parked{
			Scope: s.lot.scope, OrderKey: p.line.key, Handler: s.lot.handler, Topic: s.lot.topic,
			UUID: p.inner.UUID, Metadata: p.inner.Metadata, Payload: p.inner.Payload, At: now,
		}
	}
	err := s.lot.store.Park(ctx, messages)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range places {
		if err == nil {
			s.parked(p)
		} else {
			p.state = placeWaiting
			s.keep(p)
		}
	}
	for _, p := range places {
		p.line.advance()
	}
	s.changed()
	return err
}

// parked acknowledges a message that is stored, and counts it there. It is called under the mutex.
func (s *orderedSubscription) parked(p *place) {
	l := p.line
	k := s.lot.keys[l.key]
	if k == nil {
		k = &parkedKey{key: l.key, failures: p.failures, due: p.due}
		s.lot.keys[l.key] = k
		l.parked = k
	}
	k.messages++
	k.atEnd = false
	s.lot.messages++
	l.chosen = false
	p.inner.Ack()
	s.waiting--
	l.remove(p)
	if k.loaded <= readAhead/2 {
		s.want(k)
	}
}

// load reads parked messages of a key into its line.
func (s *orderedSubscription) load(ctx context.Context, k *parkedKey, after int64, limit int) error {
	rows, err := s.lot.store.Parked(ctx, s.lot.scope, k.key, after, limit)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil: // perhaps only this one cannot be read: the others come first now
		s.lot.wanting = append(s.lot.wanting, k)
		return fmt.Errorf("order key of %d parked messages: %w", k.messages, err)
	case s.ends():
		return nil
	}
	k.wanting = false
	if k.after != after { // its first one failed meanwhile, and is to be read again
		s.want(k)
		return nil
	}
	if len(rows) < limit {
		k.atEnd = true
	}
	if len(rows) == 0 && k.loaded == 0 {
		s.unparked(k) // somebody else has handled them
		return nil
	}
	l := s.line(k.key)
	for i := range rows {
		p := s.lot.place(&rows[i], k)
		l.insert(p)
		k.after = rows[i].Position
		k.loaded++
		s.lot.loaded++
		if i == 0 && k.failures > 0 {
			p.failures = k.failures
			p.fail()
		}
	}
	l.advance()
	s.changed()
	return nil
}

// errNoParker is why a store cannot park.
var errNoParker = errors.New("config: OrderPolicy is ParkKeys, but the store cannot park messages (it is no receipts.Parker): use StandStill")
