package memory

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

func deadOf(topic string) string { return topic + DeadSuffix }

// receiving starts a Receive that waits, and gives its error.
func receiving(ctx context.Context, s sdk.Source) <-chan error {
	errs := make(chan error, 1)
	go func() {
		_, err := s.Receive(ctx, 1)
		errs <- err
	}()
	synctest.Wait()
	return errs
}

func TestReject(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		r.send(topicT, "k/a", "k/b", "k/c")
		got := r.expect(s, 5, "k/a", "k/b", "k/c")
		r.settle(s, sdk.Reject, got[0], got[1])
		r.holds(0, 1)
		if n := r.b.Pending(deadOf(topicT), ""); n != 2 {
			t.Fatalf("%d dead letters wait, want 2", n)
		}
		// A publisher cannot use the dead-letter topic before somebody takes from it.
		err := r.d.Send(t.Context(), deadOf(topicT), messages("x"))
		entriesAre(t, err, sdk.OutcomePermanent, sdk.ErrUnroutable, 0)
		first := r.open(sdk.Binding{Topic: deadOf(topicT), Group: "undertaker"})
		second := r.open(sdk.Binding{Topic: deadOf(topicT), Group: "late"})
		r.settle(s, sdk.Reject, got[2])
		dead := r.expect(first, 5, "k/a", "k/b", "k/c")
		if dead[0].Attempt != 1 || dead[0].Redelivered || string(dead[0].Payload) != "k/a" || dead[0].Key != "k" {
			t.Errorf("dead letter is %+v", dead[0])
		}
		r.expect(second, 5, "k/c")
		// Rejected again: one step further.
		r.settle(first, sdk.Reject, dead[1])
		last := r.open(sdk.Binding{Topic: deadOf(deadOf(topicT)), Group: "undertaker"})
		r.expect(last, 5, "k/b")
		r.send(deadOf(topicT), "now")
		r.expect(first, 5, "now")
	})
}

func TestRejectIntoFull(t *testing.T) {
	for name, taken := range map[string]bool{"backlog": false, "group": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Capacity: 2, Lease: time.Minute}, func(r *rig) {
				t := r.t
				s := r.consumer(5)
				if taken {
					r.prepare(deadOf(topicT), "undertaker")
				}
				r.send(topicT, "a", "b")
				r.settle(s, sdk.Reject, r.expect(s, 5, "a", "b")...)
				r.send(topicT, "c", "d")
				got := r.expect(s, 5, "c", "d")
				err := s.Settle(t.Context(), append(settlements(sdk.Reject, 0, got[0]), settlements(sdk.Ack, 0, got[1])...))
				entriesAre(t, err, sdk.OutcomeRejected, ErrFull, 0)
				r.holds(0, 1)
				undertaker := r.open(sdk.Binding{Topic: deadOf(topicT), Group: "undertaker"})
				r.settle(undertaker, sdk.Ack, r.expect(undertaker, 5, "a", "b")...)
				r.settle(s, sdk.Reject, got[0])
				r.holds(0, 0)
				r.expect(undertaker, 5, "c")
			})
		})
	}
}

func TestRejectWakesReceiveAndSenders(t *testing.T) {
	bubble(t, Options{Capacity: 1}, func(r *rig) {
		t := r.t
		s := r.consumer(1)
		undertaker := r.open(sdk.Binding{Topic: deadOf(topicT), Group: "undertaker"})
		r.send(topicT, "a")
		dead := receiving(t.Context(), undertaker)
		sent := make(chan error, 1)
		go func() { sent <- r.d.Send(t.Context(), topicT, messages("b")) }()
		synctest.Wait()
		r.settle(s, sdk.Reject, r.expect(s, 1, "a")...)
		if err := <-dead; err != nil {
			t.Error(err)
		}
		if err := <-sent; err != nil {
			t.Error(err)
		}
	})
}

