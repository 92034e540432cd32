package memory

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

func TestCapabilities(t *testing.T) {
	bubble(t, Options{Lease: time.Minute, MaxPayload: 5, Horizon: time.Hour}, func(r *rig) {
		t := r.t
		want := sdk.Capabilities{
			Durable: true, UnroutableDetected: true, Redelivers: true, DeliveryCount: true, DelayedRequeue: true, Reject: true,
			Ordered: true, KeyOrdered: true, OrderAfterRequeue: true, Groups: true, Settle: sdk.SettleConfirmed,
			Progress: sdk.ProgressLease, Lease: time.Minute, MaxPayload: 5, Horizon: time.Hour,
		}
		if got := r.d.Capabilities(); got != want {
			t.Errorf("driver declares %+v", got)
		}
		if got := r.consumer(1).Capabilities(); got != want {
			t.Errorf("source declares %+v", got)
		}
	})
}

func TestPrepare(t *testing.T) {
	long := strings.Repeat("n", maxName+1)
	for _, tc := range []struct {
		name string
		b    sdk.Binding
		want string // in the error; empty for none
	}{
		{"declare", sdk.Binding{Topic: "new", Group: "new", Declare: true}, ""},
		{"declare topic", sdk.Binding{Topic: "new", Declare: true}, ""},
		{"verify topic", sdk.Binding{Topic: topicT}, ""},
		{"verify group", sdk.Binding{Topic: topicT, Group: groupG}, ""},
		{"again", sdk.Binding{Topic: topicT, Group: groupG, Declare: true}, ""},
		{"dead letters of the longest name", sdk.Binding{Topic: long[1:] + DeadSuffix, Declare: true}, ""},
		{"topic missing", sdk.Binding{Topic: "nowhere", Group: groupG}, `topic "nowhere": not prepared`},
		{"group missing", sdk.Binding{Topic: topicT, Group: "nobody"}, `group "nobody" of topic "orders": not prepared`},
		{"empty topic", sdk.Binding{Group: groupG, Declare: true}, "topic name is empty"},
		{"NUL in topic", sdk.Binding{Topic: "a\x00b", Declare: true}, "contains a NUL"},
		{"NUL in group", sdk.Binding{Topic: topicT, Group: "\x00", Declare: true}, "contains a NUL"},
		{"long topic", sdk.Binding{Topic: long, Declare: true}, "topic name has 513 bytes"},
		{"long group", sdk.Binding{Topic: topicT, Group: long, Declare: true}, "group name has 513 bytes"},
		{"window", sdk.Binding{Topic: topicT, Group: groupG, Window: -1, Declare: true}, "window"},
		{"lease", sdk.Binding{Topic: topicT, Group: groupG, Lease: -1, Declare: true}, "lease"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bubble(t, Options{}, func(r *rig) {
				t := r.t
				r.prepare(topicT, groupG)
				err := r.d.Prepare(t.Context(), tc.b)
				checkError(t, "Prepare", err, tc.want)
				if strings.HasSuffix(tc.want, "not prepared") && !errors.Is(err, ErrNotPrepared) {
					t.Errorf("%v is not ErrNotPrepared", err)
				}
				if tc.b.Group != "" {
					s, err := r.d.Open(t.Context(), tc.b)
					checkError(t, "Open", err, tc.want)
					if (s == nil) == (err == nil) {
						t.Errorf("Open gives source %v and error %v", s, err)
					}
				}
			})
		})
	}
}

func checkError(tb testing.TB, what string, err error, want string) {
	tb.Helper()
	switch {
	case want == "" && err != nil:
		tb.Errorf("%s: %v", what, err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		tb.Errorf("%s gives %v, want it to say %q", what, err, want)
	}
}

func TestOpenNeedsGroup(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		r.prepare(topicT, "")
		_, err := r.d.Open(t.Context(), sdk.Binding{Topic: topicT})
		checkError(t, "Open", err, "group for topic")
	})
}

func TestPrepareWithDoneContext(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		r.prepare(topicT, groupG)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		b := sdk.Binding{Topic: topicT, Group: groupG, Declare: true}
		if err := r.d.Prepare(ctx, b); !errors.Is(err, context.Canceled) {
			t.Errorf("Prepare: %v", err)
		}
		if _, err := r.d.Open(ctx, b); !errors.Is(err, context.Canceled) {
			t.Errorf("Open: %v", err)
		}
	})
}

// A group gets what is sent after its first Prepare, with or without a source, and each group gets everything.
func TestGroups(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		r.prepare(topicT, groupG)
		r.send(topicT, "a")
		late := r.open(sdk.Binding{Topic: topicT, Group: "late"})
		r.send(topicT, "b", "c")
		s := r.consumer(5)
		r.settle(s, sdk.Ack, r.expect(s, 5, "a", "b", "c")...)
		r.expect(late, 5, "b", "c")
	})
}

func TestReceiveHostileLimits(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(2)
		r.send(topicT, "a", "b", "c")
		for _, limit := range []int{0, -1, math.MinInt} {
			if got, err := s.Receive(t.Context(), limit); err == nil || got != nil {
				t.Errorf("limit %d: %v, %v", limit, got, err)
			}
		}
		r.expect(s, math.MaxInt, "a", "b")
	})
}

