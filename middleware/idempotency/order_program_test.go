package idempotency

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/sdk"
)

// program is a random run over an ordered subscription. It plays the subscriber, the router with whatever stands outside,
// and the inside of the middleware, one step at a time, and remembers what should come of it.
type program struct {
	*orderEnv
	rt *rapid.T

	n       int
	sent    []string           // UUIDs, in the order in which they were first handed out
	outside []*message.Message // taken, on their way to the middleware
	queue   []*message.Message // inside, in the order in which they got there
	retried []*message.Message // failed, and an outer Retry has them
	passed  []*message.Message // durable, not acknowledged yet
	done    []string           // handled with success, first times only
	dropped map[string]bool    // acknowledged without being handled
	acked   map[string]bool    // in earlier lives
	db      *parkingStore
}

// Random programs: per key, success comes in the order of the subscriber; nothing is lost; nothing is held for ever.
func TestRandomProgramsOfOrder(t *testing.T) { randomPrograms(t, StandStill) }

// The same with a database that keys are parked in, and with restarts.
func TestRandomProgramsOfParking(t *testing.T) { randomPrograms(t, ParkKeys) }

func randomPrograms(t *testing.T, policy OrderPolicy) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(struct{ rapid.TB }{t}, func(rt *rapid.T) { // the wrapper hides t.Deadline, which must not be called in a bubble
			p := newProgram(t, rt, policy)
			defer p.close()
			for range rapid.IntRange(1, 120).Draw(rt, "steps") {
				p.step()
				p.check()
			}
			p.finish()
		})
	})
}

