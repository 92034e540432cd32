package idempotency

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// orderedSubscription is one call of Subscribe. Its loop is the only goroutine that reads from the subscriber and offers
// copies to the router; each copy that is out has one that waits for its outcome (order_settle.go). What both know is
// guarded by mu, under which nobody is called who could wait for us.
type orderedSubscription struct {
	owner *orderedSubscriber
	order *ordering
	topic string
	ctx   context.Context // Subscribe's
	in    <-chan *message.Message
	out   chan *message.Message
	wake  chan struct{} // capacity 1: for the loop
	halt  chan struct{} // closed by end
	over  chan struct{} // closed when no outcome is waited for any more

	outcomes sync.WaitGroup
	lot      *parkingLot // nil with StandStill

	// Used by the loop alone.
	ending <-chan struct{}  // closed when the sdk.Subscriber's subscription ends; nil: unknown
	first  *message.Message // the first message, while the parking lot is not open

	mu       sync.Mutex
	lines    map[string]*line
	loose    []*place // without order key, to be given back
	offers   offers
	window   int
	waiting  int            // messages that are here and not out
	outside  int            // copies that are out, whose delivery is not lost
	shaky    map[*line]bool // failing lines
	held     int            // messages of failing lines
	lost     int            // messages that are waited for
	still    time.Time
	reached  uint64 // counts those that took their place in a queue
	inClosed bool   // the subscriber's channel is closed
	halting  bool   // somebody ended it
	stopping bool   // nothing more is handed out
}

// unknownWindow is what is taken for the window where nobody knows it.
const unknownWindow = 256

func newOrderedSubscription(ctx context.Context, o *orderedSubscriber, topic string, in <-chan *message.Message) *orderedSubscription {
	s := &orderedSubscription{
		owner: o, order: o.order, topic: topic, ctx: ctx, in: in,
		out: make(chan *message.Message), wake: make(chan struct{}, 1), halt: make(chan struct{}), over: make(chan struct{}),
		lines: map[string]*line{}, shaky: map[*line]bool{}, window: o.order.window,
	}
	if o.order.policy == ParkKeys {
		s.lot = &parkingLot{
			store: o.order.parker, budget: o.order.budget, wake: make(chan struct{}, 1),
			keys: map[string]*parkedKey{}, leaving: map[*line]bool{},
		}
	}
	if s.window == 0 {
		s.window = unknownWindow
	}
	return s
}

func signal(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// run lives as long as the subscription.
func (s *orderedSubscription) run() {
	defer close(s.out)
	defer context.AfterFunc(s.ctx, s.end)()
	if s.lot != nil {
		s.outcomes.Go(s.clerk)
	}
	for s.turn() {
	}
	s.drain()
}

// end lets the loop stop. It may be called any number of times.
func (s *orderedSubscription) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.halting {
		s.halting = true
		close(s.halt)
	}
}

// turn waits for the next thing to do, and does it. It returns false when the subscription ends.
func (s *orderedSubscription) turn() bool {
	st := s.look()
	switch {
	case st.ended:
		return false
	case st.offer != nil:
		s.handOut(st.offer)
	default:
		s.read(st.in)
	}
	return true
}

// handOut offers a message to the router. The first, short form is the usual one.
func (s *orderedSubscription) handOut(p *place) {
	copied := s.equip(p)
	select {
	case s.out <- copied:
		s.taken(p)
		return
	default:
	}
	select {
	case s.out <- copied:
		s.taken(p)
	case <-p.ctx.Done():
		s.lose(p)
	case <-s.wake:
	case <-s.halt:
	}
}

// read takes the next message of the subscriber; a nil channel means not now.
func (s *orderedSubscription) read(in <-chan *message.Message) {
	var msg *message.Message
	var open bool
	select {
	case msg, open = <-in:
	default:
		select {
		case msg, open = <-in:
		case <-s.wake:
			return
		case <-s.halt:
			return
		}
	}
	if open {
		s.arrive(msg)
	} else {
		s.inEnded()
	}
}

// stance is what the loop found to do.
type stance struct {
	ended bool
	offer *place
	in    <-chan *message.Message // nil: nothing more is read for now
}

func (s *orderedSubscription) look() stance {
	s.mu.Lock()
	if s.halting {
		s.stopNow()
	}
	s.choose()
	st := stance{offer: s.offers.first()}
	for st.offer != nil && st.offer.state != placeOffered { // lost meanwhile
		s.offers.pop()
		st.offer = s.offers.first()
	}
	st.ended = s.stopping || s.inClosed && s.waiting == 0
	stands := s.standsStill()
	if !s.inClosed && st.offer == nil && !stands && s.waiting < s.room() && s.first == nil {
		st.in = s.in
	}
	tell := s.noteStill(stands && (s.lot == nil || s.lot.trouble != nil))
	tellParked := s.noteParked()
	opened := s.first != nil && s.lot.open
	s.mu.Unlock()
	for _, f := range [...]func(){tell, tellParked} {
		if f != nil {
			f()
		}
	}
	if opened {
		msg := s.first
		s.first = nil
		s.arrive(msg)
		return s.look()
	}
	return st
}

// room is how many messages may wait here. While a lost one is waited for, it must find room to come, also behind others.
func (s *orderedSubscription) room() int {
	if s.lost > 0 {
		return 4 * s.window
	}
	return s.window
}