func TestReceiveEndsWithItsContext(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(2)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if got, err := s.Receive(ctx, 1); !errors.Is(err, context.DeadlineExceeded) || got != nil {
			t.Fatalf("Receive gives %v and %v", got, err)
		}
		r.send(topicT, "a")
		if got, err := s.Receive(ctx, 1); !errors.Is(err, context.DeadlineExceeded) || got != nil {
			t.Fatalf("Receive gives %v and %v", got, err)
		}
		r.holds(1, 0)
		if q := r.b.topics[topicT].groups[groupG]; len(q.waiters) != 0 || q.timer != nil {
			t.Errorf("%d waiters are left, timer %v", len(q.waiters), q.timer)
		}
	})
}

// The window bounds what is unsettled, whatever the limit; settling makes room, also for a Receive that waits.
func TestWindow(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(3)
		r.send(topicT, "a", "b", "c", "d", "e")
		got := r.expect(s, 2, "a", "b")
		r.expect(s, 10, "c")
		r.expect(s, 10)
		r.holds(2, 3)
		ids := make(chan []string, 1)
		go func() {
			more, err := s.Receive(t.Context(), 10)
			if err != nil {
				t.Errorf("Receive: %v", err)
			}
			ids <- idsOf(more)
		}()
		synctest.Wait()
		r.settle(s, sdk.Ack, got...)
		if more := <-ids; !slices.Equal(more, []string{"d", "e"}) {
			t.Errorf("received %q", more)
		}
		r.holds(0, 3)
	})
}

func TestDefaultWindow(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(0)
		if err := r.d.Send(t.Context(), topicT, numbered(DefaultWindow+50)); err != nil {
			t.Fatal(err)
		}
		if got, err := r.receive(s, 10000); err != nil || len(got) != DefaultWindow {
			t.Errorf("received %d, %v", len(got), err)
		}
	})
}

// Acking the third of five settles just the third, and what is requeued keeps its place.
func TestSettleAnyOrder(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		r.send(topicT, "a", "b", "c", "d", "e", "f")
		got := r.expect(s, 5, "a", "b", "c", "d", "e")
		r.settle(s, sdk.Ack, got[2])
		r.holds(1, 4)
		r.settle(s, sdk.Requeue, got[3], got[1])
		again := r.expect(s, 5, "b", "d", "f")
		for i, want := range []int{2, 2, 1} {
			if again[i].Attempt != want || again[i].Redelivered != (want > 1) {
				t.Errorf("%s: attempt %d, redelivered %t", again[i].ID, again[i].Attempt, again[i].Redelivered)
			}
		}
		if again[0].Token == got[1].Token {
			t.Error("the token did not change")
		}
		r.settle(s, sdk.Ack, got[4], got[0], again[2], again[0], again[1])
		r.holds(0, 0)
	})
}

func TestOrderAfterRequeue(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		s := r.consumer(1)
		r.send(topicT, "a", "b", "c")
		for range 3 {
			r.settle(s, sdk.Requeue, r.expect(s, 1, "a")...)
		}
		for _, name := range []string{"a", "b", "c"} {
			r.settle(s, sdk.Ack, r.expect(s, 1, name)...)
		}
	})
}

func TestDelayedRequeue(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		r.send(topicT, "k/a", "k/b")
		got := r.expect(s, 1, "k/a")
		if err := s.Settle(t.Context(), settlements(sdk.Requeue, time.Minute, got...)); err != nil {
			t.Fatal(err)
		}
		r.holds(2, 0)
		r.settle(s, sdk.Ack, r.expect(s, 5, "k/b")...)
		time.Sleep(time.Minute - 1)
		r.send(topicT, "k/c")
		time.Sleep(time.Nanosecond)
		r.expect(s, 5, "k/a", "k/c")
	})
}

// A Receive that waits wakes up at the very moment a delay is over, and no timer is left afterwards.
func TestDelayWakesReceive(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		r.send(topicT, "a", "b")
		got := r.expect(s, 5, "a", "b")
		start := time.Now()
		for i, delay := range []time.Duration{2 * time.Second, time.Second} {
			if err := s.Settle(t.Context(), settlements(sdk.Requeue, delay, got[i])); err != nil {
				t.Fatal(err)
			}
		}
		for i, name := range []string{"b", "a"} {
			more, err := s.Receive(t.Context(), 5)
			if err != nil || len(more) != 1 || more[0].ID != name || time.Since(start) != time.Duration(i+1)*time.Second {
				t.Fatalf("after %s received %q, %v", time.Since(start), idsOf(more), err)
			}
		}
		if r.b.topics[topicT].groups[groupG].timer != nil {
			t.Error("a timer is left")
		}
	})
}

