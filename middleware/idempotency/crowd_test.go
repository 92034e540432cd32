package idempotency

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// ending is what became of one delivery.
type ending struct {
	msg      *message.Message
	outputs  []*message.Message
	err      error
	panicked any
	returned bool // false, without panicked: Goexit
	took     time.Duration
}

// String names the ending: done, failed, returned, panicked or exited.
func (o *ending) String() string {
	switch {
	case o.panicked != nil:
		return "panicked"
	case !o.returned:
		return "exited"
	case o.err == nil:
		return "done"
	case IsFailure(o.err):
		return "failed"
	default:
		return "returned"
	}
}

// crowd is a number of deliveries that are inside the middleware at the same time, in goroutines of their own.
type crowd struct {
	e   *env
	wg  sync.WaitGroup
	all []*ending
}

// holdLanes keeps every lane until the function that it gives is called. It gives the lanes back one after the other, so
// that what is pending then comes into one batch.
func (e *env) holdLanes() (open func()) {
	e.Helper()
	held := make([]*lane, e.m.lanes.all)
	for i := range held {
		var err error
		if held[i], err = e.m.lanes.acquire(context.Background()); err != nil {
			e.Fatal(err)
		}
	}
	return func() {
		for _, l := range held {
			l.release()
		}
	}
}

// enter delivers messages, one after the other in this order, and does not wait for their endings.
func (c *crowd) enter(h message.HandlerFunc, msgs ...*message.Message) {
	for _, msg := range msgs {
		o := &ending{msg: msg}
		c.all = append(c.all, o)
		c.wg.Go(func() {
			start := time.Now()
			defer func() {
				o.took = time.Since(start)
				o.panicked = recover()
			}()
			o.outputs, o.err = h(msg)
			o.returned = true
		})
		synctest.Wait()
	}
}

// share delivers messages while no lane is free, lets them go on together and waits until they have ended.
func (e *env) share(h message.HandlerFunc, msgs ...*message.Message) *crowd {
	e.Helper()
	c := &crowd{e: e}
	open := e.holdLanes()
	c.enter(h, msgs...)
	open()
	c.wait()
	return c
}

// wait waits until everything has ended, and looks for what it left behind.
func (c *crowd) wait() {
	c.e.Helper()
	c.wg.Wait()
	synctest.Wait()
	c.e.wantNothingLeft()
	c.wantCounted()
}

// messages makes deliveries, one for each UUID.
func messages(uuids string) []*message.Message {
	var msgs []*message.Message
	for uuid := range strings.FieldsSeq(uuids) {
		msgs = append(msgs, deliver(uuid, "p"))
	}
	return msgs
}

// marking is a handler that adds one to its message's effect and then does what f says; nil does nothing.
func (e *env) marking(f func(msg *message.Message) error) message.HandlerFunc {
	return e.m.Wrap(marked(f))
}

func marked(f func(msg *message.Message) error) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		tx, err := TxFrom[*fakeTx](msg.Context())
		if err != nil {
			return nil, err
		}
		tx.add("u:"+msg.UUID, 1)
		if f == nil {
			return nil, nil
		}
		return nil, f(msg)
	}
}

// only lets one message act, and the others do nothing.
func only(uuid string, f func(msg *message.Message) error) func(*message.Message) error {
	return func(msg *message.Message) error {
		if msg.UUID == uuid {
			return f(msg)
		}
		return nil
	}
}

// wantEndings checks how each delivery ended, in the order in which they came: "done", or "a:failed" by UUID for others.
func (c *crowd) wantEndings(others ...string) {
	c.e.Helper()
	want := map[string]string{}
	for _, o := range others {
		uuid, how, _ := strings.Cut(o, ":")
		want[uuid] = how
	}
	for i, o := range c.all {
		how, named := want[o.msg.UUID]
		if !named {
			how = "done"
		}
		if o.String() != how {
			c.e.Errorf("delivery %d, %s: %s (%v, %v), want %s", i, o.msg.UUID, o, o.err, o.panicked, how)
		}
	}
}

// of gives the ending of the first delivery with this UUID.
func (c *crowd) of(uuid string) *ending {
	i := slices.IndexFunc(c.all, func(o *ending) bool { return o.msg.UUID == uuid })
	if i < 0 {
		c.e.Fatalf("no delivery of %s", uuid)
	}
	return c.all[i]
}

