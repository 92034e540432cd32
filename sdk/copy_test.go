package sdk

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestACopyOfADeliveryCountsForItself(t *testing.T) {
	original := &DeliveryInfo{
		Attempt: 3, Token: "token", Topic: "t", Group: "g", Limits: Limits{MaxInFlight: 7},
	}
	for name, c := range map[string]struct {
		again       int
		attempt     int
		redelivered bool
	}{
		"first hand-out": {0, 3, false},
		"second":         {1, 4, true},
		"fifth":          {4, 7, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := original.Copy(c.again)
			if d.Attempt != c.attempt || d.Redelivered != c.redelivered {
				t.Errorf("attempt %d, redelivered %v", d.Attempt, d.Redelivered)
			}
			if d.Token != "token" || d.Topic != "t" || d.Group != "g" || d.Limits.MaxInFlight != 7 {
				t.Errorf("the copy lost something: %+v", d)
			}
			d.RequeueAfter(time.Hour)
			if delay, ok := d.RequeueDelay(); !ok || delay != time.Hour {
				t.Errorf("delay %v, %v", delay, ok)
			}
			if delay, ok := original.RequeueDelay(); ok {
				t.Errorf("the original was told to wait for %v", delay)
			}
		})
	}
	if again := (&DeliveryInfo{Attempt: 1, Redelivered: true}).Copy(0); !again.Redelivered {
		t.Error("the copy of a redelivery says it is none")
	}
}

func TestWithDeliveryKeepsWhatElseIsInTheContext(t *testing.T) {
	type key struct{}
	d := &DeliveryInfo{Attempt: 5}
	ctx := WithDelivery(context.WithValue(t.Context(), key{}, "value"), d)
	if got, ok := DeliveryFrom(ctx); !ok || got != d {
		t.Errorf("delivery %v, %v", got, ok)
	}
	if got := ctx.Value(key{}); got != "value" {
		t.Errorf("value %v", got)
	}
	inner := WithDelivery(ctx, &DeliveryInfo{Attempt: 6})
	if got, _ := DeliveryFrom(inner); got.Attempt != 6 {
		t.Errorf("the outer delivery hides the inner one: attempt %d", got.Attempt)
	}
}

// MaxProcessing is for handlers: what is held back by a decorator stays.
func TestMaxProcessingStandsStillWhileHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 3, MaxProcessing: time.Minute, Backoff: Backoff{Min: time.Hour}})
		d.putIDs("t", "g", "held", "handled")
		held, handled := r.next(), r.next()
		info := mustInfo(t, held)
		info.Copy(0).Hold()
		time.Sleep(10 * time.Minute)
		if held.Context().Err() != nil {
			t.Errorf("the held one ended: %v", contextCause(held))
		}
		if !errors.Is(contextCause(handled), ErrAbandoned) {
			t.Errorf("the handled one goes on: %v", contextCause(handled))
		}
		info.Resume()
		time.Sleep(59 * time.Second)
		if held.Context().Err() != nil {
			t.Errorf("MaxProcessing did not begin anew: %v", contextCause(held))
		}
		time.Sleep(2 * time.Second)
		if !errors.Is(contextCause(held), ErrAbandoned) {
			t.Errorf("MaxProcessing does not run: %v", contextCause(held))
		}
		info.Hold() // too late, and no harm
		r.close()
	})
}

// Whoever takes a message may hold it back before the engine has noted that it was taken.
func TestHoldBeforeTheEngineKnowsThatTheMessageWasTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{MaxProcessing: time.Minute})
		d.putIDs("t", "g", "a")
		synctest.Wait()
		sub := r.sub.snapshot()[0]
		sub.lock()
		offered := sub.session.live.first
		sub.unlock()
		offered.try.info.Hold()
		msg := r.next()
		time.Sleep(time.Hour)
		if msg.Context().Err() != nil {
			t.Errorf("the held one ended: %v", contextCause(msg))
		}
		r.close()
	})
}

// What an earlier attempt says about its clock does not touch the present one.
func TestHoldOfAnEarlierAttemptIsIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 1, MaxProcessing: time.Minute, Backoff: Backoff{Min: time.Second, Max: time.Second}})
		d.putIDs("t", "g", "a")
		first := r.next()
		info := mustInfo(t, first)
		info.Hold()
		first.Nack()
		second := r.next()
		info.Hold()
		time.Sleep(61 * time.Second)
		if !errors.Is(contextCause(second), ErrAbandoned) {
			t.Errorf("the second attempt is held: %v", contextCause(second))
		}
		r.close()
	})
}

func TestEndingTellsWhoHoldsMessagesBack(t *testing.T) {
	for name, end := range map[string]func(r *rig, cancel context.CancelFunc){
		"Stop":              func(r *rig, _ context.CancelFunc) { go func() { _ = r.sub.Stop(context.Background()) }() },
		"Close":             func(r *rig, _ context.CancelFunc) { go func() { _ = r.sub.Close() }() },
		"Subscribe context": func(_ *rig, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(delaying())
				r := newRig(t, d, SubscriberConfig{MaxInFlight: 2})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				out, err := r.sub.Subscribe(ctx, "t")
				if err != nil {
					t.Fatal(err)
				}
				r.out = out
				d.putIDs("t", "g", "a")
				msg := r.next()
				info := mustInfo(t, msg)
				info.Hold()
				synctest.Wait()
				select {
				case <-info.Ending():
					t.Fatal("it ends before anybody ended it")
				default:
				}
				start := time.Now()
				end(r, cancel)
				<-info.Copy(0).Ending()
				msg.Nack()
				for range r.out {
				}
				if waited := time.Since(start); waited != 0 {
					t.Errorf("the subscription ended after %v", waited)
				}
				if back := d.settlements(Requeue); len(back) != 1 || back[0].Delay != 0 {
					t.Errorf("went back: %+v", back)
				}
				r.close()
			})
		})
	}
	if (&DeliveryInfo{}).Ending() != nil {
		t.Error("a delivery of nobody ends")
	}
	(&DeliveryInfo{}).Hold()
}
