package idempotency

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

var errHandler = errors.New("no such customer")

func TestHandlerEndings(t *testing.T) {
	tests := []struct {
		name    string
		act     func(msg *message.Message) error
		err     error
		failure bool
	}{
		{"nil", func(*message.Message) error { return nil }, nil, false},
		{"ack", func(msg *message.Message) error { msg.Ack(); return nil }, nil, false},
		{"ack then nack", func(msg *message.Message) error { msg.Ack(); msg.Nack(); return nil }, nil, false},
		{"error", func(*message.Message) error { return errHandler }, errHandler, true},
		{"ack then error", func(msg *message.Message) error { msg.Ack(); return errHandler }, errHandler, true},
		{"nack then nil", func(msg *message.Message) error { msg.Nack(); return nil }, errNacked, true},
		{"deadline of its own", func(*message.Message) error { return context.DeadlineExceeded }, context.DeadlineExceeded, true},
		{"cancel of its own", func(*message.Message) error { return context.Canceled }, context.Canceled, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, nil, func(e *env) {
				msg := deliver("u-1", "p")
				_, err := e.acting(tt.act)(msg)
				if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) || IsFailure(err) != tt.failure {
					e.Errorf("got %v, failure %v", err, IsFailure(err))
				}
				select {
				case <-msg.Acked():
					e.Error("the original was acked")
				case <-msg.Nacked():
					e.Error("the original was nacked")
				default:
				}
				if tt.err == nil {
					e.wantEffect(1)
					e.wantCounts(map[string]uint64{"Handled": 1})
					return
				}
				e.wantEffect(0)
				e.wantCounts(map[string]uint64{"Failed": 1})
				if !strings.Contains(err.Error(), `handler "charge", topic "orders", message "u-1"`) {
					e.Errorf("the error does not name its message: %v", err)
				}
			})
		})
	}
}

func TestPanicComesThroughAfterTheRollback(t *testing.T) {
	bubble(t, nil, func(e *env) {
		value := &struct{ s string }{"boom"}
		var kept *message.Message // the shadow: its context stays reachable
		h := e.acting(func(msg *message.Message) error { kept = msg; panic(value) })
		start := time.Now()
		func() {
			defer func() {
				if got := recover(); got != any(value) {
					e.Errorf("recovered %v", got)
				}
				e.wantEffect(0) // rolled back by the time an outer Recoverer sees it
				if _, err := TxFrom[*fakeTx](kept.Context()); !errors.Is(err, ErrTxOver) {
					e.Errorf("TxFrom afterwards: %v", err)
				}
			}()
			_, _ = h(deliver("u-1", "p"))
		}()
		if time.Since(start) < 100*time.Millisecond {
			e.Error("a foreign subscriber's message was not held")
		}
		e.wantCounts(map[string]uint64{"Failed": 1})
		if _, err := e.counting()(deliver("u-1", "p")); err != nil {
			e.Error(err)
		}
		e.wantEffect(1)
	})
}

func TestGoexitNacksAndFreesTheLane(t *testing.T) {
	bubble(t, nil, func(e *env) {
		h := e.acting(func(*message.Message) error { runtime.Goexit(); return nil })
		msg := deliver("u-1", "p")
		go func() { _, _ = h(msg) }()
		<-msg.Nacked()
		synctest.Wait()
		e.wantEffect(0)
		e.wantCounts(map[string]uint64{"Failed": 1})
		if len(e.log.Captured()[watermill.ErrorLogLevel]) != 1 { // the router says nothing of it
			e.Error("Goexit leaves no trace in the log")
		}
		if _, err := e.counting()(deliver("u-1", "p")); err != nil {
			e.Error(err)
		}
		e.wantEffect(1)
	})
}

func TestHandlerSeesAShadow(t *testing.T) {
	e := newEnv(t, nil)
	msg := deliver("u-1", "p")
	msg.Metadata.Set("k", "v")
	ctx := msg.Context()
	h := e.acting(func(shadow *message.Message) error {
		if shadow == msg || shadow.UUID != "u-1" || string(shadow.Payload) != "p" || shadow.Metadata.Get("k") != "v" {
			t.Errorf("the handler got %+v", shadow)
		}
		if message.HandlerNameFromCtx(shadow.Context()) != "charge" {
			t.Error("the router's values are missing")
		}
		if deadline, ok := shadow.Context().Deadline(); !ok || time.Until(deadline) > defaultTxBudget {
			t.Errorf("deadline %v, %v", deadline, ok)
		}
		shadow.UUID = "other"
		shadow.Metadata.Set("k", "changed")
		shadow.Payload[0] = 'X'
		shadow.SetContext(context.Background())
		return nil
	})
	if _, err := h(msg); err != nil {
		t.Fatal(err)
	}
	if msg.UUID != "u-1" || msg.Metadata.Get("k") != "v" || string(msg.Payload) != "p" || msg.Context() != ctx {
		t.Errorf("the original was changed: %+v", msg)
	}
	if _, err := TxFrom[*fakeTx](msg.Context()); !errors.Is(err, ErrNoTx) {
		t.Errorf("the transaction leaked: %v", err)
	}
}

