package sdk

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func delaying() Capabilities {
	caps := confirming()
	caps.DelayedRequeue = true
	return caps
}

func TestNackIsHeldAsANewMessageForTheSameToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 1, Backoff: Backoff{Min: time.Second, Max: time.Second}})
		d.putIDs("t", "g", "a", "b")
		first := r.next()
		token := mustInfo(t, first).Token
		first.Metadata.Set("spoiled", "yes")
		first.Nack()
		start := time.Now()
		second := r.next()
		if waited := time.Since(start); waited != time.Second {
			t.Errorf("came back after %v, want 1s", waited)
		}
		info := mustInfo(t, second)
		if second == first || second.UUID != "a" || info.Token != token || info.Attempt != 2 || !info.Redelivered {
			t.Errorf("second attempt %q %+v", second.UUID, info)
		}
		if second.Metadata.Get("spoiled") != "" {
			t.Error("the second attempt sees what the first did to the metadata")
		}
		if first.Context().Err() == nil || second.Context().Err() != nil {
			t.Errorf("contexts: first %v, second %v", first.Context().Err(), second.Context().Err())
		}
		if held := r.rec.of(EventHeld); len(held) != 1 || held[0].Delay != time.Second || held[0].Attempt != 1 {
			t.Errorf("held %+v", held)
		}
		if n := d.counted("settle"); n != 0 {
			t.Errorf("the driver was asked to settle %d times", n)
		}
		second.Ack()
		if b := r.next(); b.UUID != "b" || mustInfo(t, b).Attempt != 1 {
			t.Errorf("then came %q", b.UUID)
		}
		r.close()
	})
}

func TestWhereANackedMessageWaits(t *testing.T) {
	leasing := func(caps Capabilities) Capabilities { caps.Lease = time.Minute; return caps }
	for name, c := range map[string]struct {
		caps     Capabilities
		noExtend bool
		after    time.Duration
		broker   bool          // asked to requeue
		delay    time.Duration // that the broker was asked for
		comes    time.Duration // the next attempt
	}{
		"zero is raised to the minimum":     {delaying(), false, 0, false, 0, 100 * time.Millisecond},
		"negative, too":                     {delaying(), false, -time.Hour, false, 0, 100 * time.Millisecond},
		"short":                             {delaying(), false, 5 * time.Second, false, 0, 5 * time.Second},
		"long":                              {delaying(), false, 6 * time.Second, true, 6 * time.Second, 6 * time.Second},
		"long, broker cannot delay":         {confirming(), false, 30 * time.Minute, false, 0, 30 * time.Minute},
		"short, leased":                     {leasing(delaying()), false, 2 * time.Second, false, 0, 2 * time.Second},
		"not below the lease":               {leasing(delaying()), false, 4 * time.Second, true, 4 * time.Second, 4 * time.Second},
		"leased, cannot delay: extended":    {leasing(confirming()), false, time.Minute, false, 0, time.Minute},
		"not extendable, short":             {leasing(confirming()), true, time.Second, false, 0, time.Second},
		"not extendable, long: when safe":   {leasing(confirming()), true, time.Minute, true, 0, 2700 * time.Millisecond},
		"not extendable, broker can delay ": {leasing(delaying()), true, time.Minute, true, time.Minute, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(c.caps)
				d.noExtend = c.noExtend
				r := subscribed(t, d, SubscriberConfig{Lease: 3 * time.Second})
				d.putIDs("t", "g", "a")
				msg := r.next()
				mustInfo(t, msg).RequeueAfter(c.after)
				msg.Nack()
				start := time.Now()
				again := r.next()
				if waited := time.Since(start); waited != c.comes {
					t.Errorf("came back after %v, want %v", waited, c.comes)
				}
				if got := mustInfo(t, again).Attempt; got != 2 {
					t.Errorf("attempt %d", got)
				}
				requeued := d.settlements(Requeue)
				if c.broker != (len(requeued) == 1) {
					t.Fatalf("requeued by the broker: %v", requeued)
				}
				if c.broker && requeued[0].Delay != c.delay {
					t.Errorf("the broker was asked for %v, want %v", requeued[0].Delay, c.delay)
				}
				again.Ack()
				r.close()
			})
		})
	}
}

// A message that fails for ever stays within the backoff's schedule, over broker and engine together, though the broker does
// not count; others keep flowing (D05).
func TestARequeueForEverNeverSpins(t *testing.T) {
	for name, caps := range map[string]Capabilities{
		"held only": {Settle: SettleConfirmed}, "with the broker": {Settle: SettleConfirmed, DelayedRequeue: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(caps)
				r := subscribed(t, d, SubscriberConfig{MaxInFlight: 4})
				d.put("t", "g", Delivery{Message: Message{ID: "bad"}})
				start := time.Now()
				attempts, good, last := 0, 0, 0
				for time.Since(start) < time.Hour {
					msg := r.next()
					if msg.UUID == "bad" {
						attempts++
						if got := mustInfo(t, msg).Attempt; got <= last {
							t.Fatalf("attempt %d after %d", got, last)
						} else {
							last = got
						}
						msg.Nack()
						d.putIDs("t", "g", "good")
						continue
					}
					good++
					msg.Ack()
				}
				// Ten steps lead to a minute; from then on it is half a minute on average.
				if attempts < 60 || attempts > 200 {
					t.Errorf("%d attempts in an hour", attempts)
				}
				if good < attempts-1 {
					t.Errorf("%d others flowed", good)
				}
				r.close()
			})
		})
	}
}