func TestRejectAtTheEndOfNames(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		topic := strings.Repeat("n", maxDeadName-len(DeadSuffix)) + DeadSuffix
		s := r.open(sdk.Binding{Topic: topic, Group: groupG})
		r.send(topic, "a")
		err := s.Settle(t.Context(), settlements(sdk.Reject, 0, r.expect(s, 1, "a")...))
		if sdk.OutcomeOf(sdk.EntryErrors(err, 1)[0]) != sdk.OutcomePermanent {
			t.Errorf("Settle: %v", err)
		}
		if r.b.Unsettled(topic, groupG) != 1 {
			t.Error("the message is gone")
		}
	})
}

func TestUndecodable(t *testing.T) {
	bubble(t, Options{Capacity: 2}, func(r *rig) {
		t := r.t
		if err := r.b.PutUndecodable(topicT, nil); !errors.Is(err, sdk.ErrUnroutable) {
			t.Errorf("without a group: %v", err)
		}
		s := r.consumer(5)
		raw := []byte("\x00raw\xff")
		if err := r.b.PutUndecodable(topicT, raw); err != nil {
			t.Fatal(err)
		}
		raw[0] = 'X'
		r.send(topicT, "a")
		if err := r.b.PutUndecodable(topicT, raw); !errors.Is(err, ErrFull) {
			t.Errorf("without room: %v", err)
		}
		got := r.expect(s, 5, "", "a")
		if got[0].Err == nil || string(got[0].Payload) != "\x00raw\xff" || got[1].Err != nil {
			t.Fatalf("delivered with error %v and payload %q", got[0].Err, got[0].Payload)
		}
		r.settle(s, sdk.Reject, got[0])
		undertaker := r.open(sdk.Binding{Topic: deadOf(topicT), Group: "undertaker"})
		if dead := r.expect(undertaker, 5, ""); dead[0].Err == nil {
			t.Error("the dead letter lost its error")
		}
	})
}

// A cut and a restart end sources and tokens, not messages, attempts, delays or drivers.
func TestDisconnectAndRestart(t *testing.T) {
	for name, fault := range map[string]func(*Broker){"disconnect": (*Broker).Disconnect, "restart": (*Broker).Restart} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Capacity: 4}, func(r *rig) {
				t := r.t
				one := r.consumer(2)
				far := r.driver()
				defer func() {
					if err := far.Close(context.Background()); err != nil {
						t.Error(err)
					}
				}()
				two, err := far.Open(t.Context(), sdk.Binding{Topic: topicT, Group: groupG, Window: 5})
				if err != nil {
					t.Fatal(err)
				}
				r.send(topicT, "a", "b", "c", "d")
				got := r.expect(one, 2, "a", "b")
				c := r.expect(two, 1, "c")
				if err := two.Settle(t.Context(), settlements(sdk.Requeue, time.Minute, c...)); err != nil {
					t.Fatal(err)
				}
				waits := receiving(t.Context(), one) // the window is full
				sent := make(chan error, 1)
				go func() { sent <- r.d.Send(t.Context(), topicT, messages("e")) }()
				synctest.Wait()
				fault(r.b)
				if err := <-waits; !errors.Is(err, ErrConnectionLost) {
					t.Errorf("Receive: %v", err)
				}
				entriesAre(t, <-sent, sdk.OutcomeRejected, ErrConnectionLost, 0)
				for _, s := range []sdk.Source{one, two} {
					if _, err := s.Receive(t.Context(), 1); !errors.Is(err, ErrConnectionLost) {
						t.Errorf("Receive later: %v", err)
					}
					err := s.Settle(t.Context(), settlements(sdk.Ack, 0, got...))
					entriesAre(t, err, 0, sdk.ErrStaleToken, 0, 1)
					entriesAre(t, err, 0, ErrConnectionLost, 0, 1)
				}
				r.holds(4, 0)
				if err := one.Close(t.Context()); err != nil {
					t.Error(err)
				}
				if _, err := one.Receive(t.Context(), 1); !errors.Is(err, sdk.ErrClosed) {
					t.Errorf("Receive after Close: %v", err)
				}
				again := r.consumer(5)
				ds := r.expect(again, 5, "a", "b", "d")
				if ds[0].Attempt != 2 || ds[2].Attempt != 1 {
					t.Errorf("attempts are %d and %d", ds[0].Attempt, ds[2].Attempt)
				}
				r.settle(again, sdk.Ack, ds...)
				time.Sleep(time.Minute)
				r.expect(again, 5, "c")
			})
		})
	}
}