func newProgram(t *testing.T, rt *rapid.T, policy OrderPolicy) *program {
	cfg := Config{Consumer: "billing", OrderPolicy: policy}
	orderByKey(&cfg)
	cfg.Limits.MaxInFlight = rapid.SampledFrom([]int{2, 5, 12, 100}).Draw(rt, "window")
	cfg.RetryBackoff = sdk.Backoff{Min: time.Second, Max: 8 * time.Second}
	store := &parkingStore{fakeStore: newFakeStore(), say: rt.Logf}
	if rapid.Bool().Draw(rt, "slow") {
		store.slow = 300 * time.Millisecond
	}
	m, err := New(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	p := &program{
		orderEnv: &orderEnv{env: &env{T: t, store: store.fakeStore, m: m}}, rt: rt,
		dropped: map[string]bool{}, acked: map[string]bool{}, db: store,
	}
	p.begin()
	return p
}

// begin begins a subscription.
func (p *program) begin() {
	p.feed, p.fed = newFeed(), map[string]fed{}
	var err error
	if p.sub, err = p.m.Ordered(p.feed); err != nil {
		p.rt.Fatal(err)
	}
	if p.out, err = p.sub.Subscribe(context.Background(), "orders"); err != nil {
		p.rt.Fatal(err)
	}
}

func (p *program) close() {
	for _, m := range p.fed {
		m.lose(sdk.ErrDrainTimeout)
	}
	if err := p.sub.Close(); err != nil {
		p.rt.Error(err)
	}
}

// restart ends the subscription and begins another one, which gets all that was not acknowledged.
func (p *program) restart() {
	p.rt.Logf("restart with %v parked", p.db.parked())
	p.close()
	synctest.Wait()
	var left []string
	for _, uuid := range p.sent {
		if !p.acked[uuid] && !isSettled(p.fed, uuid, true) {
			left = append(left, uuid)
		} else {
			p.acked[uuid] = true
		}
	}
	p.outside, p.queue, p.retried, p.passed = nil, nil, nil, nil
	p.rt.Logf("after the end %v are parked; left are %v", p.db.parked(), left)
	p.begin()
	p.put(left...)
}

// isSettled tells whether a message was acknowledged, or else nacked.
func isSettled(all map[string]fed, uuid string, ack bool) bool {
	m, ok := all[uuid]
	if !ok {
		return false
	}
	settled := m.Nacked()
	if ack {
		settled = m.Acked()
	}
	select {
	case <-settled:
		return true
	default:
		return false
	}
}

// ticketOf is that of a message, nil without a key.
func (p *program) ticketOf(msg *message.Message) *ticket {
	tk, err := p.m.ticketFor(msg)
	if err != nil || (tk == nil) != (orderKeyOf(msg.UUID) == "") {
		p.rt.Fatalf("ticket of %s: %v, %v", msg.UUID, tk, err)
	}
	return tk
}

// pick takes a random message out of a list.
func (p *program) pick(from *[]*message.Message, what string) *message.Message {
	if len(*from) == 0 {
		return nil
	}
	i := rapid.IntRange(0, len(*from)-1).Draw(p.rt, what)
	msg := (*from)[i]
	*from = slices.Delete(*from, i, i+1)
	return msg
}

func (p *program) step() {
	switch action := rapid.IntRange(0, 15).Draw(p.rt, "action"); action {
	case 0, 1, 2:
		for range rapid.IntRange(1, 4).Draw(p.rt, "messages") {
			p.send(rapid.SampledFrom([]string{"a", "a", "a", "b", "c", "-"}).Draw(p.rt, "key"))
		}
	case 3, 4, 5:
		p.outside = append(p.outside, p.take()...)
	case 6, 7, 8:
		p.enter(p.pick(&p.outside, "arrives"))
	case 9, 10, 11:
		p.run(rapid.IntRange(0, 3).Draw(p.rt, "outcome"))
	case 12:
		p.enter(p.pick(&p.retried, "is retried"))
	case 13:
		p.settle(p.pick(&p.passed, "is settled"), rapid.IntRange(0, 3).Draw(p.rt, "publishing") > 0)
	case 14:
		p.aside(p.pick(&p.outside, "is settled outside"), rapid.Bool().Draw(p.rt, "filtered"))
	case 15:
		switch rapid.IntRange(0, 5).Draw(p.rt, "trouble") {
		case 0, 1:
			p.lose()
		case 2:
			p.restart()
		default:
			time.Sleep(time.Duration(rapid.IntRange(1, 3000).Draw(p.rt, "milliseconds")) * time.Millisecond)
		}
	}
	synctest.Wait()
}

func (p *program) send(key string) {
	p.n++
	uuid := fmt.Sprintf("%s%03d", key, p.n)
	p.sent = append(p.sent, uuid)
	p.rt.Logf("hand out %s", uuid)
	p.put(uuid)
}

// enter takes a message into the middleware.
func (p *program) enter(msg *message.Message) {
	if msg == nil {
		return
	}
	tk := p.ticketOf(msg)
	if tk.behind() || msg.Context().Err() != nil {
		p.rt.Logf("%s goes back at the door", msg.UUID)
		tk.stumbled()
		msg.Nack()
		return
	}
	p.rt.Logf("%s enters", msg.UUID)
	p.queue = append(p.queue, msg)
	tk.reached()
}

// run handles the first message of some key.
func (p *program) run(outcome int) {
	if len(p.queue) == 0 {
		return
	}
	key := orderKeyOf(p.queue[rapid.IntRange(0, len(p.queue)-1).Draw(p.rt, "of the key of")].UUID)
	i := slices.IndexFunc(p.queue, func(msg *message.Message) bool { return orderKeyOf(msg.UUID) == key })
	msg := p.queue[i]
	p.queue = slices.Delete(p.queue, i, i+1)
	tk := p.ticketOf(msg)
	p.rt.Logf("%s runs: behind %v, lost %v, outcome %d", msg.UUID, tk.behind(), msg.Context().Err() != nil, outcome)
	switch {
	case tk.behind(), msg.Context().Err() != nil, outcome == 1: // it fails
		tk.stumbled()
		msg.Nack()
	case outcome == 2: // it fails, and is tried again in place
		tk.stumbled()
		p.retried = append(p.retried, msg)
	default:
		if !slices.Contains(p.done, msg.UUID) {
			p.done = append(p.done, msg.UUID)
		}
		tk.passed()
		p.passed = append(p.passed, msg)
	}
}

// settle ends a message that was handled: published, or not.
func (p *program) settle(msg *message.Message, published bool) {
	switch {
	case msg == nil:
	case published:
		p.rt.Logf("%s is acknowledged", msg.UUID)
		msg.Ack()
	default:
		msg.Nack()
	}
}

// aside settles a message that never came to the middleware. Nothing is filtered of what was handled before.
func (p *program) aside(msg *message.Message, filtered bool) {
	switch {
	case msg == nil:
	case filtered && !slices.Contains(p.done, msg.UUID) && msg.Context().Err() == nil:
		p.rt.Logf("%s is filtered", msg.UUID)
		p.dropped[msg.UUID] = true
		msg.Ack()
	default:
		msg.Nack()
	}
}

// lose takes deliveries away, one or all, and the broker brings them again in order. What it has not handed out yet follows
// them, so nothing may be on its way.
func (p *program) lose() {
	if p.feed.unread() > 0 {
		return
	}
	var unsettled []string
	for _, uuid := range p.sent {
		if !p.acked[uuid] && !isSettled(p.fed, uuid, true) && !isSettled(p.fed, uuid, false) {
			unsettled = append(unsettled, uuid)
		}
	}
	if len(unsettled) == 0 {
		return
	}
	if rapid.Bool().Draw(p.rt, "one") {
		i := rapid.IntRange(0, len(unsettled)-1).Draw(p.rt, "lost")
		unsettled = unsettled[i : i+1]
	}
	p.rt.Logf("lost: %v", unsettled)
	for _, uuid := range unsettled {
		p.fed[uuid].lose(sdk.ErrDeliveryLost)
	}
	synctest.Wait()
	p.put(unsettled...)
}

// check looks at what must hold at any time.
func (p *program) check() {
	s := p.subscription()
	s.mu.Lock()
	defer s.mu.Unlock()
	waiting, outside, held, failing, lost, loaded := 0, 0, 0, 0, 0, 0
	for key, l := range s.lines {
		n, rows, bad := 0, 0, 0
		for e := l.first; e != nil; e = e.next {
			n++
			if e.failing {
				bad++
			}
			if e.row != nil {
				rows++
				if e.prev != nil && e.prev.row == nil {
					p.rt.Fatalf("line %s: a parked message is behind one that is not", key)
				}
			}
			switch {
			case e.state == placeOut:
				outside++
			case e.state == placeLost:
				lost++
			case e.row == nil:
				waiting++
			}
		}
		if n == 0 || n != l.count || bad != l.failing || l.failing > 0 && !l.shaken || rows != l.rows {
			p.rt.Fatalf("line %s: %d places, counted %d; %d failing, counted %d; %d rows, counted %d; shaken %v",
				key, n, l.count, bad, l.failing, rows, l.rows, l.shaken)
		}
		if bad > 0 {
			failing++
			held += n - rows
		}
		loaded += rows
	}
	for _, e := range s.offers.queue {
		if e.line == nil {
			waiting++
		}
	}
	if s.first != nil && p.db.slow == 0 {
		p.rt.Fatalf("%s waits although the database answers", s.first.UUID)
	}
	if waiting != s.waiting || outside != s.outside || held != s.held || failing != len(s.shaky) || lost != s.lost {
		p.rt.Fatalf("waiting %d, counted %d; outside %d, counted %d; held %d, counted %d; failing %d, counted %d; lost %d, counted %d",
			waiting, s.waiting, outside, s.outside, held, s.held, failing, len(s.shaky), lost, s.lost)
	}
	if s.lot != nil && s.lot.loaded != loaded {
		p.rt.Fatalf("%d parked messages are in memory, counted %d", loaded, s.lot.loaded)
	}
}

// finish handles everything that is left, and compares.
func (p *program) finish() {
	for round := 0; len(p.done)+len(p.dropped) < len(p.sent); round++ {
		if round > 100+10*len(p.sent) {
			p.rt.Fatalf("held for ever: sent %v, done %v, dropped %v, parked %v, health %+v",
				p.sent, p.done, p.dropped, p.db.parked(), p.m.Report().Health)
		}
		p.outside = append(p.outside, p.take()...)
		for len(p.outside) > 0 {
			p.enter(p.outside[0])
			p.outside = p.outside[1:]
		}
		for len(p.retried) > 0 {
			p.enter(p.retried[0])
			p.retried = p.retried[1:]
		}
		for len(p.queue) > 0 {
			p.run(0)
		}
		for len(p.passed) > 0 {
			p.settle(p.passed[0], true)
			p.passed = p.passed[1:]
		}
		p.redeliverLoose()
		synctest.Wait()
		p.check()
		time.Sleep(time.Second)
	}
	var want []string
	for _, uuid := range p.sent {
		if !p.dropped[uuid] {
			want = append(want, uuid)
		}
	}
	checkOrder(p.rt, p.done, want)
}

// redeliverLoose brings again what has no key and was nacked: that is between the middleware and the foreign broker.
func (p *program) redeliverLoose() {
	for _, uuid := range p.sent {
		if orderKeyOf(uuid) == "" && !slices.Contains(p.done, uuid) && !p.dropped[uuid] && isSettled(p.fed, uuid, false) {
			p.put(uuid)
		}
	}
}
