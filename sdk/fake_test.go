package sdk

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

var errCut = errors.New("connection cut")

// fakeDriver is a broker in memory whose every answer can be scripted. One queue per topic and group.
type fakeDriver struct {
	caps     Capabilities
	noExtend bool // its sources have a lease that cannot be extended

	// Scripts; nil means the healthy answer. They are called without the lock, and set before the driver is used.
	onPrepare func(ctx context.Context, b Binding) error
	onOpen    func(ctx context.Context, n int) error
	onSend    func(ctx context.Context, n int, batch []Message) error
	onReceive func(ctx context.Context, src *fakeSource) ([]Delivery, error, bool)
	onSettle  func(ctx context.Context, n int, batch []Settlement) (err error, instead bool)
	onExtend  func(ctx context.Context, n int, tokens []Token) (err error, instead bool)
	onClose   func(ctx context.Context)
	onBarrier func(ctx context.Context) error

	mu        sync.Mutex
	queues    map[string]*fakeQueue
	sources   []*fakeSource
	calls     map[string]int
	bindings  []Binding
	settled   []fakeSettled
	extended  []fakeExtended
	sentBatch []int
	maxUnset  int
	closed    bool
}

type fakeSettled struct {
	Settlement
	ID string
	At time.Time
}

type fakeExtended struct {
	tokens []Token
	d      time.Duration
	at     time.Time
}

type fakeQueue struct {
	pending []Delivery
	changed chan struct{} // closed and renewed at every change
}

func newFake(caps Capabilities) *fakeDriver {
	return &fakeDriver{caps: caps, queues: map[string]*fakeQueue{}, calls: map[string]int{}}
}

func (d *fakeDriver) count(call string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls[call]++
	return d.calls[call]
}

func (d *fakeDriver) counted(call string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls[call]
}

func (d *fakeDriver) queue(topic, group string) *fakeQueue {
	key := topic + "\x00" + group
	q := d.queues[key]
	if q == nil {
		q = &fakeQueue{changed: make(chan struct{})}
		d.queues[key] = q
	}
	return q
}

func (q *fakeQueue) notify() {
	close(q.changed)
	q.changed = make(chan struct{})
}

// put makes deliveries available to a group.
func (d *fakeDriver) put(topic, group string, ds ...Delivery) {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := d.queue(topic, group)
	q.pending = append(q.pending, ds...)
	q.notify()
}

// putIDs makes plain messages available.
func (d *fakeDriver) putIDs(topic, group string, ids ...string) {
	for _, id := range ids {
		d.put(topic, group, Delivery{Message: Message{ID: id, Payload: []byte("p-" + id)}, Attempt: 1})
	}
}

func (d *fakeDriver) pending(topic, group string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var ids []string
	for _, p := range d.queue(topic, group).pending {
		ids = append(ids, p.ID)
	}
	return ids
}

func (d *fakeDriver) settlements(v Verdict) []fakeSettled {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []fakeSettled
	for _, s := range d.settled {
		if s.Verdict == v {
			out = append(out, s)
		}
	}
	return out
}

func (d *fakeDriver) extensions() []fakeExtended {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.extended)
}

// cut ends every open source as a lost connection does.
func (d *fakeDriver) cut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.sources {
		s.end(errCut)
	}
}

func (d *fakeDriver) openSources() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, s := range d.sources {
		if s.err == nil {
			n++
		}
	}
	return n
}

func (d *fakeDriver) Capabilities() Capabilities { return d.caps }

func (d *fakeDriver) Prepare(ctx context.Context, b Binding) error {
	d.count("prepare")
	d.mu.Lock()
	d.bindings = append(d.bindings, b)
	closed := d.closed
	d.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if d.onPrepare != nil {
		return d.onPrepare(ctx, b)
	}
	return ctx.Err()
}

func (d *fakeDriver) Send(ctx context.Context, topic string, batch []Message) error {
	n := d.count("send")
	d.mu.Lock()
	d.sentBatch = append(d.sentBatch, len(batch))
	d.mu.Unlock()
	var err error
	if d.onSend != nil {
		err = d.onSend(ctx, n, batch)
	}
	errs := EntryErrors(err, len(batch))
	for i, m := range batch {
		if errs[i] == nil {
			d.put(topic, "g", Delivery{Message: m, Attempt: 1})
		}
	}
	return err
}

func (d *fakeDriver) Open(ctx context.Context, b Binding) (Source, error) {
	n := d.count("open")
	if d.onOpen != nil {
		if err := d.onOpen(ctx, n); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrClosed
	}
	s := &fakeSource{driver: d, binding: b, n: n, unsettled: map[Token]Delivery{}, ended: make(chan struct{})}
	d.sources = append(d.sources, s)
	if d.caps.Lease > 0 && !d.noExtend {
		return &leasingSource{s}, nil
	}
	if d.onBarrier != nil {
		return &barrierSource{s}, nil
	}
	return s, nil
}

func (d *fakeDriver) Close(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, s := range d.sources {
		s.end(ErrClosed)
	}
	return nil
}

