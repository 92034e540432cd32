package idempotency

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// plan is what happens in one run of the random test. Everything in it is drawn before the run.
type plan struct {
	Guarantee Guarantee
	Atomicity Atomicity
	Together  bool // HandleBatch
	Parts     bool
	Lanes     int
	Size      int
	Held      bool // all are there before the first lane is free
	Faults    []plannedFault
	Messages  []plannedMessage
}

// plannedFault makes the nth call of a method go wrong.
type plannedFault struct {
	Place string
	Call  int
	How   string
}

// plannedMessage is one message of the broker: it is delivered until it is acknowledged.
type plannedMessage struct {
	ID      int
	Payload string
	Ours    bool
	After   int      // milliseconds
	Cancel  int      // milliseconds until its first delivery is lost; 0: never
	Runs    []string // what its handler does, run by run; then it is well
}

func plans() *rapid.Generator[plan] {
	places := slices.Sorted(maps.Keys(placeFault()))
	fault := rapid.Custom(func(t *rapid.T) plannedFault {
		return plannedFault{
			Place: rapid.SampledFrom(append(places, "commit", "commit", "resolve")).Draw(t, "place"),
			Call:  rapid.IntRange(1, 12).Draw(t, "call"),
			How:   rapid.SampledFrom([]string{"busy", "busy", "gone", "sql", "ended", "lost", "lost but committed", "panic", "exit", "slow"}).Draw(t, "how"),
		}
	})
	run := rapid.SampledFrom([]string{"well", "well", "fails", "panics", "exits", "slow", "stands still", "nacks", "permanent", "busy", "gone", "swallows", "steals"})
	msg := rapid.Custom(func(t *rapid.T) plannedMessage {
		return plannedMessage{
			ID:      rapid.IntRange(0, 11).Draw(t, "id"),
			Payload: rapid.SampledFrom([]string{"p", "p", "p", "p", "q"}).Draw(t, "payload"),
			Ours:    rapid.Bool().Draw(t, "ours"),
			After:   rapid.SampledFrom([]int{0, 0, 0, 1, 5, 30}).Draw(t, "after"),
			Cancel:  rapid.SampledFrom([]int{0, 0, 0, 0, 1, 20}).Draw(t, "cancel"),
			Runs:    rapid.SliceOfN(run, 0, 2).Draw(t, "runs"),
		}
	})
	return rapid.Custom(func(t *rapid.T) plan {
		p := plan{
			Guarantee: rapid.SampledFrom([]Guarantee{EffectivelyOnce, EffectivelyOnce, AtLeastOnce, AtMostOnce}).Draw(t, "guarantee"),
			Atomicity: rapid.SampledFrom([]Atomicity{PerMessage, PerMessage, PerMessage, PerBatch}).Draw(t, "atomicity"),
			Together:  rapid.SampledFrom([]bool{false, false, true}).Draw(t, "together"),
			Parts:     rapid.Bool().Draw(t, "parts"),
			Lanes:     rapid.IntRange(1, 4).Draw(t, "lanes"),
			Size:      rapid.SampledFrom([]int{0, 1, 2, 3, 5}).Draw(t, "size"),
			Held:      rapid.Bool().Draw(t, "held"),
			Faults:    rapid.SliceOfN(fault, 0, 6).Draw(t, "faults"),
			Messages:  rapid.SliceOfN(msg, 1, 25).Draw(t, "messages"),
		}
		if p.Guarantee == AtMostOnce {
			p.Atomicity = PerMessage // New refuses the other
		}
		return p
	})
}

// TestRandomly brings random messages, with random handlers, through a store with random faults, until each is acknowledged.
// Whatever happens: each identity has the effects that its guarantee promises, and nothing is left.
func TestRandomly(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := plans().Draw(rt, "plan")
		var problems []string
		synctest.Test(t, func(t *testing.T) {
			r := &randomRun{plan: p, env: newEnv(t, p.configure), runs: make([]int, len(p.Messages)), ending: map[string]int{}}
			problems = r.play()
		})
		for _, problem := range problems {
			rt.Error(problem)
		}
	})
}