// waitsForLot tells whether a message has to wait until it is known what is parked: the first one tells whose it could be.
func (s *orderedSubscription) waitsForLot(msg *message.Message) bool {
	if s.lot == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lot.template == nil {
		s.lot.meet(s.order.consumer, s.order.handlerOf(msg), s.topic, msg)
	}
	return !s.lot.open && !s.stopping
}

// arrive takes a message that the subscriber handed out.
func (s *orderedSubscription) arrive(msg *message.Message) {
	waits := s.waitsForLot(msg)
	if sdk.IsGreeting(msg) {
		info, _ := sdk.DeliveryFrom(msg.Context())
		s.learn(info)
		msg.Ack()
		return
	}
	if waits {
		s.first = msg
		return
	}
	p := &place{inner: msg, ctx: msg.Context()}
	p.info, _ = sdk.DeliveryFrom(p.ctx)
	key, err := s.order.key(msg)
	s.learn(p.info)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting++
	if key == "" {
		p.ticket = &ticket{Context: p.ctx, order: s.order, fault: err}
		if s.stopping {
			s.loose = append(s.loose, p)
			s.flushLoose()
		} else {
			s.offer(p)
		}
		return
	}
	l := s.line(key)
	if old := l.twin(msg.UUID); old != nil {
		l.replace(old, p)
	} else {
		l.push(p)
	}
	if p.ctx.Err() != nil {
		s.loseNow(p)
		return
	}
	l.advance()
	if p.state == placeWaiting {
		s.keep(p)
	}
}

func (s *orderedSubscription) line(key string) *line {
	l := s.lines[key]
	if l == nil {
		l = &line{sub: s, key: key}
		if s.lot != nil {
			l.parked = s.lot.keys[key]
		}
		s.lines[key] = l
	}
	return l
}

// learn takes from the first delivery what it tells about the subscription.
func (s *orderedSubscription) learn(info *sdk.DeliveryInfo) {
	if info == nil || s.ending != nil {
		return
	}
	if s.ending = info.Ending(); s.ending != nil {
		s.outcomes.Go(func() {
			select {
			case <-s.ending:
				s.end()
			case <-s.over:
			}
		})
	}
	if n := info.Limits.MaxInFlight; n > 0 {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.order.window == 0 || n < s.window {
			s.window = n
		}
	}
}

// changed wakes the loop where it may have something to do. The loop itself need not call it. It is called under the mutex.
func (s *orderedSubscription) changed() {
	if len(s.offers.queue) > 0 || s.inClosed || s.stopping || s.waiting >= s.window {
		signal(s.wake)
	}
}

// offer lets the loop hand out a message. It is called under the mutex.
func (s *orderedSubscription) offer(p *place) {
	s.unkeep(p)
	p.state = placeOffered
	if p.line != nil {
		p.line.offered = true
	}
	s.offers.push(p)
}

// keep lets a message wait: the engine does not count the time, and its loss is looked for. It is called under the mutex.
func (s *orderedSubscription) keep(p *place) {
	s.hold(p)
	p.unwatch = context.AfterFunc(p.ctx, func() { s.lose(p) })
}

func (s *orderedSubscription) hold(p *place) {
	if p.info != nil && !p.holding {
		p.holding = true
		p.info.Hold()
	}
}

func (s *orderedSubscription) unwatch(p *place) {
	if p.unwatch != nil {
		p.unwatch()
		p.unwatch = nil
	}
}

// unkeep ends that.
func (s *orderedSubscription) unkeep(p *place) {
	s.unwatch(p)
	if p.holding {
		p.holding = false
		p.info.Resume()
	}
}

// equip makes the copy that is offered, once for each hand-out, and its ticket. The router may be faster than the loop: from
// here on the ticket counts. A message without order key is handed on as it is.
func (s *orderedSubscription) equip(p *place) *message.Message {
	if p.line == nil {
		p.inner.SetContext(p.ticket)
		return p.inner
	}
	if p.ticket != nil {
		return p.ticket.msg
	}
	base := p.ctx
	if p.info != nil {
		base = sdk.WithDelivery(base, p.info.Copy(p.handed))
	}
	t := &ticket{order: s.order, place: p, msg: p.copied()}
	t.Context, t.cancel = context.WithCancelCause(base)
	t.msg.SetContext(t)
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.state == placeOffered { // else it was lost meanwhile, and its copy must not run
		p.ticket = t
	}
	return t.msg
}

func (p *place) copied() *message.Message {
	if p.row == nil {
		return p.inner.Copy()
	}
	msg := message.NewMessage(p.row.UUID, p.row.Payload)
	maps.Copy(msg.Metadata, p.row.Metadata)
	return msg
}

// offers are the messages whose turn has come, in order.
type offers struct {
	queue []*place
}

func (t *offers) push(p *place) { t.queue = append(t.queue, p) }

func (t *offers) first() *place {
	if len(t.queue) == 0 {
		return nil
	}
	return t.queue[0]
}

func (t *offers) pop() *place {
	if len(t.queue) == 0 {
		return nil
	}
	p := t.queue[0]
	t.queue[0] = nil
	if t.queue = t.queue[1:]; len(t.queue) == 0 {
		t.queue = nil
	}
	return p
}
