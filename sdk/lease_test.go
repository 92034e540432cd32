package sdk

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func lending() Capabilities {
	caps := confirming()
	caps.Lease = time.Minute
	return caps
}

const third = 10 * time.Second // of the lease in these tests

func TestLeasesAreExtendedWhileAMessageIsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(lending())
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "running", "offered")
		msg := r.next()
		time.Sleep(5*time.Minute + time.Second)
		if err := msg.Context().Err(); err != nil {
			t.Errorf("the context ended: %v", err)
		}
		got := d.extensions()
		if len(got) != 30 {
			t.Errorf("%d extensions in 5 min, want one each 10 s", len(got))
		}
		for i, e := range got {
			if len(e.tokens) != 2 || e.d != 30*time.Second {
				t.Errorf("extension %d: %v by %v", i, e.tokens, e.d)
			}
		}
		msg.Ack()
		r.next().Ack()
		synctest.Wait()
		before := d.counted("extend")
		time.Sleep(time.Minute)
		if n := d.counted("extend") - before; n != 0 {
			t.Errorf("%d extensions of nothing", n)
		}
		r.close()
	})
}

func TestAHeldMessageKeepsItsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(lending())
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		msg := r.next()
		token := mustInfo(t, msg).Token
		mustInfo(t, msg).RequeueAfter(5 * time.Minute) // the broker cannot delay
		msg.Nack()
		again := r.next()
		if got := mustInfo(t, again).Token; got != token {
			t.Errorf("token %q, want the same %q", got, token)
		}
		if n := len(d.extensions()); n < 29 {
			t.Errorf("%d extensions", n)
		}
		again.Ack()
		r.close()
	})
}

func TestALostLeaseCancelsTheMessage(t *testing.T) { // D12
	for name, c := range map[string]struct {
		noExtend bool
		answer   error // to Extend
		hang     bool
		lostAt   time.Duration
	}{
		"stale":          {false, &BatchError{Entries: map[int]error{0: ErrStaleToken}}, false, third},
		"never succeeds": {false, errCut, false, 3 * third},
		"unsupported":    {false, ErrUnsupported, false, 3 * third},
		"never answers":  {false, nil, true, 3 * third},
		"not extendable": {true, nil, false, 3 * third},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(lending())
				d.noExtend = c.noExtend
				d.onExtend = func(ctx context.Context, _ int, _ []Token) (error, bool) {
					if c.hang {
						<-ctx.Done()
						return ctx.Err(), true
					}
					return c.answer, true
				}
				r := subscribed(t, d, SubscriberConfig{MaxInFlight: 1})
				d.putIDs("t", "g", "a")
				msg := r.next()
				start := time.Now()
				<-msg.Context().Done()
				if ran := time.Since(start); ran != c.lostAt {
					t.Errorf("cancelled after %v, want %v", ran, c.lostAt)
				}
				if cause := contextCause(msg); !errors.Is(cause, ErrDeliveryLost) {
					t.Errorf("cause %v", cause)
				}
				msg.Ack()
				synctest.Wait()
				if n := d.counted("settle"); n != 0 {
					t.Errorf("a late ack was settled %d times", n)
				}
				if n := r.sub.InFlight(); n != 0 {
					t.Errorf("%d in flight", n)
				}
				if n := d.counted("extend"); name == "unsupported" && n != 1 {
					t.Errorf("asked to extend %d times", n)
				}
				if got := r.rec.of(EventDeliveryLost); len(got) != 1 || got[0].ID != "a" {
					t.Errorf("events %+v", got)
				}
				r.close()
			})
		})
	}
}

// One failed extension is tried again well before the lease ends.
func TestAFailedExtensionIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(lending())
		d.onExtend = func(_ context.Context, n int, _ []Token) (error, bool) { return errCut, n%3 != 0 }
		r := subscribed(t, d, SubscriberConfig{})
		d.putIDs("t", "g", "a")
		msg := r.next()
		time.Sleep(9 * time.Minute)
		if err := msg.Context().Err(); err != nil {
			t.Errorf("lost: %v", contextCause(msg))
		}
		msg.Ack()
		r.close()
	})
}

// While Settle hangs, leases are still extended in time.
func TestAHangingSettleDoesNotCostLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(lending())
		var hang atomic.Bool
		hang.Store(true)
		d.onSettle = func(ctx context.Context, _ int, _ []Settlement) (error, bool) {
			if hang.Load() {
				<-ctx.Done()
				return ctx.Err(), true
			}
			return nil, false
		}
		r := subscribed(t, d, SubscriberConfig{Lease: 6 * time.Second, Backoff: Backoff{Max: time.Second}})
		d.putIDs("t", "g", "a", "b")
		r.next().Ack()
		b := r.next()
		time.Sleep(7 * time.Second)
		if err := b.Context().Err(); err != nil {
			t.Errorf("the neighbour was lost: %v", contextCause(b))
		}
		hang.Store(false)
		b.Ack()
		r.close()
		if n := len(d.settlements(Ack)); n != 2 {
			t.Errorf("%d acks", n)
		}
	})
}

func TestDeliveryLimitsAreThoseOfTheSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(lending())
		r := subscribed(t, d, SubscriberConfig{MaxInFlight: 5, Lease: 12 * time.Second})
		d.putIDs("t", "g", "a")
		msg := r.next()
		want := Limits{MaxInFlight: 5, Lease: 12 * time.Second}
		if got := mustInfo(t, msg).Limits; got != want {
			t.Errorf("limits %+v, want %+v", got, want)
		}
		msg.Ack()
		r.close()
	})
}
