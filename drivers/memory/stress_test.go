package memory

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// journal checks, over all consumers of a group, what must hold whatever happens.
type journal struct {
	t  testing.TB
	mu sync.Mutex
	// acked are the messages whose ack was confirmed; last is the highest number of each key that was acked.
	acked map[string]int
	last  map[string]int
	// holder is the source that holds messages of a key, with how many.
	holder map[string]int
	held   map[string]int
}

// take notes deliveries and checks them.
func (j *journal) take(source int, got []sdk.Delivery) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, d := range got {
		if j.acked[d.ID] > 0 {
			j.t.Errorf("%s was acked and is delivered", d.ID)
		}
		if j.held[d.Key] > 0 && j.holder[d.Key] != source {
			j.t.Errorf("key %s is at source %d and at %d", d.Key, j.holder[d.Key], source)
		}
		j.holder[d.Key] = source
		j.held[d.Key]++
	}
}

// let notes that a delivery is about to be settled. It comes before the settlement, after which another may have the key.
func (j *journal) let(d sdk.Delivery) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.held[d.Key]--
}

func (j *journal) ack(d sdk.Delivery) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.acked[d.ID]++
}

func (j *journal) total() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.acked)
}

// Members join and die under load, from many goroutines: nothing is lost, nothing that was acked comes again, and a key
// is never at two sources. Time is virtual, the interleaving is the scheduler's.
func TestMembersJoinAndDieUnderLoad(t *testing.T) {
	const keys, each, members = 7, 300, 5
	bubble(t, Options{Capacity: 64, Lease: time.Hour}, func(r *rig) {
		t := r.t
		r.prepare(topicT, groupG)
		j := &journal{
			t: t, acked: make(map[string]int), last: make(map[string]int), holder: make(map[string]int), held: make(map[string]int),
		}
		ctx, stop := context.WithCancel(t.Context())
		var senders, consumers sync.WaitGroup
		for k := range keys {
			senders.Go(func() {
				for i := range each {
					if err := r.d.Send(t.Context(), topicT, messages(fmt.Sprintf("%d/%d", k, i))); err != nil {
						t.Errorf("Send: %v", err)
					}
				}
			})
		}
		for i := range members {
			consumers.Go(func() { r.member(ctx, j, i, rand.New(rand.NewPCG(1, uint64(i)))) })
		}
		senders.Wait()
		for j.total() < keys*each {
			time.Sleep(time.Second)
		}
		stop()
		consumers.Wait()
		r.holds(0, 0)
	})
}

// member opens sources one after the other, and settles, requeues or leaves behind what it gets.
func (r *rig) member(ctx context.Context, j *journal, id int, rnd *rand.Rand) {
	for life := 0; ctx.Err() == nil; life++ {
		window := 1 + rnd.IntN(20)
		s := r.consumer(window)
		source := id*1000000 + life
		for range rnd.IntN(40) {
			got, err := s.Receive(ctx, 1+rnd.IntN(20))
			if err != nil {
				break
			}
			if len(got) > window {
				r.t.Errorf("%d deliveries in a window of %d", len(got), window)
			}
			j.take(source, got)
			for _, d := range got {
				j.settle(s, d, rnd)
			}
			if rnd.IntN(4) == 0 {
				time.Sleep(time.Duration(rnd.IntN(1000)) * time.Millisecond)
			}
		}
		if err := s.Close(context.Background()); err != nil {
			r.t.Errorf("Close: %v", err)
		}
	}
}

// settle acks most deliveries and requeues the others.
func (j *journal) settle(s sdk.Source, d sdk.Delivery, rnd *rand.Rand) {
	j.let(d)
	st := sdk.Settlement{Token: d.Token, Verdict: sdk.Ack}
	switch rnd.IntN(10) {
	case 0:
		st.Verdict = sdk.Requeue
	case 1:
		st.Verdict, st.Delay = sdk.Requeue, time.Duration(rnd.IntN(500))*time.Millisecond
	}
	if st.Verdict == sdk.Ack {
		j.ack(d)
	}
	if err := s.Settle(context.Background(), []sdk.Settlement{st}); err != nil {
		j.t.Errorf("Settle: %v", err)
	}
}

// Everything at once, without an expectation but the race detector's, that it ends, and that nothing is left.
func TestEverythingAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Options{Capacity: 16, Lease: 20 * time.Millisecond})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		var wg sync.WaitGroup
		loop := func(do func(rnd *rand.Rand)) {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(2, 3))
				for ctx.Err() == nil {
					do(rnd)
					time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
				}
			})
		}
		b := sdk.Binding{Topic: topicT, Group: groupG, Window: 3, Declare: true}
		for range 3 {
			loop(func(*rand.Rand) {
				short, stop := context.WithTimeout(ctx, 50*time.Millisecond)
				defer stop()
				_ = r.d.Send(short, topicT, messages("a/1", "b/1", "2", "3"))
			})
			loop(func(rnd *rand.Rand) { r.consumeBadly(ctx, b, rnd) })
		}
		loop(func(*rand.Rand) { r.b.Disconnect() })
		loop(func(rnd *rand.Rand) {
			if rnd.IntN(10) == 0 {
				r.b.DropTopic(topicT)
			}
			_ = r.b.Pending(topicT, groupG)
		})
		loop(func(*rand.Rand) { r.b.Refuse(topicT, nil)() })
		loop(func(*rand.Rand) {
			resume := r.b.Stall()
			time.Sleep(time.Millisecond)
			resume()
		})
		wg.Wait()
		r.close()
		q := r.b.find(topicT, groupG)
		if q == nil {
			return
		}
		if problem := q.inconsistent(); problem != "" {
			t.Error(problem)
		}
	})
}

// consumeBadly receives and settles with several goroutines on one source, and forgets the source half the time.
func (r *rig) consumeBadly(ctx context.Context, b sdk.Binding, rnd *rand.Rand) {
	if err := r.d.Prepare(ctx, b); err != nil {
		return
	}
	s, err := r.d.Open(ctx, b)
	if err != nil {
		return
	}
	forget := rnd.IntN(2) == 0
	short, stop := context.WithTimeout(ctx, 30*time.Millisecond)
	defer stop()
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			for {
				got, err := s.Receive(short, 2)
				if err != nil {
					if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrConnectionLost) &&
						!errors.Is(err, ErrTopicDropped) && !errors.Is(err, sdk.ErrClosed) {
						r.t.Errorf("Receive: %v", err)
					}
					return
				}
				_ = s.Settle(ctx, settlements(sdk.Verdict(i+1), 0, got...))
			}
		})
	}
	wg.Wait()
	if !forget {
		_ = s.Close(ctx)
	}
}
