package idempotency

import (
	"context"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// placeState is where a message stands. Every change is made under the subscription's mutex.
type placeState uint8

const (
	// placeWaiting: read from the subscriber, not handed out, or back after a failure.
	placeWaiting placeState = iota
	// placeOffered: its turn has come; the loop offers it to the router.
	placeOffered
	// placeOut: the router has a copy.
	placeOut
	// placeLost: its delivery is lost. The broker hands the message out again, and until then those behind it wait here.
	placeLost
	// placeParking: it is being stored in the database.
	placeParking
	// placeGone: settled, or given up.
	placeGone
)

// place is one message in the line of its order key.
type place struct {
	line       *line // nil: no order key
	prev, next *place

	inner *message.Message // nil: it is a parked one
	row   *receipts.Parked // nil: the broker holds it
	ctx   context.Context  // inner's, as it arrived
	info  *sdk.DeliveryInfo

	state  placeState
	ticket *ticket // of the present, or last, hand-out
	handed int     // how often it was handed out

	failing  bool // it failed, or was lost, and has not passed since
	failures int  // its own, in a row
	due      time.Time

	unwatch func() bool // stops looking for its loss; nil while nobody looks
	holding bool        // the engine was told to hold it
}

// inPlace tells whether a message is where later ones of its key may follow it.
func (p *place) inPlace() bool {
	return p.state == placeOut && p.ticket.reachedQueue > 0 && !p.ticket.returned
}

// missesEarlier tells whether an earlier message of the line is not in its place.
func (p *place) missesEarlier() bool {
	if p.line.given {
		return true
	}
	if !p.line.shaken {
		return false
	}
	since := p.ticket.reachedQueue
	if p.ticket.returned {
		since = 0
	}
	for e := p.prev; e != nil; e = e.prev {
		if !e.inPlace() || since > 0 && !e.ticket.durable && e.ticket.reachedQueue > since {
			return true
		}
	}
	return false
}

// stumble notes that a hand-out goes back. A message that only follows an earlier one has not failed itself.
func (p *place) stumble(t *ticket) {
	if t.returned {
		return
	}
	t.innocent = t.innocent || p.missesEarlier()
	t.returned = true
	p.line.shaken = true
	if !t.innocent {
		p.fail()
	}
}

// fail makes the line a failing one: all of it counts as held.
func (p *place) fail() {
	if p.failing {
		return
	}
	p.failing = true
	l := p.line
	l.shaken = true
	if l.failing++; l.failing == 1 {
		l.sub.shaky[l] = true
		l.sub.held += l.count - l.rows
		signal(l.sub.wake)
	}
}

// recover ends that.
func (p *place) recover() {
	if !p.failing {
		return
	}
	p.failing = false
	l := p.line
	if l.failing--; l.failing == 0 {
		delete(l.sub.shaky, l)
		l.sub.held -= l.count - l.rows
		l.chosen = false
		signal(l.sub.wake)
	}
}

// gone ends what a message is in its line. The copy of one that was lost must not run any more.
func (p *place) gone() {
	switch p.state {
	case placeLost:
		p.line.lost--
		p.line.sub.lost--
		p.ticket = nil
	case placeOffered:
		p.line.offered = false
	}
	p.state = placeGone
}

// line is the messages of one order key, in the order in which the subscriber handed them out. It lives as long as it has
// messages.
type line struct {
	sub         *orderedSubscription
	key         string
	first, last *place
	count       int
	rows        int // of them, out of the database
	lost        int
	failing     int // of its messages

	// As long as the line is not shaken, all before next are out, and all but the last of them in their place; next is the
	// first that is not out.
	shaken  bool
	next    *place
	offered bool // one of it is being offered
	chosen  bool // it is to be parked
	given   bool // its first ones were given back: those that are out are behind them

	parked *parkedKey // what is in the database; nil: nothing
	timer  *time.Timer
}

func (l *line) push(p *place) {
	p.line, p.prev = l, l.last
	if l.last == nil {
		l.first = p
	} else {
		l.last.next = p
	}
	l.last = p
	if l.next == nil {
		l.next = p
	}
	l.counted(p, 1)
}

// insert adds a parked message behind the others that are parked, before those that are not.
func (l *line) insert(p *place) {
	var before *place
	for e := l.first; e != nil && e.row != nil; e = e.next {
		before = e
	}
	p.line, p.prev, p.next = l, before, l.first
	if before == nil {
		l.first = p
	} else {
		p.next, before.next = before.next, p
	}
	if p.next == nil {
		l.last = p
	} else {
		p.next.prev = p
	}
	l.shaken = true
	l.counted(p, 1)
}

// replace puts p where old was, which is lost and has come again.
func (l *line) replace(old, p *place) {
	p.line, p.prev, p.next = l, old.prev, old.next
	if old.prev == nil {
		l.first = p
	} else {
		old.prev.next = p
	}
	if old.next == nil {
		l.last = p
	} else {
		old.next.prev = p
	}
	p.failures = old.failures
	if p.failures > 0 {
		p.fail()
	}
	if l.next == old {
		l.next = p
	}
	old.recover()
	old.gone()
}

// remove takes a message out of the line.
func (l *line) remove(p *place) {
	p.recover()
	p.gone()
	if p.prev == nil {
		l.first = p.next
	} else {
		p.prev.next = p.next
	}
	if p.next == nil {
		l.last = p.prev
	} else {
		p.next.prev = p.prev
	}
	if l.next == p {
		l.next = p.next
	}
	if l.counted(p, -1); l.count == 0 {
		l.stopTimer()
		if l.sub.lines[l.key] == l {
			delete(l.sub.lines, l.key)
		}
	}
}

// counted counts a message that came or went.
func (l *line) counted(p *place, n int) {
	l.count += n
	switch {
	case p.row != nil:
		l.rows += n
	case l.failing > 0:
		l.sub.held += n
	}
}

// advance offers the next message of the line, if its turn has come. It is called under the mutex, after every change.
func (l *line) advance() {
	switch {
	case l.sub.stopping, l.sub.inClosed && l.shaken:
		l.flush()
	case l.leaves():
		if l.count > l.rows {
			l.sub.lot.leaving[l] = true
			signal(l.sub.lot.wake)
		}
		l.shaken = true
		l.search()
	case l.offered:
	case l.shaken:
		l.search()
	case l.next != nil && (l.next.prev == nil || l.next.prev.inPlace()):
		l.sub.offer(l.next)
	}
}

// search is advance where something went wrong: it looks at every message from the first one on. What failed goes alone, and
// the others follow when it has passed: they would only come back with it.
func (l *line) search() {
	steady, last := true, uint64(0)
	for p := l.first; p != nil; {
		next := p.next
		switch p.state {
		case placeOut:
			if p.failing || !p.inPlace() {
				return
			}
			steady = steady && p.ticket.reachedQueue > last
			last = max(last, p.ticket.reachedQueue)
		case placeWaiting:
			if p.row == nil && l.leaves() || l.wait(p) {
				return
			}
			l.next, l.shaken = p, !steady || l.failing > 0 || l.outAfter(p)
			l.sub.offer(p)
			return
		case placeLost:
			if l.awaits(p) {
				return
			}
			l.remove(p)
		default:
			return
		}
		p = next
	}
	l.next, l.shaken = nil, !steady
}

// outAfter tells whether a message behind p is still out.
func (l *line) outAfter(p *place) bool {
	for p = p.next; p != nil; p = p.next {
		if p.state == placeOut {
			return true
		}
	}
	return false
}

// wait sets the timer of the line where a message is not due yet.
func (l *line) wait(p *place) bool {
	left := time.Until(p.due)
	if left <= 0 {
		return false
	}
	l.stopTimer()
	l.timer = time.AfterFunc(left, func() {
		l.sub.mu.Lock()
		defer l.sub.mu.Unlock()
		l.advance()
		l.sub.changed()
	})
	return true
}

func (l *line) stopTimer() {
	if l.timer != nil {
		l.timer.Stop()
	}
}

// awaits tells whether a lost message is still waited for: until it is due, and while there is something behind it that it
// should not be overtaken by. One that was abandoned is waited for in any case, because the source it came from lives, so
// that what follows it may arrive first. So is one of a parked key: what follows it would be parked before it, for good.
func (l *line) awaits(p *place) bool {
	if l.count == l.lost && l.parked == nil && !errors.Is(context.Cause(p.ctx), sdk.ErrAbandoned) {
		return false
	}
	return l.wait(p)
}

// twin finds a lost message that has come again.
func (l *line) twin(uuid string) *place {
	if l.lost == 0 || uuid == "" {
		return nil
	}
	for p := l.first; p != nil; p = p.next {
		if p.state == placeLost && p.inner.UUID == uuid {
			return p
		}
	}
	return nil
}

// flush gives back what is not handed out, in order: nothing is given back before those in front of it are settled. What is
// still out is behind that, and must not run any more.
func (l *line) flush() {
	for p := l.first; p != nil; {
		next := p.next
		if p.state == placeOut || p.state == placeParking || p.state != placeLost && !l.sub.mayNack(p) {
			return
		}
		l.given = true
		l.sub.giveBack(p)
		p = next
	}
}
