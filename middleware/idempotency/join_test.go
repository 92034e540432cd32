package idempotency

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
)

// T28: plugin, Wrap and Handle on one path.
func TestLevelsOfOneMessageJoin(t *testing.T) {
	pub := &recording{}
	e := newEnv(t, withOutputs(pub))
	handle := e.m.HandleOutputs("named", func(_ context.Context, tx *fakeTx, _ *message.Message) ([]*message.Message, error) {
		tx.add("done", 1)
		return []*message.Message{message.NewMessage("o-1", nil)}, nil
	})
	wrapped := e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("o-2", nil)}, handle(msg)
	})
	plugged := e.m.Wrap(wrapped)
	for range 2 {
		if _, err := plugged(order("u-1")); err != nil {
			t.Fatal(err)
		}
	}
	e.wantEffect(1)
	e.wantCounts(map[string]uint64{"Handled": 1, "Replayed": 1, "OutputsSent": 2})
	if e.store.count("begin") != 2 || e.store.count("claim") != 2 {
		t.Errorf("%d transactions, %d claims", e.store.count("begin"), e.store.count("claim"))
	}
	want := []published{{"named", "o-1", ""}, {"shipped", "o-2", ""}}
	if got := pub.all(); len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("published %v", got)
	}
}

func TestOtherMessagesDoNotJoin(t *testing.T) {
	tests := map[string]func(outer *message.Message) *message.Message{
		"another identity": func(outer *message.Message) *message.Message { return msgIn(outer.Context(), "u-2") },
		"another scope": func(outer *message.Message) *message.Message {
			return msgIn(&routed{Context: outer.Context(), handler: "ship", topic: "orders"}, "u-1")
		},
		"no identity": func(outer *message.Message) *message.Message { return msgIn(outer.Context(), "") },
	}
	for name, inner := range tests {
		t.Run(name, func(t *testing.T) {
			for _, swallow := range []bool{false, true} {
				bubble(t, nil, func(e *env) {
					start := time.Now()
					_, err := e.acting(func(msg *message.Message) error {
						_, err := e.counting()(inner(msg))
						if swallow {
							return nil
						}
						return err
					})(deliver("u-1", "p"))
					if !errors.Is(err, ErrNested) || IsFailure(err) || time.Since(start) > time.Second {
						e.Errorf("got %v after %v", err, time.Since(start))
					}
					e.wantEffect(0)
				})
			}
		})
	}
	t.Run("own context", func(t *testing.T) { // of a message that only happens to be handled inside
		e := newEnv(t, func(_ *Config, s *fakeStore) { s.info.Lanes, s.writer = 2, make(chan struct{}, 2) })
		_, err := e.acting(func(*message.Message) error {
			_, err := e.counting()(deliver("u-2", "p"))
			return err
		})(deliver("u-1", "p"))
		if err != nil {
			t.Error(err)
		}
		e.wantEffect(2)
	})
	t.Run("a context whose transaction is over", func(t *testing.T) { // GoChannel with PreserveContext
		e := newEnv(t, nil)
		var kept *message.Message
		_, _ = e.acting(func(msg *message.Message) error { kept = msg; return nil })(deliver("u-1", "p"))
		if _, err := e.counting()(msgIn(context.WithoutCancel(kept.Context()), "u-2")); err != nil {
			t.Error(err)
		}
		e.wantEffect(2)
	})
}

func TestTwoMiddlewares(t *testing.T) {
	t.Run("over one store", func(t *testing.T) {
		bubble(t, nil, func(e *env) {
			other, err := New(e.store, Config{Consumer: "shipping"})
			if err != nil {
				e.Fatal(err)
			}
			_, err = other.Wrap(e.counting())(deliver("u-1", "p"))
			if !errors.Is(err, ErrNested) || IsFailure(err) {
				e.Errorf("got %v", err)
			}
			e.wantEffect(0)
		})
	})
	t.Run("over two stores", func(t *testing.T) {
		e, other := newEnv(t, nil), newEnv(t, func(c *Config, _ *fakeStore) { c.Outputs = &recording{} })
		inner := e.acting(func(msg *message.Message) error {
			if c := carrierOf(msg.Context(), other.m); c == nil || c.tx != any(c.tx.(*fakeTx)) {
				t.Error("the outer transaction is hidden")
			}
			return other.m.Publisher(nil).Publish("t", msgIn(msg.Context(), "o-1"))
		})
		if _, err := other.m.Wrap(inner)(deliver("u-1", "p")); err != nil {
			t.Fatal(err)
		}
		e.wantEffect(1)
		if len(other.store.receipts) != 1 || len(other.store.outputs) != 1 || len(e.store.outputs) != 0 {
			t.Error("each has its own receipt, and the output belongs to the outer one")
		}
	})
}

