package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// stranded puts an output into the store, as a process leaves it that died between commit and publish.
func (s *fakeStore) stranded(topic, uuid string, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.outputs = append(s.outputs, receipts.Output{
		OutputRef: receipts.OutputRef{Nonce: receipts.NewNonce()}, Scope: "7:billing4:ship4:paid", Key: []byte(uuid), Topic: topic, UUID: uuid, At: at,
	})
}

func (s *fakeStore) unsent() int {
	return len(s.find(1<<20, func(o receipts.Output) bool { return !o.Sent }))
}

// relayed runs the relay in a bubble for as long as f takes, and checks that it ends with its context.
func relayed(t *testing.T, change func(*Config, *fakeStore), f func(e *env)) {
	t.Helper()
	bubble(t, change, func(e *env) {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error)
		go func() { done <- e.m.Run(ctx) }()
		synctest.Wait()
		f(e)
		cancel()
		if err := <-done; err != nil {
			e.Errorf("Run returned %v", err)
		}
		if e.m.Report().Health.RelayRunning {
			e.Error("the relay runs on")
		}
	})
}

// T11: outputs of an input that never comes back.
func TestRelaySendsWhatIsStranded(t *testing.T) {
	pub := &recording{}
	relayed(t, withOutputs(pub), func(e *env) {
		e.store.stranded("a", "1", time.Now())
		e.store.stranded("b", "2", time.Now())
		e.store.stranded("a", "3", time.Now())
		time.Sleep(relayGrace)
		if len(pub.all()) != 0 {
			e.Error("sent before their committer had its chance")
		}
		time.Sleep(2 * relayIdle)
		if got := fmt.Sprint(pub.all()); got != "[{a 1 } {a 3 } {b 2 }]" || e.store.unsent() != 0 {
			e.Errorf("published %s, %d unsent", got, e.store.unsent())
		}
		calls := pub.called()
		time.Sleep(time.Hour)
		if pub.called() != calls {
			e.Error("sent again")
		}
		e.wantCounts(map[string]uint64{"OutputsSent": 3})
	})
}

func TestRelaySendsMoreThanAPage(t *testing.T) {
	pub := &recording{}
	relayed(t, withOutputs(pub), func(e *env) {
		for i := range 3*relayPage + 7 {
			e.store.stranded("a", fmt.Sprint(i), time.Now())
		}
		time.Sleep(relayGrace + 2*relayIdle)
		got := pub.all()
		if len(got) != 3*relayPage+7 {
			e.Fatalf("%d published", len(got))
		}
		for i, p := range got {
			if p.uuid != fmt.Sprint(i) {
				e.Fatalf("message %d is %s: oldest first", i, p.uuid)
			}
		}
	})
}

func TestRelayBacksOffAndGoesOn(t *testing.T) {
	pub := &recording{}
	relayed(t, withOutputs(pub), func(e *env) {
		var mu sync.Mutex
		away := true
		pub.hook = func(string, []*message.Message) error {
			mu.Lock()
			defer mu.Unlock()
			if away {
				return errBroker
			}
			return nil
		}
		e.store.stranded("a", "1", time.Now())
		time.Sleep(10 * time.Minute)
		mu.Lock()
		away = false
		calls := pub.called()
		mu.Unlock()
		if calls < 10 || calls > 120 {
			e.Errorf("%d tries in ten minutes", calls)
		}
		time.Sleep(time.Minute)
		if e.store.unsent() != 0 {
			e.Error("still unsent")
		}
	})
}

// A topic that takes nothing does not keep the others waiting behind it.
func TestRelayReachesBehindABadTopic(t *testing.T) {
	pub := &recording{hook: func(topic string, _ []*message.Message) error {
		if topic == "bad" {
			return errBroker
		}
		return nil
	}}
	relayed(t, withOutputs(pub), func(e *env) {
		for i := range 3 * relayPage {
			e.store.stranded("bad", fmt.Sprint("bad", i), time.Now())
		}
		e.store.stranded("good", "1", time.Now())
		time.Sleep(5 * time.Minute)
		if got := pub.all(); len(got) != 1 || got[0].topic != "good" {
			e.Errorf("published %v", got)
		}
	})
}

func TestRelayRetriesAFailedPublishSoon(t *testing.T) {
	pub := &recording{}
	relayed(t, withOutputs(pub), func(e *env) {
		pub.hook = func(string, []*message.Message) error {
			if pub.called() == 1 {
				return errBroker
			}
			return nil
		}
		start := time.Now()
		if _, err := e.shipping(message.NewMessage("o-1", nil))(order("u-1")); err != nil {
			e.Error(err)
		}
		for e.store.unsent() != 0 {
			time.Sleep(10 * time.Millisecond)
		}
		if d := time.Since(start); d > relayGrace/2 {
			e.Errorf("sent after %v: it should not wait until it is old", d)
		}
	})
}

