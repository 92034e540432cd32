package idempotency

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

const (
	// publishBound is how long a message, or the relay, waits for Config.Outputs to take outputs. A publish that takes
	// longer goes on in the background, and is still marked when it succeeds. It is below the usual drain and close
	// timeouts and leases.
	publishBound = 15 * time.Second
	// maxPublishing is the most publishes that run at a time, those in the background included. Beyond it outputs are
	// left to the relay.
	maxPublishing = 256
	// ownedFor is how long outputs that a publish of this process has taken are left alone by the relay.
	ownedFor = 4 * publishBound
)

// errPublisherLeft is the failure of a publisher that did not return.
var errPublisherLeft = errors.New("the publisher called runtime.Goexit")

// sending knows whose outputs this process is about to publish, so that committer, replay and relay do not send the same
// ones at the same time. A committer owns its outputs from before its COMMIT, and a replay before it looks for unsent ones:
// otherwise it could find them unsent just before they are marked.
type sending struct {
	slots chan struct{}

	mu    sync.Mutex
	owned map[string]time.Time // until when
}

func newSending() *sending {
	return &sending{slots: make(chan struct{}, maxPublishing), owned: make(map[string]time.Time)}
}

// own takes the outputs that id names, for ownedFor. It fails where somebody here has them.
func (s *sending) own(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if until, taken := s.owned[id]; taken && now.Before(until) {
		return false
	}
	s.owned[id] = now.Add(ownedFor)
	return true
}

func (s *sending) disown(ids ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		delete(s.owned, id)
	}
}

// ownerOf names those whose outputs are owned together: a receipt, of which there is one effect. At least once, where a
// transaction may have several of one message, each output is on its own.
func (m *Middleware[T]) ownerOf(output receipts.Output) string {
	if m.cfg.Guarantee != AtLeastOnce {
		return ownerOfReceipt(output.Scope, output.Key)
	}
	return string(binary.BigEndian.AppendUint64(output.Nonce[:], uint64(output.Position))) //nolint:gosec // it is not negative
}

func ownerOfReceipt(scope string, key []byte) string {
	return string(appendPart(make([]byte, 0, len(scope)+len(key)+4), scope)) + string(key)
}

// ownAll owns what it can of outputs that were found unsent.
func (m *Middleware[T]) ownAll(outputs []receipts.Output) (mine []receipts.Output, ids []string) {
	tried := make(map[string]bool, len(outputs))
	for _, output := range outputs {
		id := m.ownerOf(output)
		owned, known := tried[id]
		if !known {
			owned = m.sending.own(id)
			tried[id] = owned
			if owned {
				ids = append(ids, id)
			}
		}
		if owned {
			mine = append(mine, output)
		}
	}
	return mine, ids
}

// send publishes outputs that are owned by ids, marks those that the publisher took, and gives the ownership up. It tells
// how many were sent, and how many were not, or not known to be when publishBound was over; those are the relay's. It holds
// neither lane nor transaction while it publishes.
func (m *Middleware[T]) send(outputs []receipts.Output, ids ...string) (sent, unsent int) {
	if len(outputs) == 0 {
		m.sending.disown(ids...)
		return 0, 0
	}
	timer := time.NewTimer(publishBound)
	defer timer.Stop()
	select {
	case m.sending.slots <- struct{}{}:
	case <-timer.C:
		m.sending.disown(ids...)
		m.counters.outputsFailed.Add(uint64(len(outputs)))
		m.log.Error("Too many publishes are under way; the outputs are left to the relay", context.DeadlineExceeded, nil)
		return 0, len(outputs)
	}
	answer := make(chan int, 1)
	go m.publishAndMark(outputs, ids, answer)
	select {
	case sent = <-answer:
		return sent, len(outputs) - sent
	case <-timer.C:
		m.log.Error("Outputs are still being published; the message does not wait for them any longer", context.DeadlineExceeded,
			watermill.LogFields{"topic": outputs[0].Topic, "outputs": len(outputs)})
		return 0, len(outputs)
	}
}

// publishAndMark makes one Publish for each topic, in the order in which topics first appear, then marks what was taken.
// It runs in a goroutine of its own, so that a publisher which blocks or ends its goroutine does not take the message's
// router goroutine with it.
func (m *Middleware[T]) publishAndMark(outputs []receipts.Output, ids []string, answer chan<- int) {
	var sent []receipts.OutputRef
	defer func() {
		m.sending.disown(ids...)
		<-m.sending.slots
		answer <- len(sent)
	}()
	for _, group := range byTopic(outputs) {
		if m.publishGroup(group) {
			for _, output := range group {
				sent = append(sent, output.OutputRef)
			}
		}
	}
	m.markSent(sent)
}

// publishGroup publishes outputs of one topic and counts them. A publisher that panics, or ends its goroutine, has failed.
func (m *Middleware[T]) publishGroup(group []receipts.Output) (ok bool) {
	messages := make([]*message.Message, len(group))
	for i, output := range group {
		messages[i] = messageOf(output)
	}
	err := errPublisherLeft
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("the publisher panicked: %v", value)
		}
		if ok = err == nil; ok {
			m.counters.outputsSent.Add(uint64(len(group)))
			return
		}
		m.counters.outputsFailed.Add(uint64(len(group)))
		m.log.Error("Cannot publish outputs; the relay will", err, watermill.LogFields{"topic": group[0].Topic, "outputs": len(group)})
	}()
	err = m.cfg.Outputs.Publish(group[0].Topic, messages...)
	return err == nil
}

// byTopic groups outputs by topic, in the order in which topics first appear. Inside a group the order stays.
func byTopic(outputs []receipts.Output) [][]receipts.Output {
	at := make(map[string]int, 1)
	var groups [][]receipts.Output
	for _, output := range outputs {
		i, known := at[output.Topic]
		if !known {
			i = len(groups)
			at[output.Topic] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], output)
	}
	return groups
}
