package idempotency

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// readAhead is the most parked messages of one order key that are read at a time.
const readAhead = 16

// parkingLot is what a subscription knows about its order keys that are parked: their messages are acknowledged at the broker,
// and handled out of the database. It is nil where the policy is StandStill. All but store and budget is guarded by the
// subscription's mutex; the clerk (order_clerk.go) is the only one who asks the database.
type parkingLot struct {
	store  receipts.Parker
	budget time.Duration
	wake   chan struct{} // capacity 1: for the clerk

	scope          string
	handler, topic string
	template       context.Context // carries what the router puts into the contexts of messages; nil: not known yet
	info           *sdk.DeliveryInfo
	open           bool // the keys that were parked before are known

	keys     map[string]*parkedKey
	messages int            // in the database, of all keys
	loaded   int            // of these, in memory
	leaving  map[*line]bool // lines with messages to be parked
	wanting  []*parkedKey   // whose messages are to be read
	done     []int64        // positions to be deleted
	trouble  error          // of the last time the database was asked; nil: none
	told     bool           // the log knows that something is parked
}

// parkedKey is an order key with messages in the database.
type parkedKey struct {
	key      string
	messages int   // in the database
	after    int64 // up to this position they are in memory, or done
	loaded   int   // in memory
	atEnd    bool  // nothing is behind those that are in memory
	failures int   // of the first one, in a row
	due      time.Time
	wanting  bool
	timer    *time.Timer
}

// meet takes from a greeting, or from the first message, what the router tells about the handler. It is called under the
// mutex.
func (l *parkingLot) meet(consumer, handler, topic string, msg *message.Message) {
	l.template = context.WithoutCancel(msg.Context())
	l.handler, l.topic = handler, topic
	if info, ok := sdk.DeliveryFrom(l.template); ok {
		l.info = &sdk.DeliveryInfo{Topic: info.Topic, Group: info.Group, Limits: info.Limits}
		l.info.Limits.Lease = 0 // nobody lends what is ours
	}
	scope := appendPart(appendPart(appendPart(nil, consumer), handler), topic)
	if len(scope) > receipts.MaxScope {
		scope = digestOf(scope)
	}
	l.scope = string(scope)
	signal(l.wake)
}

// digestOf stands for a name that is too long for the tables.
func digestOf(name []byte) []byte {
	sum := sha256.Sum256(name)
	return append([]byte("sha256:"), hex.EncodeToString(sum[:])...)
}

// place makes the place of a parked message. It is called under the mutex.
func (l *parkingLot) place(row *receipts.Parked, k *parkedKey) *place {
	p := &place{row: row, ctx: l.template}
	if l.info != nil {
		p.info = l.info.Copy(1 + k.failures)
	}
	return p
}

// leaves tells whether messages of the line that the broker still holds are to be parked: those behind what is parked already,
// and all of a line that was chosen.
func (l *line) leaves() bool {
	return l.chosen || l.parked != nil && !l.parked.atEnd
}

// choose finds lines to park when too much is held: the longest ones that fail. It is called under the mutex.
func (s *orderedSubscription) choose() {
	for s.lot != nil && s.held > s.window/2 && !s.ends() {
		leaving := 0
		var longest *line
		for l := range s.shaky {
			switch {
			case l.leaves():
				leaving += l.count - l.rows
			case l.lost == 0 && (longest == nil || l.count-l.rows > longest.count-longest.rows):
				longest = l
			}
		}
		if longest == nil || s.held-leaving <= s.window/2 {
			return
		}
		longest.chosen = true
		longest.advance()
	}
}

// ends tells whether nothing more is parked or read. It is called under the mutex.
func (s *orderedSubscription) ends() bool { return s.stopping || s.inClosed }

// want has the next messages of a key read, once its first one is due. It is called under the mutex.
func (s *orderedSubscription) want(k *parkedKey) {
	if k.wanting || s.ends() {
		return
	}
	k.wanting = true
	if left := time.Until(k.due); left > 0 {
		k.timer = time.AfterFunc(left, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.enqueue(k)
		})
		return
	}
	s.enqueue(k)
}

func (s *orderedSubscription) enqueue(k *parkedKey) {
	s.lot.wanting = append(s.lot.wanting, k)
	signal(s.lot.wake)
}

// handled notes that a parked message was handled: its row can go. It is called under the mutex.
func (s *orderedSubscription) handled(l *line, row *receipts.Parked) {
	k := l.parked
	s.lot.done = append(s.lot.done, row.Position)
	s.lot.messages--
	s.lot.loaded--
	k.messages--
	k.loaded--
	k.failures = 0
	signal(s.lot.wake)
	switch {
	case k.atEnd && k.loaded == 0:
		s.unparked(k)
	case !k.atEnd && k.loaded <= readAhead/2:
		s.want(k)
	}
}

// unparked notes that nothing of a key is in the database any more.
func (s *orderedSubscription) unparked(k *parkedKey) {
	s.lot.messages -= k.messages // of what was parked twice, there is one row
	delete(s.lot.keys, k.key)
	if l := s.lines[k.key]; l != nil {
		l.parked = nil
		l.advance()
	}
}

// unload forgets the parked messages of a line whose first one failed, once nothing of it is out: what waits for its backoff
// must not take the place of others. It is called under the mutex.
func (s *orderedSubscription) unload(l *line) {
	failed := false
	for p := l.first; p != nil; p = p.next {
		if p.state == placeOut || p.state == placeOffered {
			return
		}
		failed = failed || p.failing && p.row != nil
	}
	if !failed {
		return
	}
	k, first := l.parked, l.first
	k.after, k.atEnd = first.row.Position-1, false
	k.failures, k.due = first.failures, first.due
	for p := first; p != nil && p.row != nil; {
		next := p.next
		l.remove(p)
		k.loaded--
		s.lot.loaded--
		p = next
	}
	if i := slices.Index(s.lot.wanting, k); i >= 0 { // more of it was wanted; now it is the first one, when it is due
		s.lot.wanting = slices.Delete(s.lot.wanting, i, i+1)
		k.wanting = false
	}
	s.want(k)
	signal(s.lot.wake) // there is room for others
}

// stop ends the timers.
func (l *parkingLot) stop() {
	for _, k := range l.keys {
		if k.timer != nil {
			k.timer.Stop()
		}
	}
}
