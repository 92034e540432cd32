package idempotency

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// stream is a foreign subscriber, and the router that hands its messages to a handler through Ordered.
type stream struct {
	e       *env
	ch      chan *message.Message
	once    sync.Once
	sub     message.Subscriber
	settled sync.WaitGroup
	router  sync.WaitGroup
}

// streamed is a message of a stream.
type streamed struct {
	*message.Message
	lose context.CancelFunc
}

func (s *stream) Subscribe(context.Context, string) (<-chan *message.Message, error) {
	return s.ch, nil
}

func (s *stream) Close() error {
	s.once.Do(func() { close(s.ch) })
	return nil
}

func (e *env) newStream(h message.HandlerFunc) *stream {
	e.Helper()
	s := &stream{e: e, ch: make(chan *message.Message, 1000)}
	var err error
	if s.sub, err = e.m.Ordered(s); err != nil {
		e.Fatal(err)
	}
	out, err := s.sub.Subscribe(context.Background(), "orders")
	if err != nil {
		e.Fatal(err)
	}
	s.router.Go(func() {
		for msg := range out {
			s.router.Go(func() { asRouter(h, msg) })
		}
	})
	return s
}

// put delivers a message. One that is nacked comes again, one that is lost does not.
func (s *stream) put(uuid string) streamed {
	msg, lose := withCancel(deliver(uuid, "p"))
	ctx := msg.Context()
	s.ch <- msg
	s.settled.Go(func() {
		defer lose()
		select {
		case <-msg.Acked():
		case <-msg.Nacked():
			s.put(uuid)
		case <-ctx.Done():
		}
	})
	return streamed{msg, lose}
}

// end waits until every message is acknowledged or lost, and for the end of everything.
func (s *stream) end() {
	s.e.Helper()
	s.settled.Wait()
	if err := s.sub.Close(); err != nil {
		s.e.Error(err)
	}
	s.router.Wait()
	synctest.Wait()
}

// asRouter handles one message as a router with a Recoverer does.
func asRouter(h message.HandlerFunc, msg *message.Message) {
	defer msg.Nack() // does nothing after Ack
	defer func() { _ = recover() }()
	if _, err := h(msg); err == nil {
		msg.Ack()
	}
}

// keyed makes the first letter of a message's UUID its order key, "-" for none, and holds what failed for a second.
func keyed(c *Config) {
	c.OrderKey = func(msg *message.Message) string { return strings.TrimPrefix(msg.UUID[:1], "-") }
	c.RetryBackoff = sdk.Backoff{Min: time.Second, Max: time.Second}
}

// inOrder brings messages to a handler in order, until each is acknowledged. They come while no lane is free.
func (e *env) inOrder(h message.HandlerFunc, uuids string) {
	e.Helper()
	s := e.newStream(h)
	open := e.holdLanes()
	for uuid := range strings.FieldsSeq(uuids) {
		s.put(uuid)
		synctest.Wait()
	}
	open()
	s.end()
}

// wantInOrder checks that the effects of each order key became durable in the order of the UUIDs, each once.
func (e *env) wantInOrder(uuids string) {
	e.Helper()
	byKey := func(names []string) map[string][]string {
		found := map[string][]string{}
		for _, name := range names {
			name = strings.TrimPrefix(name, "u:")
			found[name[:1]] = append(found[name[:1]], name)
		}
		return found
	}
	e.store.mu.Lock()
	got := byKey(e.store.order)
	e.store.mu.Unlock()
	for key, want := range byKey(strings.Fields(uuids)) {
		if key == "-" {
			slices.Sort(want)
			slices.Sort(got[key])
		}
		if !slices.Equal(got[key], want) {
			e.Errorf("key %q: %v, want %v", key, got[key], want)
		}
	}
}

// failingTimes gives f's errors to the first n handler runs of a message.
func failingTimes(uuid string, n int, f func() error) func(msg *message.Message) error {
	var mu sync.Mutex
	return func(msg *message.Message) error {
		mu.Lock()
		fails := msg.UUID == uuid && n > 0
		if fails {
			n--
		}
		mu.Unlock()
		if fails {
			return f()
		}
		return nil
	}
}

