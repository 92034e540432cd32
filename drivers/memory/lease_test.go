package memory

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

func TestLeaseEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		opts  Options
		b     sdk.Binding
		lease time.Duration
	}{
		"default":       {Options{}, sdk.Binding{}, DefaultLease},
		"of the broker": {Options{Lease: 3 * time.Second}, sdk.Binding{}, 3 * time.Second},
		"of the source": {Options{}, sdk.Binding{Lease: time.Hour}, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, tc.opts, func(r *rig) {
				t := r.t
				tc.b.Topic, tc.b.Group, tc.b.Window = topicT, groupG, 3
				one, two := r.open(tc.b), r.open(tc.b)
				r.send(topicT, "a", "b", "c")
				got := r.expect(one, 2, "a", "b")
				time.Sleep(tc.lease - 1)
				r.holds(1, 2)
				r.settle(one, sdk.Ack, got[1])
				time.Sleep(time.Nanosecond)
				r.holds(2, 0)
				entriesAre(t, one.Settle(t.Context(), settlements(sdk.Ack, 0, got[0])), 0, sdk.ErrStaleToken, 0)
				again := r.expect(two, 3, "a", "c")
				if again[0].Attempt != 2 || !again[0].Redelivered {
					t.Errorf("attempt %d, redelivered %t", again[0].Attempt, again[0].Redelivered)
				}
				r.settle(two, sdk.Ack, again...)
				r.holds(0, 0)
			})
		})
	}
}

// A Receive that waits gets what a lease gives back, at that moment; also on the source that had the lease, whose window
// was full.
func TestLeaseEndWakesReceive(t *testing.T) {
	bubble(t, Options{Lease: time.Minute}, func(r *rig) {
		t := r.t
		s := r.consumer(1)
		r.send(topicT, "a")
		start := time.Now()
		old := r.expect(s, 1, "a")
		for i := range 3 {
			got, err := s.Receive(t.Context(), 1)
			if err != nil || len(got) != 1 || got[0].Attempt != i+2 {
				t.Fatalf("received %v, %v", got, err)
			}
			if waited := time.Since(start); waited != time.Duration(i+1)*time.Minute {
				t.Errorf("came back after %s", waited)
			}
		}
		entriesAre(t, s.Settle(t.Context(), settlements(sdk.Ack, 0, old...)), 0, sdk.ErrStaleToken, 0)
		r.holds(0, 1)
	})
}

// Nothing but the settlement itself finds that the lease is over: it must not win against the clock.
func TestSettleAtTheEndOfTheLease(t *testing.T) {
	for name, call := range map[string]func(context.Context, sdk.Source, sdk.Delivery) error{
		"settle": func(ctx context.Context, s sdk.Source, d sdk.Delivery) error {
			return s.Settle(ctx, settlements(sdk.Ack, 0, d))
		},
		"extend": func(ctx context.Context, s sdk.Source, d sdk.Delivery) error {
			return s.(sdk.LeaseExtender).Extend(ctx, []sdk.Token{d.Token}, time.Hour)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Lease: time.Minute}, func(r *rig) {
				t := r.t
				s := r.consumer(1)
				r.send(topicT, "a")
				got := r.expect(s, 1, "a")
				time.Sleep(time.Minute)
				entriesAre(t, call(t.Context(), s, got[0]), 0, sdk.ErrStaleToken, 0)
				r.holds(1, 0)
			})
		})
	}
}

// A delay or lease that ends before what the timer is set for sets it anew.
func TestSoonerEndWhileAnotherWaits(t *testing.T) {
	bubble(t, Options{Lease: time.Hour}, func(r *rig) {
		t := r.t
		holder, waiting := r.consumer(2), r.consumer(1)
		r.send(topicT, "a", "b")
		got := r.expect(holder, 2, "a", "b")
		for i, end := range []func() error{
			func() error { return holder.Settle(t.Context(), settlements(sdk.Requeue, time.Second, got[0])) },
			func() error {
				return holder.(sdk.LeaseExtender).Extend(t.Context(), []sdk.Token{got[1].Token}, time.Second)
			},
		} {
			start := time.Now()
			came := receiving(t.Context(), waiting) // the timer is set for an hour
			if err := end(); err != nil {
				t.Fatal(err)
			}
			if err := <-came; err != nil || time.Since(start) != time.Second {
				t.Errorf("case %d: after %s: %v", i, time.Since(start), err)
			}
			if err := waiting.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.b.topics[topicT].groups[groupG].returned.pop() // out of the way of the second case
			waiting = r.consumer(1)
		}
	})
}