func TestHugeDurations(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.open(sdk.Binding{Topic: topicT, Group: groupG, Window: 5, Lease: math.MaxInt64})
		r.send(topicT, "a", "b", "c")
		time.Sleep(time.Hour)
		got := r.expect(s, 3, "a", "b", "c")
		if err := s.Settle(t.Context(), settlements(sdk.Requeue, math.MaxInt64, got[0])); err != nil {
			t.Fatal(err)
		}
		if err := s.Settle(t.Context(), settlements(sdk.Requeue, math.MinInt64, got[1])); err != nil {
			t.Fatal(err)
		}
		if err := s.(sdk.LeaseExtender).Extend(t.Context(), []sdk.Token{got[2].Token}, math.MaxInt64); err != nil {
			t.Fatal(err)
		}
		r.expect(s, 5, "b")
		r.holds(1, 2)
	})
}

func TestKeyStaysWithItsSource(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		one, two := r.consumer(5), r.consumer(5)
		r.send(topicT, "k/1", "k/2", "l/1", "k/3", "plain")
		first := r.expect(one, 1, "k/1")
		l := r.expect(two, 5, "l/1", "plain")
		second := r.expect(one, 1, "k/2")
		r.settle(one, sdk.Ack, first...)
		r.expect(two, 5) // k/2 is still at one
		r.settle(two, sdk.Ack, l...)
		r.settle(one, sdk.Requeue, second...)
		again := r.expect(two, 1, "k/2") // nobody has k any more: who asks first
		r.expect(one, 5)
		r.expect(two, 5, "k/3")
		r.settle(two, sdk.Ack, again...)
		r.send(topicT, "k/4")
		r.expect(one, 5)
		r.expect(two, 5, "k/4")
	})
}

func TestKeyOrderAcrossRequeueAndClose(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		one, two := r.consumer(5), r.consumer(5)
		r.send(topicT, "k/1", "k/2", "k/3", "k/4")
		got := r.expect(one, 2, "k/1", "k/2")
		r.expect(two, 5)
		r.settle(one, sdk.Requeue, got[1], got[0])
		got = r.expect(two, 2, "k/1", "k/2")
		r.expect(one, 5)
		r.settle(two, sdk.Requeue, got[0])
		r.expect(two, 1, "k/1")
		if err := two.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.expect(one, 5, "k/1", "k/2", "k/3", "k/4")
		q := r.b.topics[topicT].groups[groupG]
		if len(q.keys) != 1 || q.freeKeys.len() != 0 {
			t.Errorf("%d keys, %d free, want one and none", len(q.keys), q.freeKeys.len())
		}
	})
}

// A Receive that waits while another source has the key gets the key's next message once it is settled.
func TestKeyReleaseWakesOtherSource(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		one, two := r.consumer(1), r.consumer(1)
		r.send(topicT, "k/1", "k/2")
		first := r.expect(one, 1, "k/1")
		ids := make(chan []string, 1)
		go func() {
			got, err := two.Receive(t.Context(), 1)
			if err != nil {
				t.Errorf("Receive: %v", err)
			}
			ids <- idsOf(got)
		}()
		synctest.Wait()
		r.settle(one, sdk.Ack, first...)
		if got := <-ids; !slices.Equal(got, []string{"k/2"}) {
			t.Errorf("received %q", got)
		}
	})
}

// One hot key before another source must not make every call scan its backlog again.
func TestHotKeyBacklogIsScannedOnce(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		one, two := r.consumer(1), r.consumer(1)
		names := make([]string, 20000)
		for i := range names {
			names[i] = "k/x"
		}
		r.send(topicT, names...)
		q := r.b.topics[topicT].groups[groupG]
		r.expect(one, 1, "k/x")
		r.expect(two, 1)
		if q.fresh.len() != 0 || q.keys["k"].blocked.len() != len(names)-1 {
			t.Fatalf("%d messages are still in the way", q.fresh.len())
		}
		for range 100 {
			if err := one.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			one, two = two, r.consumer(1)
			r.expect(one, 1, "k/x")
			r.expect(two, 1)
			if q.fresh.len()+q.returned.len() != 0 || q.freeKeys.len() != 0 || one.(*source).keys.len() != 1 {
				t.Fatal("the backlog was spread again")
			}
		}
	})
}

// Sources that wait share: one large window does not take everything, and single messages go round.
func TestFairShares(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		const sources, rounds = 4, 5
		var mu sync.Mutex
		got := make(map[int][]int) // source: sizes of what it received
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for i := range sources {
			s := r.consumer(100)
			wg.Go(func() {
				for {
					ds, err := s.Receive(ctx, 100)
					if err != nil {
						return
					}
					mu.Lock()
					got[i] = append(got[i], len(ds))
					mu.Unlock()
					r.settle(s, sdk.Ack, ds...)
				}
			})
			synctest.Wait()
		}
		if err := r.d.Send(t.Context(), topicT, numbered(100)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for range sources * rounds {
			r.send(topicT, "x")
			synctest.Wait()
		}
		cancel()
		wg.Wait()
		for i := range sources {
			if want := []int{25, 1, 1, 1, 1, 1}; !slices.Equal(got[i], want) {
				t.Errorf("source %d received %v, want %v", i, got[i], want)
			}
		}
	})
}
