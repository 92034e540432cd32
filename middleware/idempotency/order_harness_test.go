package idempotency

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// feed is a foreign subscriber whose messages a test puts, and whose settlements it sees.
type feed struct {
	ch   chan *message.Message
	once sync.Once

	mu      sync.Mutex
	settled []string // "+a" acked, "-a" nacked, in order
}

// fed is a message of a feed.
type fed struct {
	*message.Message
	ctx  context.Context
	lose context.CancelCauseFunc
}

func newFeed() *feed { return &feed{ch: make(chan *message.Message, 1000)} }

func (f *feed) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	context.AfterFunc(ctx, func() { _ = f.Close() })
	return f.ch, nil
}

func (f *feed) Close() error {
	f.once.Do(func() { close(f.ch) })
	return nil
}

// put hands out messages: the letter is the order key, "" for "-", and the whole is the UUID.
func (f *feed) put(uuids ...string) []fed {
	put := make([]fed, len(uuids))
	for i, uuid := range uuids {
		msg := message.NewMessage(uuid, []byte("payload of "+uuid))
		msg.Metadata.Set("key", orderKeyOf(uuid))
		ctx, cancel := context.WithCancelCause(context.WithValue(context.Background(), feedKey{}, uuid))
		msg.SetContext(&routed{Context: ctx, handler: "charge", topic: "orders"})
		put[i] = fed{msg, ctx, cancel}
		go f.watch(put[i])
		f.ch <- msg
	}
	return put
}

type feedKey struct{}

func orderKeyOf(uuid string) string {
	if uuid[0] == '-' {
		return ""
	}
	return uuid[:1]
}

func (f *feed) watch(m fed) {
	sign := "+"
	select {
	case <-m.Acked():
	case <-m.Nacked():
		sign = "-"
	case <-m.ctx.Done():
		return
	}
	f.mu.Lock()
	f.settled = append(f.settled, sign+m.UUID)
	f.mu.Unlock()
	m.lose(nil)
}

// unread is how many messages nobody has read.
func (f *feed) unread() int { return len(f.ch) }

func (f *feed) outcome() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.settled)
}

// line is an ordered subscription over a feed, whose router is the test.
type orderEnv struct {
	*env
	feed   *feed
	sub    message.Subscriber
	out    <-chan *message.Message
	cancel context.CancelFunc
	fed    map[string]fed
}

// ordered runs a test over an ordered subscription in virtual time. The backoff is one second.
func ordered(t *testing.T, change func(*Config), f func(o *orderEnv)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, func(cfg *Config, _ *fakeStore) {
			orderByKey(cfg)
			if change != nil {
				change(cfg)
			}
		})
		o := &orderEnv{env: e, feed: newFeed(), fed: map[string]fed{}}
		var err error
		if o.sub, err = e.m.Ordered(o.feed); err != nil {
			t.Fatal(err)
		}
		var ctx context.Context
		ctx, o.cancel = context.WithCancel(t.Context())
		defer o.cancel()
		if o.out, err = o.sub.Subscribe(ctx, "orders"); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := o.sub.Close(); err != nil {
				t.Error(err)
			}
		}()
		defer func() {
			for _, m := range o.fed {
				m.lose(nil)
			}
		}()
		f(o)
	})
}

func orderByKey(cfg *Config) {
	cfg.OrderKey = func(msg *message.Message) string { return msg.Metadata.Get("key") }
	cfg.RetryBackoff = sdk.Backoff{Min: time.Second, Max: time.Second}
}

func (o *orderEnv) put(uuids ...string) {
	for i, m := range o.feed.put(uuids...) {
		o.fed[uuids[i]] = m
	}
}

// take gives the messages that are handed out now, without time passing.
func (o *orderEnv) take() []*message.Message {
	var out []*message.Message
	for {
		synctest.Wait()
		select {
		case msg, ok := <-o.out:
			if !ok {
				return out
			}
			out = append(out, msg)
		default:
			return out
		}
	}
}

// want takes what is handed out now and checks which messages those are.
func (o *orderEnv) want(uuids ...string) []*message.Message {
	o.Helper()
	out := o.take()
	if got := uuidsOf(out); !slices.Equal(got, uuids) {
		o.Fatalf("handed out %v, want %v", got, uuids)
	}
	return out
}

// wantOne is want for one message.
func (o *orderEnv) wantOne(uuid string) *message.Message {
	o.Helper()
	return o.want(uuid)[0]
}

// wantAfter is want for one message, that comes after the time and not before.
func (o *orderEnv) wantAfter(d time.Duration, uuid string) *message.Message {
	o.Helper()
	o.want()
	time.Sleep(d - time.Nanosecond)
	o.want()
	time.Sleep(time.Nanosecond)
	return o.wantOne(uuid)
}

