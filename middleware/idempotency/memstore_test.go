package idempotency

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/contracttest/memstore"
)

// rowPlan is a run over a server's database: rows are locked, transactions wait for each other and deadlock.
type rowPlan struct {
	Parts     bool
	Serial    bool
	Guarantee Guarantee
	Lanes     int
	Size      int
	LockKeys  bool
	Outages   []int // the milliseconds at which one begins; each takes 300 ms
	Lost      []int // the milliseconds at which the next COMMIT is lost
	Messages  []rowMessage
}

// rowMessage is delivered to one of two processes until it is acknowledged.
type rowMessage struct {
	ID      int
	Process int
	After   int   // milliseconds
	Rows    []int // that its handler adds one to, in this order
	Pause   int   // milliseconds, between them
	Run     string
}

func rowPlans() *rapid.Generator[rowPlan] {
	msg := rapid.Custom(func(t *rapid.T) rowMessage {
		return rowMessage{
			ID:      rapid.IntRange(0, 25).Draw(t, "id"),
			Process: rapid.IntRange(0, 1).Draw(t, "process"),
			After:   rapid.IntRange(0, 20).Draw(t, "after"),
			Rows:    rapid.SliceOfNDistinct(rapid.IntRange(0, 3), 0, 3, rapid.ID[int]).Draw(t, "rows"),
			Pause:   rapid.SampledFrom([]int{0, 0, 0, 1, 5, 150}).Draw(t, "pause"),
			Run:     rapid.SampledFrom([]string{"well", "well", "well", "fails", "panics", "swallows", "commits", "rolls back"}).Draw(t, "run"),
		}
	})
	return rapid.Custom(func(t *rapid.T) rowPlan {
		return rowPlan{
			Parts:     rapid.Bool().Draw(t, "parts"),
			Serial:    rapid.SampledFrom([]bool{false, false, true}).Draw(t, "serial"),
			Guarantee: rapid.SampledFrom([]Guarantee{EffectivelyOnce, EffectivelyOnce, AtMostOnce}).Draw(t, "guarantee"),
			Lanes:     rapid.IntRange(1, 4).Draw(t, "lanes"),
			Size:      rapid.SampledFrom([]int{0, 0, 1, 4}).Draw(t, "size"),
			LockKeys:  rapid.Bool().Draw(t, "lockKeys"),
			Outages:   rapid.SliceOfN(rapid.IntRange(0, 50), 0, 2).Draw(t, "outages"),
			Lost:      rapid.SliceOfN(rapid.IntRange(0, 50), 0, 3).Draw(t, "lost"),
			Messages:  rapid.SliceOfN(msg, 1, 60).Draw(t, "messages"),
		}
	})
}

// TestRandomlyOverRows is TestRandomly over a database that locks: two processes, the same messages for both, rows that
// handlers fight for, handlers that ignore the error of a deadlock or end their transaction.
func TestRandomlyOverRows(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := rowPlans().Draw(rt, "plan")
		var problems []string
		synctest.Test(t, func(t *testing.T) {
			r := &rowRun{rowPlan: p, db: memstore.NewDatabaseWith(memstore.Options{Serial: p.Serial, WithoutParts: !p.Parts}), runs: make([]int, len(p.Messages))}
			problems = r.play(t)
		})
		for _, problem := range problems {
			rt.Error(problem)
		}
	})
}

type rowRun struct {
	rowPlan
	db *memstore.Database

	mu   sync.Mutex
	runs []int
	tell []string
}

func (r *rowRun) problem(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tell = append(r.tell, fmt.Sprintf(format, args...))
}

func (r *rowRun) play(t *testing.T) []string {
	var processes [2]*Middleware[*memstore.Tx]
	var handlers [2]message.HandlerFunc
	for i := range processes {
		store := r.db.Store()
		cfg := Config{Consumer: "billing", Guarantee: r.Guarantee, Lanes: r.Lanes, BatchSize: r.Size}
		if r.LockKeys {
			cfg.LockKeys = func(msg *message.Message) []string { return []string{msg.Metadata.Get("first")} }
		}
		m, err := New(store, cfg)
		if err != nil {
			t.Fatal(err)
		}
		h := m.Handle(r.act)
		processes[i] = m
		handlers[i] = func(msg *message.Message) ([]*message.Message, error) { return nil, h(msg) }
		r.disturb(store)
	}
	var wg sync.WaitGroup
	for i, msg := range r.Messages {
		wg.Go(func() {
			time.Sleep(time.Duration(msg.After) * time.Millisecond)
			for try := 0; !r.deliver(handlers[(msg.Process+try)%2], i); try++ {
				if try > 100 {
					r.problem("message %d is not acknowledged", i)
					return
				}
			}
		})
	}
	wg.Wait()
	time.Sleep(time.Minute)
	synctest.Wait()
	for i, m := range processes {
		for _, left := range leftoversOf(m) {
			r.problem("process %d: %s", i, left)
		}
	}
	r.check(t.Context())
	return r.tell
}