func TestTheTransactionEndsWithTheHandler(t *testing.T) {
	e := newEnv(t, nil)
	var kept *message.Message // the shadow: its context stays reachable
	h := e.acting(func(msg *message.Message) error { kept = msg; return nil })
	e.store.onCommit = func(int) commitFault {
		if _, err := TxFrom[*fakeTx](kept.Context()); !errors.Is(err, ErrTxOver) {
			t.Errorf("TxFrom during the commit: %v", err)
		}
		return commitFault{}
	}
	if _, err := h(deliver("u-1", "p")); err != nil {
		t.Fatal(err)
	}
	if _, err := TxFrom[*fakeTx](kept.Context()); !errors.Is(err, ErrTxOver) {
		t.Errorf("TxFrom afterwards: %v", err)
	}
	if _, err := TxFrom[int](kept.Context()); !errors.Is(err, ErrNoTx) || !strings.Contains(err.Error(), "*idempotency.fakeTx") {
		t.Errorf("TxFrom of another type: %v", err)
	}
	if kept.Context().Err() == nil {
		t.Error("the handler's context goes on")
	}
}

func TestTxBudget(t *testing.T) {
	for _, tt := range []struct {
		name string
		act  func(ctx context.Context) error
	}{
		{"a handler that listens", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }},
		{"a handler that does not", func(context.Context) error { time.Sleep(4 * time.Second); return nil }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(c *Config, _ *fakeStore) { c.TxBudget = 3 * time.Second }, func(e *env) {
				_, err := e.acting(func(msg *message.Message) error { return tt.act(msg.Context()) })(deliver("u-1", "p"))
				if !errors.Is(err, context.DeadlineExceeded) || !IsFailure(err) || !strings.Contains(err.Error(), "TxBudget of 3s is over") {
					e.Errorf("got %v", err)
				}
				e.wantEffect(0)
			})
		})
	}
}

func TestHandlerThatStandsStill(t *testing.T) {
	bubble(t, nil, func(e *env) {
		free := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := e.acting(func(msg *message.Message) error {
				tx, _ := TxFrom[*fakeTx](msg.Context())
				time.AfterFunc(defaultTxBudget, func() { _ = tx.Rollback(context.Background()) }) // as a store does
				<-free
				return nil
			})(deliver("u-1", "p"))
			if !errors.Is(err, context.DeadlineExceeded) || !IsFailure(err) {
				e.Errorf("got %v", err)
			}
		})
		synctest.Wait()
		start := time.Now()
		for _, uuid := range []string{"u-2", "u-3"} {
			if _, err := e.counting()(deliver(uuid, "p")); err != nil {
				e.Error(err)
			}
		}
		if d := time.Since(start); d > defaultTxBudget {
			e.Errorf("the others waited for %v", d)
		}
		close(free)
		wg.Wait()
		e.wantEffect(2)
	})
}

func TestHandlersThatNeverAskForTheirTransaction(t *testing.T) {
	bystander := func(*message.Message) ([]*message.Message, error) { return nil, nil }
	t.Run("counted and logged once", func(t *testing.T) {
		e := newEnv(t, nil)
		for _, uuid := range []string{"a", "b", "c"} {
			if _, err := e.m.Wrap(bystander)(deliver(uuid, "p")); err != nil {
				t.Fatal(err)
			}
		}
		e.wantCounts(map[string]uint64{"Handled": 3, "WithoutTx": 3})
		if n := len(e.log.Captured()[watermill.ErrorLogLevel]); n != 1 {
			t.Errorf("%d lines logged", n)
		}
	})
	t.Run("refused", func(t *testing.T) {
		bubble(t, func(c *Config, _ *fakeStore) { c.RequireTx = true }, func(e *env) {
			_, err := e.m.Wrap(bystander)(deliver("a", "p"))
			if !errors.Is(err, ErrTxUnused) || IsFailure(err) || len(e.store.receipts) != 0 {
				e.Errorf("got %v, %d receipts", err, len(e.store.receipts))
			}
			if err := e.m.Handle(func(context.Context, *fakeTx, *message.Message) error { return nil })(deliver("a", "p")); err != nil {
				e.Errorf("Handle counts as asked: %v", err)
			}
			if err := e.m.HandleOutputs("t", func(context.Context, *fakeTx, *message.Message) ([]*message.Message, error) { return nil, nil })(deliver("b", "p")); err != nil {
				e.Errorf("HandleOutputs counts as asked: %v", err)
			}
			if _, err := e.counting()(deliver("c", "p")); err != nil {
				e.Errorf("TxFrom counts as asked: %v", err)
			}
		})
	})
}