// What was handed to a Receive that was cut before it returned is no attempt: nobody saw it.
func TestCutBeforeReceiveReturns(t *testing.T) {
	r := newRig(t, Options{})
	defer r.close()
	s := r.consumer(1).(*source)
	_, w, err := s.poll(t.Context(), 1)
	if err != nil || w == nil {
		t.Fatalf("poll gives %v, %v", w, err)
	}
	r.send(topicT, "a")
	if len(w.got) != 1 {
		t.Fatalf("the waiter got %d", len(w.got))
	}
	r.b.Disconnect()
	if got, err := s.collect(t.Context(), w); !errors.Is(err, ErrConnectionLost) || got != nil {
		t.Errorf("collect gives %v, %v", got, err)
	}
	got, err := r.consumer(1).Receive(t.Context(), 1)
	if err != nil || got[0].Attempt != 1 || got[0].Redelivered {
		t.Errorf("received %+v, %v", got, err)
	}
}

// What was handed over in the very moment the context ended is returned, not forgotten in flight.
func TestContextEndsAfterHandOver(t *testing.T) {
	r := newRig(t, Options{})
	defer r.close()
	s := r.consumer(1).(*source)
	ctx, cancel := context.WithCancel(t.Context())
	_, w, err := s.poll(ctx, 1)
	if err != nil || w == nil {
		t.Fatalf("poll gives %v, %v", w, err)
	}
	r.send(topicT, "a")
	cancel()
	if got, err := s.collect(ctx, w); err != nil || len(got) != 1 {
		t.Errorf("collect gives %v, %v", got, err)
	}
	if len(s.waits) != 0 {
		t.Error("the waiter is still noted")
	}
}

func TestRefuse(t *testing.T) {
	boom := errors.New("boom")
	for _, tc := range []struct {
		name string
		err  error
		kind sdk.Outcome
		want error
	}{
		{"default", nil, sdk.OutcomeRejected, ErrRefused},
		{"error", boom, sdk.OutcomeRejected, boom},
		{"outcome", &sdk.OutcomeError{Kind: sdk.OutcomeUnknown, Err: boom}, sdk.OutcomeUnknown, boom},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bubble(t, Options{Capacity: 1}, func(r *rig) {
				t := r.t
				s := r.consumer(5)
				r.send(topicT, "a")
				sent := make(chan error, 1)
				go func() { sent <- r.d.Send(t.Context(), topicT, messages("b")) }()
				synctest.Wait()
				outer := r.b.Refuse(topicT, boom)
				entriesAre(t, <-sent, sdk.OutcomeRejected, boom, 0)
				inner := r.b.Refuse(topicT, tc.err)
				entriesAre(t, r.d.Send(t.Context(), topicT, messages("b", "c")), tc.kind, tc.want, 0, 1)
				inner()
				inner()
				entriesAre(t, r.d.Send(t.Context(), topicT, messages("b")), sdk.OutcomeRejected, boom, 0)
				r.settle(s, sdk.Ack, r.expect(s, 5, "a")...)
				outer()
				r.send(topicT, "c")
				got := r.expect(s, 5, "c")
				restore := r.b.Refuse(deadOf(topicT), boom)
				entriesAre(t, s.Settle(t.Context(), settlements(sdk.Reject, 0, got...)), sdk.OutcomeRejected, boom, 0)
				restore()
				r.settle(s, sdk.Reject, got...)
			})
		})
	}
}