// T23, inside: a middleware that swallows the handler's error, or runs the handler again after one, cannot commit half of
// it.
func TestInsideMiddlewaresThatSwallow(t *testing.T) {
	swallow := func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			defer func() { _ = recover() }()
			_, _ = h(msg)
			return nil, nil
		}
	}
	poison, err := middleware.PoisonQueue(&recording{}, "poison")
	if err != nil {
		t.Fatal(err)
	}
	insides := map[string]message.HandlerMiddleware{
		"swallow":      swallow,
		"PoisonQueue":  poison,
		"IgnoreErrors": middleware.NewIgnoreErrors([]error{errHandler}).Middleware,
		"Retry":        middleware.Retry{MaxRetries: 3, InitialInterval: time.Millisecond}.Middleware,
		"Recoverer":    middleware.Recoverer,
	}
	acts := map[string]func(*message.Message) error{
		"error": func(*message.Message) error { return errHandler },
		"panic": func(*message.Message) error { panic("boom") },
	}
	for name, inside := range insides {
		for act, f := range acts {
			if act == "panic" && name != "swallow" && name != "Recoverer" {
				continue
			}
			t.Run(name+" "+act, func(t *testing.T) {
				for _, joined := range []bool{false, true} {
					bubble(t, func(c *Config, _ *fakeStore) {
						if !joined {
							c.Inside = []message.HandlerMiddleware{inside}
						}
					}, func(e *env) {
						runs := 0
						h := e.acting(func(msg *message.Message) error { runs++; return f(msg) })
						if joined {
							h = e.m.Wrap(inside(h)) // the router put it between plugin and handler
						}
						_, err := h(deliver("u-1", "p"))
						if err == nil || !IsFailure(err) || runs != 1 {
							e.Errorf("got %v after %d runs", err, runs)
						}
						if name == "swallow" && !errors.Is(err, ErrTxFailed) {
							e.Errorf("got %v", err)
						}
						e.wantEffect(0)
						e.wantCounts(map[string]uint64{"Failed": 1})
					})
				}
			})
		}
	}
}

// What was swallowed inside still tells whose failure it is.
func TestSwallowedContentionIsContention(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) {
		c.Inside = []message.HandlerMiddleware{middleware.NewIgnoreErrors([]error{errBusy}).Middleware}
	}, func(e *env) {
		runs := 0
		_, err := e.acting(func(*message.Message) error {
			if runs++; runs == 1 {
				return errBusy
			}
			return nil
		})(deliver("u-1", "p"))
		if err != nil {
			e.Error(err)
		}
		e.wantEffect(1)
		e.wantCounts(map[string]uint64{"Handled": 1, "Contention": 1})
	})
}

func TestInsideMiddlewareThatReplacesTheContext(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) {
		c.Inside = []message.HandlerMiddleware{func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				msg.SetContext(context.Background())
				return h(msg)
			}
		}}
	}, func(e *env) {
		_, err := e.counting()(deliver("u-1", "p"))
		if !errors.Is(err, ErrNoTx) || !strings.Contains(err.Error(), "replaced the message's context") {
			e.Errorf("got %v", err)
		}
		e.wantEffect(0)
	})
}

func TestInsideRunsOnceInItsOrder(t *testing.T) {
	var trail []string
	mark := func(name string) message.HandlerMiddleware {
		return func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				trail = append(trail, name)
				return h(msg)
			}
		}
	}
	e := newEnv(t, func(c *Config, _ *fakeStore) { c.Inside = []message.HandlerMiddleware{mark("first"), mark("second")} })
	if _, err := e.m.Wrap(e.counting())(deliver("u-1", "p")); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(trail, " "); got != "first second" {
		t.Errorf("ran %s", got)
	}
}