func (p *plan) configure(c *Config, s *fakeStore) {
	c.Guarantee, c.Atomicity, c.BatchSize, c.ContentionRetries = p.Guarantee, p.Atomicity, p.Size, 3
	c.Outputs = &recording{}
	s.several(p.Lanes)
	s.info.Parts = p.Parts
	hooks := placeFault()
	hooks["resolve"] = func(s *fakeStore, fault func(int) error) { s.onResolve = fault }
	for place, put := range hooks {
		put(s, func(n int) error { return p.fault(place, n) })
	}
	s.onCommit = func(n int) commitFault {
		err := p.fault("commit", n)
		if lost := (*lostCommitError)(nil); errors.As(err, &lost) {
			return commitFault{lost: true, apply: lost.applied}
		}
		return commitFault{err: err}
	}
}

// lostCommitError is a COMMIT without an answer.
type lostCommitError struct{ applied bool }

func (*lostCommitError) Error() string { return "fake: the answer is lost" }

// fault is what goes wrong at the nth call of a method.
func (p *plan) fault(place string, n int) error {
	for _, f := range p.Faults {
		if f.Place != place || f.Call != n {
			continue
		}
		switch f.How {
		case "busy":
			return errBusy
		case "gone":
			return errGone
		case "ended":
			return receipts.ErrTxEnded
		case "lost", "lost but committed":
			if place == "commit" {
				return &lostCommitError{f.How != "lost"}
			}
			return errSQL
		case "panic":
			panic("store")
		case "exit":
			runtime.Goexit()
		case "slow":
			time.Sleep(3 * time.Second)
			return nil
		}
		return errSQL
	}
	return nil
}

// randomRun is one run of the random test.
type randomRun struct {
	plan
	*env

	mu     sync.Mutex
	runs   []int          // of each message's handler
	ending map[string]int // of the deliveries
	tell   []string
}

func (r *randomRun) problem(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tell = append(r.tell, fmt.Sprintf(format, args...))
}

