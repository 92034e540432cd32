package idempotency

import (
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// taken notes that the router has what was offered.
func (s *orderedSubscription) taken(p *place) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offers.pop()
	if p.line == nil {
		s.waiting--
		p.state = placeGone // whoever handles it settles it
		return
	}
	s.outcomes.Add(1)
	go s.await(p, p.ticket)
	if p.state != placeOffered { // lost in the very moment it was taken
		return
	}
	s.waits(p, -1)
	s.outside++
	p.handed++
	p.state = placeOut
	l := p.line
	l.offered = false
	if l.next == p {
		l.next = p.next
	}
	l.advance()
}

// settle tells the broker; a parked message it knows nothing of.
func (p *place) settle(ack bool) {
	switch {
	case p.inner == nil:
	case ack:
		p.inner.Ack()
	default:
		p.inner.Nack()
	}
}

// waits counts a message that begins, or ends, to wait here. Parked ones are counted by the parking lot.
func (s *orderedSubscription) waits(p *place, n int) {
	if p.row == nil {
		s.waiting += n
	}
}

// await passes on the outcome of one copy.
func (s *orderedSubscription) await(p *place, t *ticket) {
	defer s.outcomes.Done()
	select {
	case <-t.msg.Acked():
		s.acked(p, t)
		return
	case <-t.msg.Nacked():
		s.nacked(p, t)
		return
	case <-p.ctx.Done():
		s.lose(p)
	case <-s.over:
		return
	}
	select {
	case <-t.msg.Acked():
		s.acked(p, t)
	case <-t.msg.Nacked():
		s.nacked(p, t)
	case <-s.over:
	}
}

// acked passes an acknowledgement on. It also is the end of a message that was lost: it was handled, after all.
func (s *orderedSubscription) acked(p *place, t *ticket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.settle(true)
	t.cancel(nil)
	if p.ticket != t || p.state == placeGone {
		return
	}
	if p.state == placeOut {
		s.outside--
	}
	l := p.line
	l.remove(p)
	if p.row != nil {
		s.handled(l, p.row)
	}
	l.advance()
	s.changed()
}

// nacked holds a message that came back.
func (s *orderedSubscription) nacked(p *place, t *ticket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t.cancel(nil)
	if p.ticket != t || p.state != placeOut { // it was lost: the broker has it
		p.settle(false)
		return
	}
	p.stumble(t)
	p.ticket = nil
	p.state = placeWaiting
	s.outside--
	s.waits(p, 1)
	if !t.innocent {
		p.failures++
		p.due = time.Now().Add(s.delay(p, t))
	}
	s.keep(p)
	if p.line.rows > 0 && !s.stopping {
		s.unload(p.line)
	}
	p.line.advance()
	s.changed()
}

// delay is how long a message that failed is held. It is never nothing.
func (s *orderedSubscription) delay(p *place, t *ticket) time.Duration {
	asked := t.asked
	if info, ok := sdk.DeliveryFrom(t); ok && asked == 0 {
		asked, _ = info.RequeueDelay()
	}
	if asked == 0 {
		return s.order.backoff.Delay(p.failures)
	}
	return max(asked, s.order.backoff.Ceiling(0))
}

// lostFor is how long a lost delivery is waited for at least: a lost connection has to be noticed and made anew, with the
// driver's backoff, before it can come again, and what is behind it may be back before.
const lostFor = 30 * time.Second

// lose notes that the delivery of a message is lost.
func (s *orderedSubscription) lose(p *place) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loseNow(p)
}

// loseNow is lose, under the mutex.
func (s *orderedSubscription) loseNow(p *place) {
	l := p.line
	switch p.state {
	case placeLost, placeGone, placeParking:
		return
	case placeOut:
		s.outside--
	default:
		s.waits(p, -1)
		s.unkeep(p)
		p.settle(false) // nobody asks any more: the engine forgets it
	}
	if l == nil {
		p.state = placeGone
		return
	}
	if p.state == placeOffered {
		l.offered = false
	}
	p.state = placeLost
	l.lost++
	s.lost++
	p.fail()
	p.due = time.Now().Add(max(s.order.backoff.Ceiling(64), lostFor))
	l.advance()
	signal(s.wake)
}