// However a transaction ends for a message, nothing later of its order key gets past it.
func TestNothingOvertakesWhatComesAgain(t *testing.T) {
	const uuids = "k1 x1 k2 x2 k3 -1 k4 -2"
	commits := func(n int, fault commitFault) func(*Config, *fakeStore) {
		return func(_ *Config, s *fakeStore) {
			s.onCommit = func(call int) commitFault {
				if call <= n {
					return fault
				}
				return commitFault{}
			}
		}
	}
	fails := func() error { return errHandler }
	tests := []struct {
		name   string
		change func(c *Config, s *fakeStore)
		bad    string // fails once, or n times
		n      int
		act    func() error
	}{
		{"nothing goes wrong", nil, "", 0, nil},
		{"it fails", nil, "k1", 2, fails},
		{"it fails later", nil, "k3", 2, fails},
		{"a neighbour fails, per batch", func(c *Config, _ *fakeStore) { c.Atomicity = PerBatch }, "x1", 2, fails},
		{"it fails, per batch", func(c *Config, _ *fakeStore) { c.Atomicity = PerBatch }, "k1", 2, fails},
		{"without parts", func(_ *Config, s *fakeStore) { s.info.Parts = false }, "k1", 2, fails},
		{"a neighbour, without parts", func(_ *Config, s *fakeStore) { s.info.Parts = false }, "x1", 2, fails},
		{"it panics", nil, "k1", 3, func() error { panic("by hand") }},
		{"it exits", nil, "k1", 3, howToEnd()["exits"]},
		{"it stands still", nil, "k1", 1, func() error { time.Sleep(time.Minute); return nil }},
		{"its handler meets contention", nil, "k1", 2, func() error { return errBusy }},
		{"its handler meets contention for long", func(c *Config, _ *fakeStore) { c.ContentionRetries = 1 }, "k1", 5, func() error { return errBusy }},
		{"it is diverted", nil, "x1", 9, func() error { return Permanent(errHandler) }},
		{"contention for long", func(c *Config, s *fakeStore) {
			c.ContentionRetries = 1
			commits(4, commitFault{err: errBusy})(c, s)
		}, "", 0, nil},
		{"COMMIT fails", commits(3, commitFault{err: errSQL}), "", 0, nil},
		{"COMMIT is unknown, not committed", commits(2, commitFault{lost: true}), "", 0, nil},
		{"COMMIT is unknown, committed", commits(2, commitFault{lost: true, apply: true}), "", 0, nil},
		{"COMMIT is undecided", func(c *Config, s *fakeStore) {
			s.onResolve = times(12, errSQL)
			commits(2, commitFault{lost: true})(c, s)
		}, "", 0, nil},
		{"no transaction", func(_ *Config, s *fakeStore) { s.onBegin = times(5, errSQL) }, "", 0, nil},
		{"no claim", func(_ *Config, s *fakeStore) { s.onClaim = times(5, errSQL) }, "", 0, nil},
		{"outage", func(_ *Config, s *fakeStore) { s.onBegin = times(5, errGone) }, "", 0, nil},
		{"outage in COMMIT", commits(3, commitFault{err: errGone}), "", 0, nil},
		{"outage in the handler", nil, "k2", 3, func() error { return errGone }},
	}
	for _, tt := range tests {
		for _, lanes := range []int{1, 3} {
			for _, size := range []int{1, 2, 3, 100} {
				t.Run(fmt.Sprintf("%s, batches of %d in %d lanes", tt.name, size, lanes), func(t *testing.T) {
					for range 4 {
						bubble(t, func(c *Config, s *fakeStore) {
							if keyed(c); lanes > 1 {
								s.several(lanes)
							}
							c.BatchSize = size
							if tt.change != nil {
								tt.change(c, s)
							}
						}, func(e *env) {
							e.inOrder(e.marking(failingTimes(tt.bad, tt.n, tt.act)), uuids)
							want := uuids
							if tt.name == "it is diverted" {
								want = strings.Replace(want, tt.bad+" ", "", 1)
							}
							e.wantInOrder(want)
							e.wantNothingLeft()
						})
					}
				})
			}
		}
	}
}

// A delivery that is lost while its handler runs comes again, and waits for the first one's outcome. What follows it does
// not get past it when that one comes to nothing, whatever it comes to.
func TestNothingOvertakesADuplicateOfALostDelivery(t *testing.T) {
	for name, end := range map[string]func(msg *message.Message) error{
		"it is cancelled": func(msg *message.Message) error { return msg.Context().Err() },
		"it fails":        func(msg *message.Message) error { return fmt.Errorf("of its own: %w", errHandler) },
		"it panics":       func(*message.Message) error { panic("by hand") },
		"it finishes":     func(*message.Message) error { return nil },
		"it takes long":   func(*message.Message) error { time.Sleep(time.Minute); return nil },
	} {
		for _, company := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, in company %v", name, company), func(t *testing.T) {
				for range 10 {
					bubble(t, func(c *Config, _ *fakeStore) { keyed(c) }, func(e *env) {
						lost := make(chan struct{})
						first := true
						h := e.marking(func(msg *message.Message) error {
							if msg.UUID == "k1" && first {
								first = false
								<-lost
								return end(msg)
							}
							return nil
						})
						s := e.newStream(h)
						open := e.holdLanes()
						original := s.put("k1")
						if company {
							s.put("-1")
						}
						synctest.Wait()
						open()
						synctest.Wait()
						original.lose()
						s.put("k1")
						s.put("k2")
						s.put("k3")
						synctest.Wait()
						close(lost)
						s.end()
						e.wantInOrder("k1 k2 k3")
						e.wantNothingLeft()
					})
				}
			})
		}
	}
}