func TestDropTopic(t *testing.T) {
	bubble(t, Options{Capacity: 2}, func(r *rig) {
		t := r.t
		r.b.DropTopic("nowhere")
		s := r.consumer(2)
		r.send(topicT, "a", "b")
		got := r.expect(s, 5, "a", "b")
		r.settle(s, sdk.Reject, got[1])
		r.send(topicT, "c")
		waits := receiving(t.Context(), r.consumer(1))
		if err := <-waits; err != nil {
			t.Fatal(err)
		}
		waits = receiving(t.Context(), s)
		sent := make(chan error, 1)
		go func() { sent <- r.d.Send(t.Context(), topicT, messages("d")) }()
		synctest.Wait()
		r.b.DropTopic(topicT)
		if err := <-waits; !errors.Is(err, ErrTopicDropped) {
			t.Errorf("Receive: %v", err)
		}
		entriesAre(t, <-sent, sdk.OutcomePermanent, sdk.ErrUnroutable, 0)
		entriesAre(t, s.Settle(t.Context(), settlements(sdk.Ack, 0, got[0])), 0, sdk.ErrStaleToken, 0)
		r.holds(0, 0)
		b := sdk.Binding{Topic: topicT, Group: groupG}
		if err := r.d.Prepare(t.Context(), b); !errors.Is(err, ErrNotPrepared) {
			t.Errorf("Prepare that verifies: %v", err)
		}
		again := r.open(b)
		r.send(topicT, "e")
		r.expect(again, 5, "e")
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
		r.holds(0, 1)
		if n := r.b.Pending(deadOf(topicT), ""); n != 1 {
			t.Errorf("%d dead letters are left", n)
		}
	})
}

// A broker that accepts and never answers: every call ends with its context, nothing is carried out.
func TestStall(t *testing.T) {
	bubble(t, Options{Lease: time.Second}, func(r *rig) {
		t := r.t
		s := r.consumer(2)
		waiting := r.consumer(5)
		r.send(topicT, "a")
		got := r.expect(s, 1, "a")
		came := receiving(t.Context(), waiting)
		resume := r.b.Stall()
		nested := r.b.Stall()
		b := sdk.Binding{Topic: topicT, Group: groupG, Declare: true}
		calls := map[string]func(context.Context) error{
			"prepare": func(ctx context.Context) error { return r.d.Prepare(ctx, b) },
			"send":    func(ctx context.Context) error { return r.d.Send(ctx, topicT, messages("x")) },
			"open":    func(ctx context.Context) error { _, err := r.d.Open(ctx, b); return err },
			"receive": func(ctx context.Context) error { _, err := s.Receive(ctx, 1); return err },
			"settle":  func(ctx context.Context) error { return s.Settle(ctx, settlements(sdk.Ack, 0, got...)) },
			"extend": func(ctx context.Context) error {
				return s.(sdk.LeaseExtender).Extend(ctx, []sdk.Token{got[0].Token}, time.Hour)
			},
		}
		for name, call := range calls {
			start := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Minute {
				t.Errorf("%s: after %s: %v", name, time.Since(start), err)
			}
			cancel()
		}
		select {
		case err := <-came:
			t.Fatalf("a stalled broker delivered: %v", err)
		default:
		}
		closing := receiving(t.Context(), s)
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-closing; !errors.Is(err, sdk.ErrClosed) {
			t.Errorf("Receive: %v", err)
		}
		resume()
		resume()
		nested()
		if err := <-came; err != nil {
			t.Errorf("after the stall: %v", err)
		}
		r.holds(0, 1)
	})
}

func TestHooksOnNothing(t *testing.T) {
	r := newRig(t, Options{})
	defer r.close()
	r.b.Disconnect()
	if r.b.Pending("nowhere", "nobody") != 0 || r.b.Unsettled("nowhere", "nobody") != 0 || r.b.Pending("nowhere", "") != 0 {
		t.Error("nothing holds something")
	}
}