// stopNow ends hand-out: what was offered and not taken waits again, what waits is given back. It is called under the mutex.
func (s *orderedSubscription) stopNow() {
	s.stopping = true
	if s.lot != nil {
		s.lot.stop()
	}
	for p := s.offers.pop(); p != nil; p = s.offers.pop() {
		if p.state != placeOffered {
			continue
		}
		p.state = placeWaiting
		if p.line == nil {
			s.loose = append(s.loose, p)
			continue
		}
		p.line.offered = false
		if p.ticket != nil {
			p.ticket.cancel(nil)
			p.ticket = nil
		}
		s.keep(p)
	}
	s.flush()
}

// flush gives back what may be given back.
func (s *orderedSubscription) flush() {
	for _, l := range s.lines {
		l.stopTimer()
		l.flush()
	}
	s.flushLoose()
}

func (s *orderedSubscription) flushLoose() {
	s.loose = slices.DeleteFunc(s.loose, func(p *place) bool {
		if !s.mayNack(p) {
			return false
		}
		s.giveBack(p)
		return true
	})
}

// mayNack tells whether what is held may be nacked: once the engine takes it back at once, instead of handing it out again.
// A foreign subscriber could hand it out again and again; it is left alone until its channel is closed.
func (s *orderedSubscription) mayNack(p *place) bool {
	if s.inClosed || p.row != nil {
		return true
	}
	if p.info == nil {
		return false
	}
	select {
	case <-p.info.Ending():
		return true
	default:
		return false
	}
}

// giveBack nacks what is not out. It stays held for the engine, which takes back at once, without backoff, what was with no
// handler.
func (s *orderedSubscription) giveBack(p *place) {
	s.unwatch(p)
	if p.state != placeLost {
		s.waits(p, -1)
		s.hold(p)
		p.settle(false)
	}
	if p.line == nil {
		p.state = placeGone
		return
	}
	p.line.remove(p)
}

// inEnded notes that the subscriber's channel is closed, although nobody asked for it: what waits for nothing but its turn
// is still handed out, what failed is given back.
func (s *orderedSubscription) inEnded() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inClosed = true
	for _, l := range s.lines {
		if l.shaken {
			l.flush()
		}
	}
}

// drain ends the subscription: the inner channel is read until it closes, and what is out is waited for.
func (s *orderedSubscription) drain() {
	s.mu.Lock()
	s.stopNow()
	in := s.in
	if s.inClosed {
		in = nil
	}
	s.mu.Unlock()
	if s.first != nil {
		s.refuse(s.first)
	}
	ending := s.ending
	for in != nil {
		select {
		case msg, ok := <-in:
			if !ok {
				in = nil
				break
			}
			s.refuse(msg)
			ending = s.ending
		case <-ending:
			ending = nil
			s.mu.Lock()
			s.flush()
			s.mu.Unlock()
		}
	}
	s.mu.Lock()
	s.inClosed = true
	s.flush()
	s.mu.Unlock()
	s.awaitOutcomes()
}

// refuse takes a message that comes while the subscription ends. One of an sdk.Subscriber goes back in its turn; a foreign
// one is left alone, because a subscriber that hands out again at once would spin.
func (s *orderedSubscription) refuse(msg *message.Message) {
	if _, ours := sdk.DeliveryFrom(msg.Context()); ours {
		s.arrive(msg)
	}
}

// awaitOutcomes waits for what is out, at most as long as an sdk.Subscriber does. A delivery that is lost is not waited for:
// its outcome reaches nobody.
func (s *orderedSubscription) awaitOutcomes() {
	timer := time.NewTimer(sdk.DefaultDrainTimeout)
	defer timer.Stop()
	for waits := true; waits && s.isOutside(); {
		select {
		case <-s.wake:
		case <-timer.C:
			waits = false
		}
	}
	close(s.over)
	s.outcomes.Wait()
	s.abandonParked()
}

// abandonParked ends the contexts of parked messages whose handlers are still not done: no broker will.
func (s *orderedSubscription) abandonParked() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.lines {
		for p := l.first; p != nil; p = p.next {
			if p.row != nil && p.ticket != nil {
				p.ticket.cancel(sdk.ErrDrainTimeout)
			}
		}
	}
}

func (s *orderedSubscription) isOutside() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.outside > 0
}
