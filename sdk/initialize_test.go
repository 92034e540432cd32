package sdk

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestSubscribeInitializePreparesTopicAndGroup(t *testing.T) {
	for _, verifyOnly := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			d := newFake(confirming())
			var got []Binding
			d.onPrepare = func(_ context.Context, b Binding) error {
				got = append(got, b)
				return nil
			}
			cfg := SubscriberConfig{Group: "billing", MaxInFlight: 3, Lease: time.Minute, VerifyOnly: verifyOnly}
			r := newRig(t, d, cfg)
			for range 2 { // idempotent
				if err := r.sub.SubscribeInitialize("orders"); err != nil {
					t.Fatal(err)
				}
			}
			want := Binding{Topic: "orders", Group: "billing", Window: 3, Lease: time.Minute, Declare: !verifyOnly}
			if !slices.Equal(got, []Binding{want, want}) {
				t.Errorf("prepared %+v, want twice %+v", got, want)
			}
			if n := d.counted("open"); n != 0 || r.sub.InFlight() != 0 {
				t.Errorf("opened %d sources, want none", n)
			}
			r.close()
		})
	}
}

func TestSubscribeInitializeSaysWhatFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onPrepare = func(context.Context, Binding) error { return errCut }
		r := newRig(t, d, SubscriberConfig{Group: "billing"})
		err := r.sub.SubscribeInitialize("orders")
		if !errors.Is(err, errCut) || !strings.Contains(err.Error(), `topic "orders" for group "billing"`) {
			t.Errorf("error is %v", err)
		}
		if err := r.sub.SubscribeInitialize(""); err == nil {
			t.Error("an empty topic is taken")
		}
		r.close()
		if err := r.sub.SubscribeInitialize("orders"); !errors.Is(err, ErrClosed) {
			t.Errorf("after Close: %v, want ErrClosed", err)
		}
	})
}

func TestSubscribeInitializeEndsWithTimeAndStop(t *testing.T) {
	tests := map[string]struct {
		stop bool
		want error
		at   time.Duration
	}{
		"a broker that never answers": {false, context.DeadlineExceeded, openTimeout},
		"stop":                        {true, ErrClosed, time.Second},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(confirming())
				d.onPrepare = func(ctx context.Context, _ Binding) error {
					<-ctx.Done()
					return ctx.Err()
				}
				r := newRig(t, d, SubscriberConfig{})
				if tt.stop {
					time.AfterFunc(tt.at, r.close)
				}
				began := time.Now()
				if err := r.sub.SubscribeInitialize("t"); !errors.Is(err, tt.want) || time.Since(began) != tt.at {
					t.Errorf("after %v: %v, want %v after %v", time.Since(began), err, tt.want, tt.at)
				}
				synctest.Wait()
			})
		})
	}
}