// play is the broker: it delivers each message until it is acknowledged.
func (r *randomRun) play() []string {
	h := r.handler()
	open := func() {}
	if r.Held {
		open = r.holdLanes()
	}
	var wg sync.WaitGroup
	for i, m := range r.Messages {
		wg.Go(func() {
			time.Sleep(time.Duration(m.After) * time.Millisecond)
			for try := 1; !r.deliver(h, i, try); try++ {
				if try > 100 {
					r.problem("message %d is not acknowledged after %d deliveries", i, try)
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	time.Sleep(40 * time.Millisecond)
	open()
	wg.Wait()
	time.Sleep(10 * time.Minute) // what stood still has ended
	synctest.Wait()
	for _, left := range r.leftovers() {
		r.problem("%s", left)
	}
	r.checkEffects()
	r.checkCounts()
	return r.tell
}

// deliver makes one delivery and tells whether it was acknowledged.
func (r *randomRun) deliver(h message.HandlerFunc, i, try int) (acked bool) {
	m := r.Messages[i]
	msg, cancel := withCancel(deliverTo("charge", "orders", "shipped", fmt.Sprint(m.ID), m.Payload))
	defer cancel()
	msg.Metadata.Set("number", fmt.Sprint(i))
	if m.Ours {
		msg, _ = withDelivery(msg)
	}
	if m.Cancel > 0 && try == 1 {
		defer time.AfterFunc(time.Duration(m.Cancel)*time.Millisecond, cancel).Stop()
	}
	o := &ending{msg: msg}
	var over sync.WaitGroup
	over.Go(func() { // so that Goexit ends this goroutine only
		defer func() { o.panicked = recover() }()
		_, o.err = h(msg)
		o.returned = true
	})
	over.Wait()
	if v := o.panicked; v != nil && v != "by hand" && v != "store" {
		r.problem("message %d panicked with %v", i, v)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ending[o.String()]++
	return o.String() == "done"
}

// checkCounts compares the report with what became of the deliveries.
func (r *randomRun) checkCounts() {
	c := r.m.Report()
	acked := c.Handled + c.Replayed + c.Conflicted + c.Refused + c.Diverted + c.Torn
	failed := r.ending["failed"] + r.ending["panicked"] + r.ending["exited"]
	if int(acked) != r.ending["done"] || int(c.Failed) != failed || int(c.Returned) != r.ending["returned"] {
		r.problem("endings %v, but %d are acknowledged, %d failed, %d returned", r.ending, acked, c.Failed, c.Returned)
	}
}

func (r *randomRun) handler() message.HandlerFunc {
	if !r.Together {
		return r.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
			tx, err := TxFrom[*fakeTx](msg.Context())
			if err != nil {
				return nil, err
			}
			return []*message.Message{message.NewMessage("o-"+msg.UUID, nil)}, r.act(msg.Context(), tx, msg)
		})
	}
	h := r.m.HandleBatch(func(ctx context.Context, tx *fakeTx, msgs []*message.Message) error {
		for _, msg := range msgs {
			if err := r.act(ctx, tx, msg); err != nil {
				return err
			}
		}
		return nil
	})
	return func(msg *message.Message) ([]*message.Message, error) { return nil, h(msg) }
}

// act does what the plan says for this run.
func (r *randomRun) act(ctx context.Context, tx *fakeTx, msg *message.Message) error {
	var i int
	_, _ = fmt.Sscan(msg.Metadata.Get("number"), &i)
	r.mu.Lock()
	n := r.runs[i]
	r.runs[i]++
	r.mu.Unlock()
	tx.add("u:"+msg.UUID, 1)
	if n >= len(r.Messages[i].Runs) {
		return nil
	}
	switch r.Messages[i].Runs[n] {
	case "fails":
		return errHandler
	case "panics":
		panic("by hand")
	case "exits":
		runtime.Goexit()
	case "slow":
		time.Sleep(15 * time.Millisecond)
	case "stands still":
		time.Sleep(defaultTxBudget + time.Second)
	case "nacks":
		msg.Nack()
	case "permanent":
		return Permanent(errHandler)
	case "busy":
		return errBusy
	case "gone":
		return errGone
	case "swallows":
		carrierIn(ctx).spoil(errSQL)
	case "steals":
		tx.commitByHand()
	}
	return nil
}

// did tells whether a handler of this identity did something.
func (r *randomRun) did(id int, what string) bool {
	for i, m := range r.Messages {
		if m.ID == id && slices.Contains(m.Runs[:min(len(m.Runs), r.runs[i])], what) {
			return true
		}
	}
	return false
}

// checkEffects compares what is durable with what the guarantee promises.
func (r *randomRun) checkEffects() {
	stolen := slices.ContainsFunc(r.Messages, func(m plannedMessage) bool { return r.did(m.ID, "steals") })
	messages := map[int]int{}
	for _, m := range r.Messages {
		messages[m.ID]++
	}
	scope, _ := r.m.scopeOf("charge", "orders")
	outputs := map[string]int{}
	for _, o := range r.store.outputs {
		outputs[string(o.Key)]++
	}
	for id, n := range messages {
		effect := r.store.effects[fmt.Sprint("u:", id)]
		receipt, there := r.store.receipts[receiptKey(scope, fmt.Appendf(nil, "%d", id))]
		switch r.Guarantee {
		case EffectivelyOnce:
			r.checkOnce(id, effect, receipt, stolen)
		case AtMostOnce:
			// A handler that commits by hand and then fails, or meets contention, may leave no trace of it.
			if effect > 1 && !stolen || !there {
				r.problem("identity %d, at most once: effect %d, receipt %v", id, effect, there)
			}
		case AtLeastOnce:
			if effect < n && !r.did(id, "permanent") && !stolen {
				r.problem("identity %d, at least once: effect %d of %d messages", id, effect, n)
			}
		}
		if got := outputs[fmt.Sprint(id)]; !r.Together && !stolen && got != effect {
			r.problem("identity %d: %d outputs for effect %d", id, got, effect)
		}
	}
}

func (r *randomRun) checkOnce(id, effect int, receipt receipts.Receipt, stolen bool) {
	whole := r.store.markers[receipt.Nonce]
	switch {
	case effect > 1:
		r.problem("identity %d has effect %d", id, effect)
	case whole && receipt.State == receipts.StateDone && effect != 1:
		r.problem("identity %d is done without effect", id)
	case whole && receipt.State == receipts.StateDiverted && effect != 0:
		r.problem("identity %d is diverted, with effect %d", id, effect)
	case whole && receipt.State == receipts.StateDiverted && !r.did(id, "permanent"):
		r.problem("identity %d is diverted, but no handler gave it up", id)
	case !whole && !stolen:
		r.problem("identity %d was acknowledged without a whole receipt", id)
	}
}