func (o *orderEnv) wantOutcome(settled ...string) {
	o.Helper()
	synctest.Wait()
	if got := o.feed.outcome(); !slices.Equal(got, settled) {
		o.Errorf("settled %v, want %v", got, settled)
	}
}

// ticket is that of a message; the message has one.
func (o *orderEnv) ticket(msg *message.Message) *ticket {
	o.Helper()
	tk, err := o.m.ticketFor(msg)
	if err != nil || tk == nil {
		o.Fatalf("ticket of %s: %v, %v", msg.UUID, tk, err)
	}
	return tk
}

// reach takes messages as far as the middleware's queue.
func (o *orderEnv) reach(msgs ...*message.Message) {
	o.Helper()
	for _, msg := range msgs {
		if tk := o.ticket(msg); tk.behind() {
			o.Fatalf("%s is behind", msg.UUID)
		} else {
			tk.reached()
		}
	}
}

// pass handles messages, with success.
func (o *orderEnv) pass(msgs ...*message.Message) {
	o.Helper()
	for _, msg := range msgs {
		tk := o.ticket(msg)
		tk.reached()
		tk.passed()
		msg.Ack()
		synctest.Wait()
	}
}

// fail fails a message in its handler, before the next one of its key is taken.
func (o *orderEnv) fail(msg *message.Message) {
	o.Helper()
	tk := o.ticket(msg)
	tk.stumbled()
	msg.Nack()
	synctest.Wait()
}

// sendBack returns messages that are behind.
func (o *orderEnv) sendBack(msgs ...*message.Message) {
	o.Helper()
	for _, msg := range msgs {
		tk := o.ticket(msg)
		if !tk.behind() {
			o.Fatalf("%s is not behind", msg.UUID)
		}
		tk.stumbled()
		msg.Nack()
	}
	synctest.Wait()
}

func uuidsOf(msgs []*message.Message) []string {
	ids := []string{}
	for _, msg := range msgs {
		ids = append(ids, msg.UUID)
	}
	return ids
}

// standIn stands for the middleware: a queue for each line whose messages are handled one after another, as a batch would.
type standIn struct {
	m      *Middleware[*fakeTx]
	handle func(msg *message.Message) error

	mu    sync.Mutex
	lines map[string]chan struct{} // closed when the last one that joined has left
	done  []string                 // UUIDs, in the order of success
	runs  int
}

func newStandIn(m *Middleware[*fakeTx], handle func(*message.Message) error) *standIn {
	return &standIn{m: m, handle: handle, lines: map[string]chan struct{}{}}
}

// handler is what a router calls.
func (c *standIn) handler(msg *message.Message) error {
	t, err := c.m.ticketFor(msg)
	if err != nil {
		return err
	}
	c.mu.Lock()
	if t.behind() {
		c.mu.Unlock()
		t.stumbled()
		return errBehind
	}
	before, mine := c.lines[t.line()], make(chan struct{})
	if t != nil {
		c.lines[t.line()] = mine
	}
	t.reached()
	c.mu.Unlock()
	defer close(mine)
	if before != nil {
		<-before
	}
	if t.behind() {
		t.stumbled()
		return errBehind
	}
	returned := false
	defer func() {
		if !returned {
			t.stumbled()
		}
	}()
	err = c.handle(msg)
	returned = true
	c.mu.Lock()
	c.runs++
	c.mu.Unlock()
	if err == nil && msg.Context().Err() != nil {
		err = msg.Context().Err()
	}
	if err != nil {
		t.after(delayOf(err))
		t.stumbled()
		if t == nil {
			time.Sleep(10 * time.Millisecond) // held by the middleware, as without Ordered
		}
		return err
	}
	c.mu.Lock()
	c.done = append(c.done, msg.UUID)
	c.mu.Unlock()
	t.passed()
	return nil
}

// checkOrder checks that all were handled, and those of each key in the order of want.
func checkOrder(t interface {
	Helper()
	Errorf(string, ...any)
}, got, want []string,
) {
	t.Helper()
	byKey := func(uuids []string) map[string][]string {
		out := map[string][]string{}
		for _, uuid := range uuids {
			key := orderKeyOf(uuid)
			if key == "" {
				key = uuid // no order
			}
			out[key] = append(out[key], uuid)
		}
		return out
	}
	g, w := byKey(got), byKey(want)
	for key, uuids := range w {
		if !slices.Equal(g[key], uuids) {
			t.Errorf("key %q: handled %v, want %v", key, g[key], uuids)
		}
	}
	if len(g) != len(w) {
		t.Errorf("handled messages of %d keys, want %d", len(g), len(w))
	}
}

// logged counts lines of the captured log.
func (o *orderEnv) logged(level watermill.LogLevel, text string) int {
	n := 0
	for _, line := range o.log.Captured()[level] {
		if line.Msg == text {
			n++
		}
	}
	return n
}