// wantApplied checks that these messages, and no others, have an effect, one each, and a whole receipt.
func (e *env) wantApplied(uuids string) {
	e.Helper()
	e.store.mu.Lock()
	defer e.store.mu.Unlock()
	want := map[string]int{}
	for uuid := range strings.FieldsSeq(uuids) {
		want[uuid] = 1
	}
	effects, proven := map[string]int{}, map[string]int{}
	for name, n := range e.store.effects {
		if uuid, ok := strings.CutPrefix(name, "u:"); ok && n != 0 {
			effects[uuid] = n
		}
	}
	for id, receipt := range e.store.receipts {
		if _, key, _ := strings.Cut(id, "\x00"); receipt.State == receipts.StateDone && e.store.markers[receipt.Nonce] {
			proven[key] = 1
		}
	}
	if !maps.Equal(effects, want) {
		e.Errorf("effects %v, want %v", effects, want)
	}
	if e.m.cfg.Guarantee == EffectivelyOnce && !maps.Equal(proven, want) {
		e.Errorf("whole receipts in state done %v, want %v", proven, want)
	}
}

// wantNothingLeft checks that nothing is in flight any more: no transaction, lane, delivery, follower, queue or claim of
// outputs.
func (e *env) wantNothingLeft() {
	e.Helper()
	for _, what := range e.leftovers() {
		e.Error(what)
	}
}

func (e *env) leftovers() (found []string) {
	if open := e.store.openNow(); open != 0 {
		found = append(found, fmt.Sprintf("%d transactions are open", open))
	}
	return append(found, leftoversOf(e.m)...)
}

func leftoversOf[T any](m *Middleware[T]) (found []string) {
	report := func(bad bool, format string, args ...any) {
		if bad {
			found = append(found, fmt.Sprintf(format, args...))
		}
	}
	m.lanes.mu.Lock()
	report(m.lanes.free != m.lanes.all || len(m.lanes.line) != 0, "%d of %d lanes are free, %d wait for one",
		m.lanes.free, m.lanes.all, len(m.lanes.line))
	m.lanes.mu.Unlock()
	m.inside.mu.Lock()
	report(m.inside.n != 0 || len(m.inside.first) != 0, "%d deliveries are inside, %d identities in flight", m.inside.n, len(m.inside.first))
	m.inside.mu.Unlock()
	report(len(m.inside.door) != 0 || len(m.side) != 0, "%d at the door, %d in the side lane", len(m.inside.door), len(m.side))
	m.sending.mu.Lock()
	report(len(m.sending.owned) != 0, "outputs of %d transactions are still owned", len(m.sending.owned))
	m.sending.mu.Unlock()
	return found
}

// wantCounted checks that each delivery is counted once, as what it was. It wants nothing else to have been delivered.
func (c *crowd) wantCounted() {
	c.e.Helper()
	endings := map[string]uint64{}
	for _, o := range c.all {
		endings[o.String()]++
	}
	r := c.e.m.Report()
	acked := r.Handled + r.Replayed + r.Conflicted + r.Refused + r.Diverted + r.Torn
	if acked != endings["done"] || r.Failed != endings["failed"]+endings["panicked"]+endings["exited"] || r.Returned != endings["returned"] {
		c.e.Errorf("%d acknowledged, %d failed, %d returned, but endings were %v", acked, r.Failed, r.Returned, fmt.Sprint(endings))
	}
}

// claimElsewhere lets a transaction of another process claim a message's identity, until d is over or it is freed.
func (e *env) claimElsewhere(uuid string, d time.Duration) (free func()) {
	e.Helper()
	free, err := e.tryClaimElsewhere(uuid, d)
	if err != nil {
		e.Fatal(err)
	}
	return free
}

func (e *env) tryClaimElsewhere(uuid string, d time.Duration) (free func(), err error) {
	tx, err := e.store.Begin(context.Background(), receipts.TxOptions{})
	if err != nil {
		return nil, err
	}
	scope, err := e.m.scopeOf("charge", "orders")
	if err != nil {
		return nil, err
	}
	if _, err := tx.Claim(context.Background(), []receipts.Claim{{Scope: scope, Key: []byte(uuid), Fingerprint: []byte("?"), State: receipts.StateDone}}); err != nil {
		return nil, err
	}
	timer := time.AfterFunc(d, func() { _ = tx.Rollback(context.Background()) })
	return func() {
		timer.Stop()
		_ = tx.Rollback(context.Background())
	}, nil
}

// claimElsewhereLater does so in a goroutine, as soon as it can.
func (e *env) claimElsewhereLater(uuid string, d time.Duration) {
	go func() {
		if _, err := e.tryClaimElsewhere(uuid, d); err != nil {
			e.Error(err)
		}
	}()
}
