package idempotency

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

func TestOutagePausesAndResumes(t *testing.T) {
	places := map[string]func(s *fakeStore, fault func(int) error){
		"begin": func(s *fakeStore, fault func(int) error) { s.onBegin = fault },
		"claim": func(s *fakeStore, fault func(int) error) { s.onClaim = fault },
		"commit": func(s *fakeStore, fault func(int) error) {
			s.onCommit = func(n int) commitFault { return commitFault{err: fault(n)} }
		},
	}
	for name, place := range places {
		t.Run(name, func(t *testing.T) {
			bubble(t, nil, func(e *env) {
				var mu sync.Mutex
				away := true
				gone := func() bool {
					mu.Lock()
					defer mu.Unlock()
					return away
				}
				place(e.store, func(int) error {
					if !gone() {
						return nil
					}
					time.Sleep(10 * time.Millisecond) // so that the others queue for the lane
					return errGone
				})
				h := e.counting()
				start := time.Now()
				var wg sync.WaitGroup
				errs := make([]error, 50)
				infos := make([]*sdk.DeliveryInfo, 50)
				for i := range errs {
					wg.Go(func() {
						msg, info := withDelivery(deliver(fmt.Sprint(i), "p"))
						infos[i] = info
						_, errs[i] = h(msg)
					})
				}
				time.Sleep(20 * time.Millisecond)
				if r := e.m.Report(); !r.Health.Paused || r.Health.PausedSince.Before(start) || !strings.Contains(r.Health.Reason, errGone.Error()) {
					e.Errorf("health %+v", r.Health)
				}
				wg.Wait()
				if d := time.Since(start); d > patience+time.Second {
					e.Errorf("the messages waited for %v", d)
				}
				for i, err := range errs {
					if !errors.Is(err, ErrDatabaseAway) || IsFailure(err) {
						e.Errorf("message %d: %v", i, err)
					}
					if requeueDelay(infos[i]) < time.Second {
						e.Errorf("message %d is requeued after %v", i, requeueDelay(infos[i]))
					}
				}
				if tries := e.store.count("begin"); tries < 2 || tries > 15 {
					e.Errorf("%d transactions were tried: one message at a time should probe", tries)
				}
				e.wantEffect(0)
				e.wantCounts(map[string]uint64{"Returned": 50, "Outages": 1})

				mu.Lock()
				away = false
				mu.Unlock()
				time.Sleep(time.Minute) // nobody comes: nothing probes
				for i := range errs {
					wg.Go(func() {
						if _, err := h(deliver(fmt.Sprint(i), "p")); err != nil {
							e.Error(err)
						}
					})
				}
				wg.Wait()
				e.wantEffect(50)
				e.wantCounts(map[string]uint64{"Handled": 50, "Returned": 50, "Outages": 1})
				if e.m.Report().Health.Paused || len(e.store.letters) != 0 {
					e.Error("still paused, or diverted")
				}
			})
		})
	}
}

func TestShortOutageIsNotSeenOutside(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.onBegin = times(3, errGone) }, func(e *env) {
		h := e.counting()
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				if _, err := h(deliver(fmt.Sprint(i), "p")); err != nil {
					e.Error(err)
				}
			})
		}
		wg.Wait()
		e.wantEffect(20)
		e.wantCounts(map[string]uint64{"Handled": 20, "Outages": 1})
	})
}

func TestOutageInsideTheHandlerDivertsNothing(t *testing.T) {
	bubble(t, nil, func(e *env) {
		_, err := e.acting(func(*message.Message) error { return Permanent(errGone) })(deliver("u-1", "p"))
		if !errors.Is(err, ErrDatabaseAway) || !errors.Is(err, errGone) && IsFailure(err) {
			e.Errorf("got %v", err)
		}
		e.wantCounts(map[string]uint64{"Returned": 1, "Outages": 1})
	})
}

func TestOutageOfOneHandlersOwnDatabaseStopsNobodyForLong(t *testing.T) {
	bubble(t, nil, func(e *env) {
		bad := e.acting(func(*message.Message) error { return errGone })
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					start := time.Now()
					if _, err := bad(deliver("bad", "p")); !errors.Is(err, ErrDatabaseAway) || time.Since(start) > patience+time.Second {
						e.Errorf("%v after %v", err, time.Since(start))
					}
				}
			}
		})
		for i := range 20 {
			for {
				if _, err := e.counting()(deliver(fmt.Sprint(i), "p")); err == nil {
					break
				}
			}
			time.Sleep(300 * time.Millisecond)
		}
		close(stop)
		wg.Wait()
		e.wantEffect(20)
	})
}

func TestCancelledWhileTheDatabaseIsAway(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.onBegin = func(int) error { return errGone } }, func(e *env) {
		msg, cancel := withCancel(deliver("u-1", "p"))
		start := time.Now()
		time.AfterFunc(time.Second, cancel)
		_, err := e.counting()(msg)
		if !errors.Is(err, context.Canceled) || IsFailure(err) || time.Since(start) > time.Second {
			e.Errorf("got %v after %v", err, time.Since(start))
		}
	})
}

func TestExhaustedPoolIsAnOutage(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.TxBudget = time.Second }, func(e *env) {
		e.store.writer <- struct{}{} // somebody else has the only connection
		_, err := e.counting()(deliver("u-1", "p"))
		if !errors.Is(err, ErrDatabaseAway) || IsFailure(err) || !e.m.Report().Health.Paused {
			e.Errorf("got %v", err)
		}
		<-e.store.writer
		if _, err := e.counting()(deliver("u-1", "p")); err != nil {
			e.Error(err)
		}
		e.wantEffect(1)
	})
}

// A client that hands on the network's error as it is does not say whose connection it was. Where the transaction's turns out to
// be lost at the rollback, nobody is charged; a handler whose own context ended, or whose own network fails, is.
func TestLostConnectionInsideTheHandler(t *testing.T) {
	reset := &net.OpError{Op: "read", Err: errors.New("connection reset by peer")}
	for name, c := range map[string]struct {
		err      error
		rollback error
		want     string
	}{
		"reset, and the connection is lost":   {reset, errGone, "done"},
		"EOF, and the connection is lost":     {fmt.Errorf("read: %w", io.EOF), errGone, "done"},
		"bad connection":                      {driver.ErrBadConn, errGone, "done"},
		"reset of another connection":         {reset, nil, "failed"},
		"the context of a statement ended":    {fmt.Errorf("%w: %w", context.DeadlineExceeded, reset), errGone, "failed"},
		"another error, the connection lost":  {errHandler, errGone, "failed"},
		"the rollback fails for other causes": {reset, errSQL, "failed"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(_ *Config, s *fakeStore) { s.onRollback = func() error { return c.rollback } }, func(e *env) {
				first := true
				crowd := e.share(e.marking(func(*message.Message) error {
					if !first {
						return nil
					}
					first = false
					return c.err
				}), messages("a")...)
				if got := crowd.all[0].String(); got != c.want {
					e.Errorf("the delivery is %s, want %s", got, c.want)
				}
			})
		})
	}
}