func TestSourceClose(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		one, two := r.consumer(5), r.consumer(5)
		r.send(topicT, "a", "b", "c", "d")
		got := r.expect(one, 3, "a", "b", "c")
		r.settle(one, sdk.Ack, got[1])
		r.expect(two, 5, "d")
		came := make(chan []string, 1)
		go func() {
			ds, err := two.Receive(t.Context(), 5)
			if err != nil {
				t.Errorf("Receive: %v", err)
			}
			came <- idsOf(ds)
		}()
		synctest.Wait()
		waits := receiving(t.Context(), one)
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				if err := one.Close(t.Context()); err != nil {
					t.Errorf("Close: %v", err)
				}
			})
		}
		wg.Wait()
		if err := <-waits; !errors.Is(err, sdk.ErrClosed) {
			t.Errorf("Receive: %v", err)
		}
		if ids := <-came; strings.Join(ids, "") != "ac" {
			t.Errorf("came back: %q", ids)
		}
		if n := len(r.d.(*driver).sources); n != 1 {
			t.Errorf("the driver knows %d sources, want one", n)
		}
		err := one.Settle(t.Context(), settlements(sdk.Ack, 0, got[0]))
		entriesAre(t, err, 0, sdk.ErrClosed, 0)
		entriesAre(t, err, 0, sdk.ErrStaleToken, 0)
		if err := one.Settle(t.Context(), nil); !errors.Is(err, sdk.ErrClosed) {
			t.Errorf("Settle of nothing: %v", err)
		}
	})
}

func TestDriverClose(t *testing.T) {
	bubble(t, Options{Capacity: 2}, func(r *rig) {
		t := r.t
		other := r.driver()
		s := r.consumer(2)
		r.send(topicT, "a", "b")
		got := r.expect(s, 5, "a", "b")
		waits := receiving(t.Context(), s)
		sent := make(chan error, 1)
		go func() { sent <- r.d.Send(t.Context(), topicT, messages("c", "d")) }()
		kept := make(chan error, 1)
		go func() { kept <- other.Send(t.Context(), topicT, messages("e")) }()
		synctest.Wait()
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(r.close)
		}
		wg.Wait()
		if err := <-waits; !errors.Is(err, sdk.ErrClosed) {
			t.Errorf("Receive: %v", err)
		}
		entriesAre(t, <-sent, sdk.OutcomeRejected, sdk.ErrClosed, 0, 1)
		b := sdk.Binding{Topic: topicT, Group: groupG, Declare: true}
		entriesAre(t, r.d.Send(t.Context(), topicT, messages("x")), sdk.OutcomeRejected, sdk.ErrClosed, 0)
		_, openErr := r.d.Open(t.Context(), b)
		_, receiveErr := s.Receive(t.Context(), 1)
		for name, err := range map[string]error{
			"Prepare": r.d.Prepare(t.Context(), sdk.Binding{}), "Open": openErr, "Receive": receiveErr,
			"Send of nothing": r.d.Send(t.Context(), "", nil), "Settle": s.Settle(t.Context(), settlements(sdk.Ack, 0, got...)),
		} {
			if !errors.Is(err, sdk.ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if !r.d.Capabilities().Durable {
			t.Error("Capabilities changed")
		}
		r.holds(2, 0)
		q := r.b.topics[topicT].groups[groupG]
		if q.timer != nil || len(q.waiters) != 0 || len(q.sources) != 0 || len(q.keys) != 0 {
			t.Errorf("something is left of the driver: %+v", q)
		}
		r.d = other
		again := r.consumer(5)
		r.settle(again, sdk.Ack, r.expect(again, 5, "a", "b")...)
		if err := <-kept; err != nil {
			t.Errorf("the other driver's Send: %v", err)
		}
		r.expect(again, 5, "e")
	})
}