// At most once a message that failed is lost, and what comes again is a replay. Those behind it are not lost with it: where
// their receipts are committed already, they run.
func TestOrderAtMostOnceLosesNoneBehind(t *testing.T) {
	for _, size := range []int{1, 2, 100} {
		for _, bad := range []string{"k1", "k2"} {
			t.Run(fmt.Sprintf("%s, batches of %d", bad, size), func(t *testing.T) {
				for range 10 {
					bubble(t, guaranteed(AtMostOnce, func(c *Config, _ *fakeStore) {
						keyed(c)
						c.BatchSize = size
					}), func(e *env) {
						e.inOrder(e.marking(failingTimes(bad, 1, func() error { return errHandler })), "k1 x1 k2 k3 -1 k4")
						e.wantInOrder(without(bad, "k1 x1 k2 k3 -1 k4"))
					})
				}
			})
		}
	}
}

// A conflict that is held keeps its place: what follows it waits until somebody has acted, in the same batch as in a later one.
func TestAHeldConflictKeepsItsPlace(t *testing.T) {
	for _, size := range []int{1, 100} {
		bubble(t, func(c *Config, _ *fakeStore) {
			keyed(c)
			c.Conflict, c.BatchSize = HoldConflicts, size
		}, func(e *env) {
			scope, _ := e.m.scopeOf("charge", "orders")
			id, other := receiptKey(scope, []byte("k1")), receipts.NewNonce()
			e.store.receipts[id] = receipts.Receipt{Fingerprint: []byte("other"), Nonce: other, State: receipts.StateDone}
			e.store.markers[other] = true
			time.AfterFunc(5*time.Second, func() { // somebody acts
				e.store.mu.Lock()
				defer e.store.mu.Unlock()
				delete(e.store.receipts, id)
			})
			e.inOrder(e.marking(nil), "k1 j1 k2 j2 k3")
			e.wantInOrder("k1 j1 k2 j2 k3")
		})
	}
}

// A message whose context ends in the very moment in which its turn comes, as Watermill's Timeout middleware has it, goes
// back before those behind it may run.
func TestNothingOvertakesAMessageThatTimesOut(t *testing.T) {
	var uuids []string
	for key := 'a'; key <= 'z'; key++ {
		uuids = append(uuids, fmt.Sprintf("%c1 %c2", key, key))
	}
	all := strings.Join(uuids, " ")
	for range 20 {
		bubble(t, func(c *Config, s *fakeStore) {
			keyed(c)
			s.several(4)
			c.BatchSize = 2
		}, func(e *env) {
			h := e.marking(nil)
			var seen sync.Map
			s := e.newStream(func(msg *message.Message) ([]*message.Message, error) {
				if _, again := seen.LoadOrStore(msg.UUID, true); !again && msg.UUID[1] == '1' {
					ctx, cancel := context.WithTimeout(msg.Context(), time.Second)
					defer cancel()
					msg.SetContext(ctx)
				}
				return h(msg)
			})
			time.AfterFunc(time.Second, e.holdLanes())
			for uuid := range strings.FieldsSeq(all) {
				s.put(uuid)
			}
			s.end()
			e.wantInOrder(all)
		})
	}
}

// The same for one that is given back by the side lane, because its identity stays claimed elsewhere.
func TestNothingOvertakesABlockedMessage(t *testing.T) {
	for range 20 {
		bubble(t, func(c *Config, s *fakeStore) { keyed(c); s.several(2) }, func(e *env) {
			e.claimElsewhere("k1", defaultTxBudget+5*time.Second)
			e.inOrder(e.marking(nil), "k1 j1 k2 k3 -1")
			e.wantInOrder("k1 j1 k2 k3 -1")
			if e.store.order[0] == "u:k1" || e.store.order[1] == "u:k1" {
				e.Errorf("others waited for it: %v", e.store.order)
			}
		})
	}
}
