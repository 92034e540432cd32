package memory

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-mq/penstock/sdk"
)

// topic holds the queues of its groups. The broker's mutex guards it.
type topic struct {
	b      *Broker
	name   string
	groups map[string]*queue
	// backlog keeps what was rejected into a topic that has no group yet; its first group becomes its owner.
	backlog *queue
	// line are the Sends that wait for room, in the order in which they came.
	line []*ticket
}

// ticket is the place of one Send in the line.
type ticket struct {
	turn chan struct{} // buffered: look again
	err  error         // why the Send was taken out of the line
}

// prepare makes a group, which gets what is stored from now on.
func (t *topic) prepare(group string) {
	if group == "" || t.groups[group] != nil {
		return
	}
	q := t.backlog
	if q == nil {
		q = newQueue(t, group)
	}
	q.group = group
	t.backlog = nil
	t.groups[group] = q
}

// roomFor tells whether every group has room for one more message of that size.
func (t *topic) roomFor(size int64) bool {
	for _, q := range t.groups {
		if !q.fits(size) {
			return false
		}
	}
	return true
}

// fill stores messages for all groups until one does not fit, and gives how many it stored.
func (t *topic) fill(msgs []*stored) int {
	for i, m := range msgs {
		if !t.roomFor(m.size) {
			return i
		}
		for _, q := range t.groups {
			q.add(m)
		}
	}
	return len(msgs)
}

// pump brings all queues up to date.
func (t *topic) pump(now int64) {
	for _, q := range t.groups {
		q.pump(now)
	}
}

// admit tells the first in the line that there may be room.
func (t *topic) admit() {
	if len(t.line) > 0 {
		t.line[0].call()
	}
}

// leave takes a ticket out of the line; the next one gets its turn.
func (t *topic) leave(tk *ticket) {
	if i := slices.Index(t.line, tk); i >= 0 {
		t.line = slices.Delete(t.line, i, i+1)
	}
	t.admit()
}

// disperse ends the line. With an error the Sends fail, with nil they look again from the start.
func (t *topic) disperse(why error) {
	for _, tk := range t.line {
		tk.err = why
		tk.call()
	}
	t.line = nil
}

func (tk *ticket) call() {
	select {
	case tk.turn <- struct{}{}:
	default:
	}
}

// sendChunk is how many messages are copied before the mutex is taken: copying is done outside it, and a Send that waits
// for room must not hold a second copy of a huge batch.
const sendChunk = 256

// sending is one Send under way.
type sending struct {
	d     *driver
	topic string
	b     *Broker
}

// store stores the messages in order and gives how many were stored, and why the next one was not.
func (s *sending) store(ctx context.Context, msgs []*stored) (int, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	done := 0
	var tk *ticket
	for {
		t, err := s.target(ctx, tk)
		if err != nil || t == nil {
			s.leave(tk)
			return done, err
		}
		if len(t.line) == 0 || t.line[0] == tk {
			n := t.fill(msgs[done:])
			if done += n; n > 0 {
				t.pump(s.b.now())
			}
			if done == len(msgs) {
				s.leave(tk)
				return done, nil
			}
		}
		if tk == nil || !slices.Contains(t.line, tk) {
			tk = &ticket{turn: make(chan struct{}, 1)}
			t.line = append(t.line, tk)
		}
		s.wait(ctx, tk)
	}
}

// target gives the topic to store to, or nil and nil where the messages are dropped knowingly.
func (s *sending) target(ctx context.Context, tk *ticket) (*topic, error) {
	if s.d.closed {
		return nil, s.fail(sdk.OutcomeRejected, sdk.ErrClosed)
	}
	if tk != nil && tk.err != nil {
		return nil, s.fail(sdk.OutcomeRejected, tk.err)
	}
	if err := ctx.Err(); err != nil {
		return nil, s.fail(sdk.OutcomeRejected, err)
	}
	if err := s.b.refused[s.topic]; err != nil {
		if _, ok := errors.AsType[*sdk.OutcomeError](err); ok {
			return nil, err
		}
		return nil, s.fail(sdk.OutcomeRejected, err)
	}
	t := s.b.topics[s.topic]
	if t == nil || len(t.groups) == 0 {
		if s.d.accept {
			return nil, nil
		}
		return nil, s.fail(sdk.OutcomePermanent, sdk.ErrUnroutable)
	}
	return t, nil
}

// wait lets go of the mutex until it may be the ticket's turn.
func (s *sending) wait(ctx context.Context, tk *ticket) {
	s.b.mu.Unlock()
	defer s.b.mu.Lock()
	select {
	case <-tk.turn:
	case <-ctx.Done():
	case <-s.d.done:
	}
}

func (s *sending) leave(tk *ticket) {
	if t := s.b.topics[s.topic]; t != nil && tk != nil {
		t.leave(tk)
	}
}

func (s *sending) fail(kind sdk.Outcome, err error) error {
	return &sdk.OutcomeError{Kind: kind, Err: fmt.Errorf("memory: send to topic %q: %w", shorten(s.topic), err)}
}

// keep copies a message for the broker.
func keep(m sdk.Message) *stored {
	return &stored{Message: cloneMessage(m), size: sizeOf(m)}
}

func cloneMessage(m sdk.Message) sdk.Message {
	m.Payload = slices.Clone(m.Payload)
	m.Metadata = maps.Clone(m.Metadata)
	return m
}

// sizeOf is what a message counts for in CapacityBytes.
func sizeOf(m sdk.Message) int64 {
	n := len(m.ID) + len(m.Key) + len(m.Payload)
	for k, v := range m.Metadata {
		n += len(k) + len(v)
	}
	return int64(n)
}