// Whatever answer a requeue gets, the slot is not lost, the message comes back, and nothing spins.
func TestARequeueThatFailsKeepsTheMessage(t *testing.T) {
	for name, answer := range map[string]error{
		"unsupported": ErrUnsupported,
		"permanent":   &OutcomeError{Kind: OutcomePermanent, Err: errCut},
		"rejected":    &OutcomeError{Kind: OutcomeRejected, Err: errCut},
		"unknown":     errCut,
		"for a batch": &BatchError{Entries: map[int]error{0: errCut}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(delaying())
				var requeues atomic.Int64
				d.onSettle = func(_ context.Context, _ int, batch []Settlement) (error, bool) {
					if batch[0].Verdict == Requeue {
						requeues.Add(1)
						return answer, true
					}
					return nil, false
				}
				r := subscribed(t, d, SubscriberConfig{MaxInFlight: 1})
				d.putIDs("t", "g", "a", "b")
				start := time.Now()
				attempts := 0
				for time.Since(start) < time.Hour {
					msg := r.next()
					attempts++
					if msg.UUID != "a" {
						t.Fatalf("%q came", msg.UUID)
					}
					mustInfo(t, msg).RequeueAfter(10 * time.Second)
					msg.Nack()
				}
				if n := requeues.Load(); n == 0 || (name == "unsupported" && n != 1) {
					t.Errorf("the broker was asked %d times", n)
				}
				if attempts > 3600/2 || requeues.Load() > 3600 {
					t.Errorf("%d attempts, %d requeues in an hour", attempts, requeues.Load())
				}
				r.next().Ack()
				if b := r.next(); b.UUID != "b" {
					t.Errorf("after the ack came %q", b.UUID)
				}
				r.close()
			})
		})
	}
}

func TestMaxProcessingFreesTheSlot(t *testing.T) {
	for name, caps := range map[string]Capabilities{"plain": confirming(), "delaying": delaying()} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(caps)
				r := subscribed(t, d, SubscriberConfig{MaxInFlight: 1, MaxProcessing: time.Minute})
				d.putIDs("t", "g", "a")
				stuck := r.next()
				start := time.Now()
				<-stuck.Context().Done()
				if ran := time.Since(start); ran != time.Minute {
					t.Errorf("cancelled after %v", ran)
				}
				if cause := contextCause(stuck); !errors.Is(cause, ErrAbandoned) {
					t.Errorf("cause %v", cause)
				}
				again := r.next()
				if again.UUID != "a" || mustInfo(t, again).Token == mustInfo(t, stuck).Token {
					t.Errorf("came %q", again.UUID)
				}
				stuck.Ack() // too late
				synctest.Wait()
				if got := d.settlements(Ack); len(got) != 0 {
					t.Errorf("a late ack was settled: %v", got)
				}
				again.Ack()
				synctest.Wait()
				if got := d.settlements(Ack); len(got) != 1 {
					t.Errorf("acks %v", got)
				}
				if got := r.rec.of(EventAbandoned); len(got) != 1 || got[0].ID != "a" {
					t.Errorf("abandoned %+v", got)
				}
				r.close()
			})
		})
	}
}

// The decision about an abandoned attempt must not count for the next one, which the engine makes itself where the broker
// does not take the requeue.
func TestALateDecisionIsNotTakenForTheNextAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSettle = func(_ context.Context, _ int, batch []Settlement) (error, bool) {
			return ErrUnsupported, batch[0].Verdict == Requeue
		}
		r := subscribed(t, d, SubscriberConfig{MaxProcessing: time.Minute})
		d.putIDs("t", "g", "a")
		first := r.next()
		second := r.next()
		if mustInfo(t, second).Token != mustInfo(t, first).Token {
			t.Fatal("not the same delivery")
		}
		first.Ack()
		synctest.Wait()
		if got := d.settlements(Ack); len(got) != 0 {
			t.Errorf("settled %v", got)
		}
		second.Ack()
		synctest.Wait()
		if got := d.settlements(Ack); len(got) != 1 {
			t.Errorf("settled %v", got)
		}
		r.close()
	})
}

func TestEventsNeverHoldAPayload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		r.next().Nack()
		r.next().Ack()
		synctest.Wait()
		for _, e := range r.rec.events {
			if strings.Contains(format(e), "p-a") {
				t.Errorf("event %+v", e)
			}
		}
		r.close()
	})
}