// disturb makes the plan's outages and lost COMMITs happen.
func (r *rowRun) disturb(store *memstore.Store) {
	for _, ms := range r.Outages {
		time.AfterFunc(time.Duration(ms)*time.Millisecond, func() {
			end, _ := store.Away()
			time.AfterFunc(300*time.Millisecond, end)
		})
	}
	for i, ms := range r.Lost {
		time.AfterFunc(time.Duration(ms)*time.Millisecond, func() { store.LoseCommit(i%2 == 0) })
	}
}

func (r *rowRun) deliver(h message.HandlerFunc, i int) bool {
	m := r.Messages[i]
	msg := deliver(fmt.Sprint(m.ID), "p")
	msg.Metadata.Set("number", fmt.Sprint(i))
	if len(m.Rows) > 0 {
		msg.Metadata.Set("first", fmt.Sprint(slices.Min(m.Rows)))
	}
	o := &ending{msg: msg}
	func() {
		defer func() { o.panicked = recover() }()
		_, o.err = h(msg)
		o.returned = true
	}()
	if v := o.panicked; v != nil && v != "by hand" {
		r.problem("message %d panicked with %v", i, v)
	}
	return o.String() == "done"
}

// act is the handler. Its first run does what the plan says, all others are well.
func (r *rowRun) act(_ context.Context, tx *memstore.Tx, msg *message.Message) error {
	var i int
	_, _ = fmt.Sscan(msg.Metadata.Get("number"), &i)
	r.mu.Lock()
	run := "well"
	if r.runs[i]++; r.runs[i] == 1 {
		run = r.Messages[i].Run
	}
	r.mu.Unlock()
	for _, name := range r.effects(i) {
		if err := tx.Add(name, 1); err != nil && run != "swallows" {
			return err
		}
		time.Sleep(time.Duration(r.Messages[i].Pause) * time.Millisecond)
	}
	switch run {
	case "fails":
		return errHandler
	case "panics":
		panic("by hand")
	case "commits":
		return tx.Commit()
	case "rolls back":
		return tx.Rollback()
	}
	return nil
}

// effects are the counters that a handler adds to.
func (r *rowRun) effects(i int) []string {
	names := []string{fmt.Sprint("u:", r.Messages[i].ID)}
	for _, row := range r.Messages[i].Rows {
		names = append(names, fmt.Sprint("row ", row))
	}
	return names
}

func (r *rowRun) check(ctx context.Context) {
	stolen := slices.ContainsFunc(r.Messages, func(m rowMessage) bool { return m.Run == "commits" })
	ids := map[int]bool{}
	counters := r.db.Counters()
	effects := 0
	for _, m := range r.Messages {
		if ids[m.ID] {
			continue
		}
		ids[m.ID] = true
		n := counters[fmt.Sprint("u:", m.ID)]
		if effects += int(n); n > 1 && (!stolen || r.Guarantee != AtMostOnce) {
			r.problem("identity %d has effect %d", m.ID, n)
		}
	}
	stats, err := r.db.Store().Stats(ctx)
	if err != nil {
		r.problem("%v", err)
	}
	if r.Guarantee == EffectivelyOnce && !stolen && (stats.Done != len(ids) || effects != len(ids) || stats.Torn+len(stats.DeadLetters) != 0) {
		r.problem("%d identities, %d effects, %+v", len(ids), effects, stats)
	}
	if stats.Done+stats.Torn != len(ids) {
		r.problem("%d identities, %+v", len(ids), stats)
	}
	if stolen && r.Guarantee == EffectivelyOnce && effects < stats.Done {
		r.problem("%d effects, but %d are done", effects, stats.Done)
	}
}