func TestExtend(t *testing.T) {
	bubble(t, Options{Lease: time.Minute}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		ext := s.(sdk.LeaseExtender)
		r.send(topicT, "a", "b", "c")
		got := r.expect(s, 5, "a", "b", "c")
		a, b, c := got[0].Token, got[1].Token, got[2].Token
		for range 10 {
			time.Sleep(40 * time.Second)
			err := ext.Extend(t.Context(), []sdk.Token{a}, time.Minute)
			if err != nil {
				t.Fatalf("Extend: %v", err)
			}
		}
		r.holds(2, 1)
		err := ext.Extend(t.Context(), []sdk.Token{b, a, "garbage", c}, time.Minute)
		entriesAre(t, err, 0, sdk.ErrStaleToken, 0, 2, 3)
		// Shorter than what is left is an end of lease as well.
		if err := ext.Extend(t.Context(), []sdk.Token{a}, time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		r.holds(3, 0)
		again := r.expect(s, 1, "a")
		if err := ext.Extend(t.Context(), []sdk.Token{again[0].Token}, 0); err != nil {
			t.Fatal(err)
		}
		r.holds(3, 0)
	})
}

func TestExtendRefused(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(1)
		r.send(topicT, "a")
		tokens := []sdk.Token{r.expect(s, 1, "a")[0].Token}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err := s.(sdk.LeaseExtender).Extend(ctx, tokens, time.Hour)
		entriesAre(t, err, sdk.OutcomeRejected, context.Canceled, 0)
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		err = s.(sdk.LeaseExtender).Extend(t.Context(), tokens, time.Hour)
		entriesAre(t, err, 0, sdk.ErrStaleToken, 0)
		entriesAre(t, err, 0, sdk.ErrClosed, 0)
		if !strings.Contains(err.Error(), "extend") {
			t.Errorf("the error does not say what was done: %v", err)
		}
	})
}

func TestStaleTokens(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		one, two := r.consumer(5), r.consumer(5)
		r.send(topicT, "a", "b")
		a := r.expect(one, 1, "a")[0]
		b := r.expect(two, 1, "b")[0]
		foreign := newRig(t, Options{})
		defer foreign.close()
		other := foreign.consumer(5)
		foreign.send(topicT, "a")
		alien := foreign.expect(other, 1, "a")[0]
		for name, token := range map[string]sdk.Token{
			"empty": "", "of another source": b.Token, "of another network": alien.Token, "cut": a.Token[:len(a.Token)-1],
			"longer": a.Token + "0", "lower case": sdk.Token(strings.ToLower(string(a.Token))), "NUL": a.Token + "\x00",
			"zeros": a.Token[:len(a.Token)-1] + "01", "sign": a.Token[:len(a.Token)-1] + "+1", "blank": " " + a.Token,
			"invalid utf8": "\xff\xfe", "huge": sdk.Token(strings.Repeat("9", 1<<20)), "next": a.Token[:len(a.Token)-1] + "2",
		} {
			for _, v := range []sdk.Verdict{sdk.Ack, sdk.Requeue, sdk.Reject} {
				err := one.Settle(t.Context(), []sdk.Settlement{{Token: token, Verdict: v}})
				entriesAre(t, err, 0, sdk.ErrStaleToken, 0)
				if len(err.Error()) > 200 {
					t.Errorf("%s: the error has %d bytes", name, len(err.Error()))
				}
			}
		}
		r.holds(0, 2)
		r.settle(one, sdk.Ack, a)
		r.settle(two, sdk.Ack, b)
	})
}

// Twice, requeue after ack, ack of an old attempt: no effect on anything else in the batch or in the queue.
func TestSettleTwice(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		r.send(topicT, "a", "b", "c")
		got := r.expect(s, 5, "a", "b", "c")
		batch := append(settlements(sdk.Ack, 0, got[0], got[0]), settlements(sdk.Requeue, 0, got[0], got[1], got[1])...)
		entriesAre(t, s.Settle(t.Context(), batch), 0, sdk.ErrStaleToken, 1, 2, 4)
		again := r.expect(s, 5, "b")
		entriesAre(t, s.Settle(t.Context(), settlements(sdk.Ack, 0, got[1])), 0, sdk.ErrStaleToken, 0)
		r.holds(0, 2)
		r.settle(s, sdk.Ack, again[0], got[2])
		r.holds(0, 0)
	})
}

func TestInvalidVerdicts(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		r.send(topicT, "a", "b", "c")
		got := r.expect(s, 5, "a", "b", "c")
		err := s.Settle(t.Context(), []sdk.Settlement{
			{Token: got[0].Token}, {Token: got[1].Token, Verdict: sdk.Ack}, {Token: got[2].Token, Verdict: 200},
		})
		entriesAre(t, err, 0, sdk.ErrUnsupported, 0, 2)
		r.holds(0, 2)
	})
}

func TestSettleWithDoneContext(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		r.send(topicT, "a")
		got := r.expect(s, 5, "a")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		entriesAre(t, s.Settle(ctx, settlements(sdk.Ack, 0, got...)), sdk.OutcomeRejected, context.Canceled, 0)
		if err := s.Settle(ctx, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("an empty batch: %v", err)
		}
		r.holds(0, 1)
		if err := s.Settle(t.Context(), nil); err != nil {
			t.Errorf("an empty batch: %v", err)
		}
	})
}
