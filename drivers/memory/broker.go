package memory

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// Broker is one broker of a [Network], seen by its operator: what its queues hold, and faults for tests. Its methods may
// be called by several goroutines at once and do not block.
type Broker struct {
	opts  Options
	nonce string // makes tokens differ from those of every other broker, also of another process
	start time.Time

	mu       sync.Mutex
	topics   map[string]*topic
	refused  map[string]error
	sessions uint64        // sources ever opened
	gate     chan struct{} // closed by the resume of Stall; nil: no stall
}

func newBroker(opts Options) *Broker {
	return &Broker{
		opts: opts, nonce: rand.Text()[:13], start: time.Now(),
		topics: make(map[string]*topic), refused: make(map[string]error),
	}
}

// now is the broker's clock, in nanoseconds: monotonic, and virtual in a synctest bubble.
func (b *Broker) now() int64 { return int64(time.Since(b.start)) }

// Unsettled gives the number of messages that are handed out in a group and not settled: the broker's side of the window.
// It is 0 where the group does not exist.
func (b *Broker) Unsettled(topic, group string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if q := b.find(topic, group); q != nil {
		return q.leases.len()
	}
	return 0
}

// Pending gives the number of messages that wait in a group, delayed ones included, without those handed out. An empty
// group asks for what waits in a dead-letter topic that has no group yet. It is 0 where the group does not exist.
func (b *Broker) Pending(topic, group string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if q := b.find(topic, group); q != nil {
		return q.count - q.leases.len()
	}
	return 0
}

// find gives a queue brought up to date, or nil.
func (b *Broker) find(topic, group string) *queue {
	t := b.topics[topic]
	if t == nil {
		return nil
	}
	q := t.groups[group]
	if group == "" {
		q = t.backlog
	}
	if q != nil {
		q.pump(b.now())
	}
	return q
}

// Disconnect cuts every session of every driver: sources end with [ErrConnectionLost], their tokens are stale, what they
// had unsettled goes back to its old place, and a Send that waits for room fails as rejected. Drivers stay usable.
func (b *Broker) Disconnect() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.topics {
		t.disperse(ErrConnectionLost)
		t.cut(ErrConnectionLost)
		t.pump(b.now())
	}
}

// Restart is what a restart of the broker looks like from outside: as Disconnect, and every lease is over. Topics, groups,
// messages, attempt counts and delays are kept: they are the durable part.
func (b *Broker) Restart() {
	// A source that ends gives back all its leases, so nothing of a session is left that Disconnect would keep.
	b.Disconnect()
}

// Refuse makes every Send to the topic fail with err, until restore is called; nil means [ErrRefused]. An err that is a
// *sdk.OutcomeError is given as it is, any other as rejected. A Send that waits for room fails too, and so does a Reject
// into the topic.
func (b *Broker) Refuse(topic string, err error) (restore func()) {
	if err == nil {
		err = ErrRefused
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	before, had := b.refused[topic]
	b.refused[topic] = err
	if t := b.topics[topic]; t != nil {
		t.disperse(nil)
	}
	return sync.OnceFunc(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.refused, topic)
		if had {
			b.refused[topic] = before
		}
	})
}

// Stall makes the broker accept every call and answer none, until resume is called: calls wait for their context, or for
// the closing of their driver or source. Nothing is carried out meanwhile.
func (b *Broker) Stall() (resume func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	gate := make(chan struct{})
	if b.gate == nil {
		b.gate = gate
	} else {
		gate = b.gate
	}
	return sync.OnceFunc(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.gate != gate {
			return
		}
		b.gate = nil
		close(gate)
		for _, t := range b.topics {
			t.pump(b.now())
		}
	})
}

// DropTopic removes a topic with its groups and messages. Its sources end with [ErrTopicDropped]; the next Prepare that
// declares makes it anew. Its dead-letter topic stays.
func (b *Broker) DropTopic(topic string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.topics[topic]
	if t == nil {
		return
	}
	delete(b.topics, topic)
	t.disperse(nil)
	t.cut(ErrTopicDropped)
}

// cut ends all sources of a topic. The caller pumps.
func (t *topic) cut(why error) {
	for _, q := range t.groups {
		for s := range q.sources {
			q.end(s, why)
		}
	}
}

// PutUndecodable stores raw bytes that are delivered to every group of the topic with Delivery.Err set. It fails where
// the topic has no group or no room.
func (b *Broker) PutUndecodable(topic string, raw []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := keep(sdk.Message{Payload: raw})
	m.err = errors.New("memory: the message cannot be decoded")
	t := b.topics[topic]
	if t == nil || len(t.groups) == 0 {
		return fmt.Errorf("memory: put into topic %q: %w", topic, sdk.ErrUnroutable)
	}
	if t.fill([]*stored{m}) == 0 {
		return fmt.Errorf("memory: put into topic %q: %w", topic, ErrFull)
	}
	t.pump(b.now())
	return nil
}

// bury stores a rejected message in the dead-letter topic of t, or says why it cannot.
func (b *Broker) bury(t *topic, m *stored) error {
	name := t.name + DeadSuffix
	fail := func(kind sdk.Outcome, err error) error {
		return &sdk.OutcomeError{Kind: kind, Err: fmt.Errorf("memory: reject into topic %q: %w", name, err)}
	}
	if err := checkName("topic", name); err != nil {
		return fail(sdk.OutcomePermanent, err)
	}
	if err := b.refused[name]; err != nil {
		return fail(sdk.OutcomeRejected, err)
	}
	dead := b.declare(name)
	if len(dead.groups) > 0 {
		if dead.fill([]*stored{m}) == 0 {
			return fail(sdk.OutcomeRejected, ErrFull)
		}
		dead.pump(b.now())
		return nil
	}
	if dead.backlog == nil {
		dead.backlog = newQueue(dead, "")
	}
	if !dead.backlog.fits(m.size) {
		return fail(sdk.OutcomeRejected, ErrFull)
	}
	dead.backlog.add(m)
	return nil
}

// declare gives the topic of that name, made when it is missing.
func (b *Broker) declare(name string) *topic {
	t := b.topics[name]
	if t == nil {
		t = &topic{b: b, name: name, groups: make(map[string]*queue)}
		b.topics[name] = t
	}
	return t
}

// pass waits while the broker is stalled, until ctx or done is done. It gives the context's error; what done means is for
// the caller to find.
func (b *Broker) pass(ctx context.Context, done <-chan struct{}) error {
	for {
		b.mu.Lock()
		gate := b.gate
		b.mu.Unlock()
		if gate == nil {
			return nil
		}
		select {
		case <-gate:
		case <-done:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// session gives the prefix of a new source's tokens.
func (b *Broker) session() string {
	b.sessions++
	return b.nonce + "." + strconv.FormatUint(b.sessions, 10) + "."
}