// Committer and relay of one process never send the same output at the same time.
func TestRelayLeavesWhatIsBeingPublished(t *testing.T) {
	pub := &recording{}
	relayed(t, withOutputs(pub), func(e *env) {
		pub.hook = func(string, []*message.Message) error { time.Sleep(publishBound - 1); return nil }
		if _, err := e.shipping(message.NewMessage("o-1", nil))(order("u-1")); err != nil {
			e.Error(err)
		}
		time.Sleep(time.Minute)
		if got := pub.all(); len(got) != 1 {
			e.Errorf("published %v", got)
		}
	})
}

// The same where each transaction owns its own outputs, and the committer has stopped waiting.
func TestRelayLeavesWhatIsBeingPublishedAtLeastOnce(t *testing.T) {
	pub := &recording{}
	relayed(t, guaranteed(AtLeastOnce, withOutputs(pub)), func(e *env) {
		pub.hook = func(string, []*message.Message) error { time.Sleep(publishBound + 10*time.Second); return nil }
		h := e.shipping(message.NewMessage("", nil))
		var wg sync.WaitGroup
		for range 2 { // two deliveries of one identity, each with outputs of its own
			wg.Go(func() {
				if _, err := h(order("u-1")); err != nil {
					e.Error(err)
				}
			})
		}
		wg.Wait()
		time.Sleep(15 * time.Second)
		if got := pub.all(); len(got) != 2 {
			e.Errorf("published %v: each sends its own", got)
		}
		time.Sleep(time.Minute)
		if got := pub.all(); len(got) != 2 || got[0].uuid == got[1].uuid {
			e.Errorf("published %v", got)
		}
	})
}

// A publisher that never comes back loses its claim on the outputs after a while.
func TestRelayTakesOverFromAStuckPublish(t *testing.T) {
	pub := &recording{}
	relayed(t, withOutputs(pub), func(e *env) {
		free := make(chan struct{})
		var first sync.Once
		pub.hook = func(string, []*message.Message) (err error) {
			first.Do(func() {
				err = errBroker
			})
			if err != nil {
				<-free
			}
			return err
		}
		_, _ = e.shipping(message.NewMessage("o-1", nil))(order("u-1"))
		time.Sleep(ownedFor + 2*relayIdle)
		if got := pub.all(); len(got) != 1 || e.store.unsent() != 0 {
			e.Errorf("published %v, %d unsent", got, e.store.unsent())
		}
		close(free)
		synctest.Wait()
	})
}

// Another consumer's outputs may belong to another broker.
func TestRelaySendsItsOwnConsumersOutputs(t *testing.T) {
	pub := &recording{}
	relayed(t, withOutputs(pub), func(e *env) {
		for i := range 2 * relayPageMax {
			e.store.stranded("a", fmt.Sprint(i), time.Now())
		}
		for i := range e.store.outputs {
			e.store.outputs[i].Scope = "8:shipping4:ship4:paid"
		}
		e.store.stranded("a", "mine", time.Now())
		time.Sleep(5 * time.Minute)
		if got := pub.all(); len(got) != 1 || got[0].uuid != "mine" {
			e.Errorf("published %d, %v", len(got), got[:min(len(got), 3)])
		}
	})
	relayed(t, func(c *Config, _ *fakeStore) { c.Outputs, c.Scope = pub, "billing" }, func(e *env) {
		for i := range relayPage + 1 { // of the consumer whose name is this one's scope
			e.store.stranded("a", fmt.Sprint(i), time.Now())
		}
		before := e.store.count("unsent")
		time.Sleep(time.Minute)
		if looks := e.store.count("unsent") - before; looks > 120 || len(pub.all()) != 1 {
			e.Errorf("%d looks in a minute, %d published", looks, len(pub.all()))
		}
	})
	e := newEnv(t, func(c *Config, _ *fakeStore) { c.Scope = "all" })
	if !e.m.mine("3:all") || e.m.mine("7:billing4:ship4:paid") {
		t.Error("Config.Scope names what is mine")
	}
}

func TestRelaySurvivesTheDatabase(t *testing.T) {
	pub := &recording{}
	relayed(t, func(c *Config, s *fakeStore) { c.Outputs, s.onUnsent = pub, times(5, errGone) }, func(e *env) {
		e.store.stranded("a", "1", time.Now().Add(-time.Hour))
		time.Sleep(5 * time.Minute)
		if e.store.unsent() != 0 {
			e.Error("still unsent")
		}
	})
}

func TestOneRunAtATime(t *testing.T) {
	for name, cfg := range map[string]func(*Config, *fakeStore){"with outputs": withOutputs(&recording{}), "without": nil} {
		t.Run(name, func(t *testing.T) {
			relayed(t, cfg, func(e *env) {
				if !e.m.Report().Health.RelayRunning {
					e.Error("not running")
				}
				if err := e.m.Run(context.Background()); !errors.Is(err, ErrRelayRunning) {
					e.Errorf("a second Run: %v", err)
				}
			})
		})
	}
}

func TestNudgesAreBounded(t *testing.T) {
	e := newEnv(t, nil)
	for range 2 * maxNudges {
		e.m.nudge(receiptRef{})
	}
	if len(e.m.nudges) != maxNudges {
		t.Errorf("%d nudges", len(e.m.nudges))
	}
}