type fakeSource struct {
	driver    *fakeDriver
	binding   Binding
	n         int
	next      int
	unsettled map[Token]Delivery
	order     []Token
	ended     chan struct{}
	err       error
}

// end gives back what is unsettled, in order. It is called under the driver's lock.
func (s *fakeSource) end(err error) {
	if s.err != nil {
		return
	}
	s.err = err
	close(s.ended)
	var back []Delivery
	for _, t := range s.order {
		if u, ok := s.unsettled[t]; ok {
			u.Redelivered = true
			u.Attempt++
			back = append(back, u)
		}
	}
	clear(s.unsettled)
	q := s.driver.queue(s.binding.Topic, s.binding.Group)
	q.pending = append(back, q.pending...)
	q.notify()
}

func (s *fakeSource) Capabilities() Capabilities { return s.driver.caps }

func (s *fakeSource) Receive(ctx context.Context, limit int) ([]Delivery, error) {
	d := s.driver
	d.count("receive")
	if d.onReceive != nil {
		if ds, err, ok := d.onReceive(ctx, s); ok {
			return ds, err
		}
	}
	for {
		d.mu.Lock()
		if s.err != nil {
			d.mu.Unlock()
			return nil, s.err
		}
		q := d.queue(s.binding.Topic, s.binding.Group)
		n := min(limit, len(q.pending), s.binding.Window-len(s.unsettled))
		if n > 0 {
			out := s.lend(q, n)
			d.mu.Unlock()
			return out, nil
		}
		changed := q.changed
		d.mu.Unlock()
		select {
		case <-changed:
		case <-s.ended:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *fakeSource) lend(q *fakeQueue, n int) []Delivery {
	out := slices.Clone(q.pending[:n])
	q.pending = slices.Delete(q.pending, 0, n)
	for i := range out {
		s.next++
		out[i].Token = Token(fmt.Sprintf("s%d-%d", s.n, s.next))
		s.unsettled[out[i].Token] = out[i]
		s.order = append(s.order, out[i].Token)
	}
	s.driver.maxUnset = max(s.driver.maxUnset, len(s.unsettled))
	return out
}

func (s *fakeSource) Settle(ctx context.Context, batch []Settlement) error {
	d := s.driver
	n := d.count("settle")
	if d.onSettle != nil {
		if err, instead := d.onSettle(ctx, n, batch); instead {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	failed := map[int]error{}
	for i, st := range batch {
		if err := s.settle(st); err != nil {
			failed[i] = err
		}
	}
	if len(failed) > 0 {
		return &BatchError{Entries: failed}
	}
	return nil
}

func (s *fakeSource) settle(st Settlement) error {
	u, ok := s.unsettled[st.Token]
	if !ok || s.err != nil {
		return ErrStaleToken
	}
	if (st.Verdict == Reject && !s.driver.caps.Reject) || (st.Delay > 0 && !s.driver.caps.DelayedRequeue) {
		return ErrUnsupported
	}
	delete(s.unsettled, st.Token)
	s.driver.settled = append(s.driver.settled, fakeSettled{Settlement: st, ID: u.ID, At: time.Now()})
	q := s.driver.queue(s.binding.Topic, s.binding.Group)
	if st.Verdict == Requeue {
		u.Attempt++
		u.Redelivered = true
		if st.Delay > 0 {
			time.AfterFunc(st.Delay, func() { s.driver.put(s.binding.Topic, s.binding.Group, u) })
		} else {
			q.pending = append([]Delivery{u}, q.pending...)
		}
	}
	q.notify() // there is room in the window
	return nil
}

func (s *fakeSource) Close(ctx context.Context) error {
	s.driver.count("source close")
	if s.driver.onClose != nil {
		s.driver.onClose(ctx)
	}
	s.driver.mu.Lock()
	defer s.driver.mu.Unlock()
	s.end(ErrClosed)
	return nil
}

type leasingSource struct{ *fakeSource }

func (s *leasingSource) Extend(ctx context.Context, tokens []Token, lease time.Duration) error {
	d := s.driver
	n := d.count("extend")
	if d.onExtend != nil {
		if err, instead := d.onExtend(ctx, n, tokens); instead {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.extended = append(d.extended, fakeExtended{tokens: slices.Clone(tokens), d: lease, at: time.Now()})
	failed := map[int]error{}
	for i, t := range tokens {
		if _, ok := s.unsettled[t]; !ok || s.err != nil {
			failed[i] = ErrStaleToken
		}
	}
	if len(failed) > 0 {
		return &BatchError{Entries: failed}
	}
	return nil
}

type barrierSource struct{ *fakeSource }

func (s *barrierSource) Barrier(ctx context.Context) error {
	s.driver.count("barrier")
	return s.driver.onBarrier(ctx)
}

// recorder is an Observer that keeps everything.
type recorder struct {
	mu     sync.Mutex
	events []Event
}

func (r *recorder) Observe(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) of(kind EventKind) []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Event
	for _, e := range r.events {
		if e.Kind == kind {
			out = append(out, e)
		}
	}
	return out
}
