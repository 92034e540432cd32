package handlertest

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/contracttest/memstore"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// wants fails unless the error says what it should; "" means no error.
func wants(t *testing.T, err error, words string) {
	t.Helper()
	switch {
	case words == "" && err != nil:
		t.Errorf("unexpected: %v", err)
	case words != "" && (err == nil || !strings.Contains(err.Error(), words)):
		t.Errorf("seen: %v\nwant the words: %s", err, words)
	}
}

// saying is a handler for the shop.
type saying = func(context.Context, *sql.Tx, *message.Message) error

// planted is a handler that is wrong, and what each scenario says about it. Where the clean run says something there are
// no others.
type planted struct {
	open  func(t *testing.T) Case[*sql.Tx]
	clean string
	seen  map[string]string // by the name of the scenario; the rest passes
}

// rolledBack gives the scenarios with attempts that are rolled back the same words.
func rolledBack(words, lost string) map[string]string {
	return map[string]string{
		"commit fails": words, "panic after the handler": words, "rolled back and run again": words, "transaction lost": lost,
	}
}

// besides adds a second database to the state, which the handler writes to.
func besides(t *testing.T, through func(ctx context.Context, other *shop, msg *message.Message) error) Case[*sql.Tx] {
	t.Helper()
	s, other := openShop(t), openShop(t)
	return Case[*sql.Tx]{
		Store: s.store, Message: theMessage,
		State: func(ctx context.Context) (any, error) {
			sales, err := s.sales(ctx)
			if err != nil {
				return nil, err
			}
			others, err := other.sales(ctx)
			return [2]any{sales, others}, err
		},
		Handler: func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			return errors.Join(goodSale(ctx, tx, msg), through(ctx, other, msg))
		},
	}
}

// one makes an inShop of a handler that needs no shop.
func one(h saying) func(t *testing.T) Case[*sql.Tx] { return inShop(func(*shop) saying { return h }) }

func registered(
	topic string, register func(m *idempotency.Middleware[*sql.Tx], r *message.Router, sub message.Subscriber) error,
) func(t *testing.T) Case[*sql.Tx] {
	return func(t *testing.T) Case[*sql.Tx] {
		t.Helper()
		s := openShop(t)
		return Case[*sql.Tx]{Store: s.store, Message: theMessage, State: s.sales, Topic: topic, Register: register}
	}
}

func badOnes() map[string]planted {
	all := writers()
	for name, p := range enders() {
		all[name] = p
	}
	for name, p := range forgetful() {
		all[name] = p
	}
	return all
}

// writers write where they must not.
func writers() map[string]planted {
	throughDB := func(s *shop) saying {
		return func(ctx context.Context, _ *sql.Tx, msg *message.Message) error { return sell(ctx, s.db, msg.UUID, 1) }
	}
	return map[string]planted{
		"writes through the database, which has one writer": {
			open: func(t *testing.T) Case[*sql.Tx] {
				t.Helper()
				c := inShop(throughDB)(t)
				c.Config.ContentionRetries = 1_000_000 // found out although it would go on for ever
				return c
			},
			clean: waitsForItself,
		},
		"writes through the database, which has one connection": {
			open: func(t *testing.T) Case[*sql.Tx] {
				t.Helper()
				s := openShop(t)
				s.db.SetMaxOpenConns(1)
				return Case[*sql.Tx]{
					Store: s.store, Message: theMessage, State: s.sales, Handler: throughDB(s),
					Config: idempotency.Config{TxBudget: 300 * time.Millisecond},
				}
			},
			clean: "writes through another handle than its transaction", // it fails, or gets through when the budget ends
		},
		"writes to another database as well": {
			open: func(t *testing.T) Case[*sql.Tx] {
				t.Helper()
				return besides(t, func(ctx context.Context, other *shop, msg *message.Message) error {
					return sell(ctx, other.db, msg.UUID, 1)
				})
			},
			seen: rolledBack(anotherHandle, anotherHandle),
		},
		"never asks for its transaction": {
			open: registered("orders", func(m *idempotency.Middleware[*sql.Tx], r *message.Router, sub message.Subscriber) error {
				r.AddPlugin(m.Plugin)
				r.AddConsumerHandler("sell", "orders", sub, func(*message.Message) error { return nil })
				return nil
			}),
			clean: "never asked for its transaction",
		},
		"subscribes to another topic": {
			open: registered("orders", func(m *idempotency.Middleware[*sql.Tx], r *message.Router, sub message.Subscriber) error {
				r.AddConsumerHandler("sell", "oders", sub, m.Handle(goodSale))
				return nil
			}),
			clean: `nobody subscribed to the case's Topic "orders"`,
		},
	}
}

// enders end their transaction, or the attempt.
func enders() map[string]planted {
	after := func(end func(ctx context.Context, tx *sql.Tx) error) func(t *testing.T) Case[*sql.Tx] {
		return one(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			return errors.Join(goodSale(ctx, tx, msg), end(ctx, tx))
		})
	}
	return map[string]planted{
		"commits":    {open: after(func(_ context.Context, tx *sql.Tx) error { return tx.Commit() }), clean: endsIt},
		"rolls back": {open: after(func(_ context.Context, tx *sql.Tx) error { return tx.Rollback() }), clean: endsIt},
		"commits as text": {open: after(func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "COMMIT")
			return err
		}), clean: endsIt},
		"fails": {open: after(func(context.Context, *sql.Tx) error { return errors.New("no such account") }), clean: "no such account"},
		"panics": {
			open:  after(func(context.Context, *sql.Tx) error { panic("no such account") }),
			clean: "the handler panicked: no such account",
		},
		"leaves its goroutine": {open: after(func(context.Context, *sql.Tx) error { runtime.Goexit(); return nil }), clean: "runtime.Goexit"},
		"refuses for good": {
			open:  after(func(context.Context, *sql.Tx) error { return idempotency.Permanent(errors.New("closed")) }),
			clean: "dead letter says: permanent: ",
		},
		"swallows the error of its statement": {
			open: one(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
				_ = goodSale(ctx, tx, msg)
				return nil
			}),
			seen: map[string]string{"transaction lost": swallows},
		},
		"does nothing": {
			open:  one(func(context.Context, *sql.Tx, *message.Message) error { return nil }),
			clean: "the same before and after",
		},
	}
}

// forgetful ones remember what they should not, or give something else each time.
func forgetful() map[string]planted {
	counting := func(n *atomic.Int64) saying {
		return func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			return sell(ctx, tx, msg.UUID, int(n.Add(1)))
		}
	}
	onlyOnce := func(*shop) saying {
		var seen atomic.Bool
		return func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			if seen.Swap(true) {
				return nil // "I know this one": a filter in memory
			}
			return goodSale(ctx, tx, msg)
		}
	}
	shared := &atomic.Int64{}
	return map[string]planted{
		"counts in memory": {
			open: inShop(func(*shop) saying { return counting(&atomic.Int64{}) }),
			seen: rolledBack(notRepeatable, notRepeatable),
		},
		"counts in memory, in batches": {
			open: func(t *testing.T) Case[*sql.Tx] {
				t.Helper()
				var n atomic.Int64
				c := inShop(func(*shop) saying { return nil })(t)
				c.HandlerBatch = func(ctx context.Context, tx *sql.Tx, msgs []*message.Message) error {
					return sell(ctx, tx, msgs[0].UUID, int(n.Add(1)))
				}
				return c
			},
			seen: rolledBack(notRepeatable, notRepeatable),
		},
		"counts in memory for ever": {open: one(counting(shared)), clean: notFixed},
		"filters in memory": {
			open: inShop(onlyOnce),
			seen: rolledBack(notRepeatable, notRepeatable),
		},
		"fails when it runs again": {
			open: inShop(func(*shop) saying {
				var seen atomic.Bool
				return func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
					if seen.Swap(true) {
						return errors.New("already open")
					}
					return goodSale(ctx, tx, msg)
				}
			}),
			seen: rolledBack("the handler failed", "the handler failed"),
		},
		"an identity that is not one": {
			open: func(t *testing.T) Case[*sql.Tx] {
				t.Helper()
				s := openShop(t)
				var n atomic.Int64
				return Case[*sql.Tx]{
					Store: s.store, Message: theMessage, State: s.sales, Handler: goodSale,
					Config: idempotency.Config{
						Conflict:    idempotency.DivertConflicts,
						Fingerprint: func(*message.Message) []byte { return []byte{byte(n.Add(1))} },
					},
				}
			},
			seen: map[string]string{"duplicate": "unstable", "two at once": "unstable", "restart": "unstable"},
		},
		"a message without identity": {
			open: func(t *testing.T) Case[*sql.Tx] {
				t.Helper()
				s := openShop(t)
				return Case[*sql.Tx]{
					Store: s.store, State: s.sales, Handler: goodSale,
					Message: func() *message.Message { return message.NewMessage("", nil) },
				}
			},
			clean: "dead letter says: refused",
		},
	}
}

func TestBadHandlersAreReported(t *testing.T) {
	for name, p := range badOnes() {
		t.Run(name, func(t *testing.T) {
			once, err := cleanRuns(t, p.open)
			wants(t, err, p.clean)
			if err != nil {
				return
			}
			known := 0
			for _, s := range scenarios[*sql.Tx]() {
				t.Run(s.name, func(t *testing.T) { wants(t, s.check(t, p.open, once), p.seen[s.name]) })
				if p.seen[s.name] != "" {
					known++
				}
			}
			if known != len(p.seen) || known == 0 {
				t.Errorf("%d of %d expectations name a scenario", known, len(p.seen))
			}
		})
	}
}

// On a database with many writers a handler with another handle waits for the row that its own transaction has locked.
func TestHandlerThatWaitsForItsOwnRowIsReported(t *testing.T) {
	_, err := cleanRuns(t, func(*testing.T) Case[*memstore.Tx] {
		db := memstore.NewDatabaseWith(memstore.Options{LockWait: 50 * time.Millisecond})
		store := db.Store()
		return Case[*memstore.Tx]{
			Store: store, Message: theMessage,
			State: func(context.Context) (any, error) { return db.Counters(), nil },
			Handler: func(ctx context.Context, tx *memstore.Tx, _ *message.Message) error {
				other, err := store.Begin(ctx, receipts.TxOptions{})
				if err != nil {
					return err
				}
				err = errors.Join(tx.Add("sales", 1), other.Raw().Add("sales", 1))
				return errors.Join(err, other.Rollback(ctx))
			},
		}
	})
	wants(t, err, waitsForItself)
}

// A handler that stands still is given up.
func TestHandlerThatStandsStillIsReported(t *testing.T) {
	_, err := cleanRuns(t, func(t *testing.T) Case[*sql.Tx] {
		c := one(func(ctx context.Context, _ *sql.Tx, _ *message.Message) error {
			<-ctx.Done()
			return nil
		})(t)
		c.Patience, c.Config.TxBudget = 400*time.Millisecond, 2*time.Second
		return c
	})
	wants(t, err, "not acknowledged within 400ms (the middleware has counted nothing)")
}

// A case that is not fresh cannot be compared.
func TestUsedDatabaseIsRefused(t *testing.T) {
	s := openShop(t)
	open := func(*testing.T) Case[*sql.Tx] {
		return Case[*sql.Tx]{Store: s.store, Message: theMessage, State: s.sales, Handler: goodSale}
	}
	_, err := cleanRuns(t, open)
	wants(t, err, "holds 1 receipts already")

	starts := int64(0)
	_, err = cleanRuns(t, func(t *testing.T) Case[*sql.Tx] {
		fresh := openShop(t)
		starts++
		if err := sell(t.Context(), fresh.db, "earlier", int(starts)); err != nil {
			t.Fatal(err)
		}
		return Case[*sql.Tx]{Store: fresh.store, Message: theMessage, State: fresh.sales, Handler: goodSale}
	})
	wants(t, err, "start differently")
}

// childEnv makes this test binary run a bad handler with Run itself.
const childEnv = "PENSTOCK_HANDLERTEST_CHILD"

func TestRunFailsTheTest(t *testing.T) {
	if name := os.Getenv(childEnv); name != "" {
		Run(t, badOnes()[name].open)
		return
	}
	tests := map[string][]string{
		"commits": {
			"--- FAIL: TestRunFailsTheTest/clean_run", "promise: a message that nothing disturbs", "seen:    " + endsIt,
		},
		"counts in memory": {
			"--- PASS: TestRunFailsTheTest/clean_run", "--- FAIL: TestRunFailsTheTest/commit_fails",
			"promise: when COMMIT fails", "seen:    " + notRepeatable, "{ID:m-1 N:1}", "{ID:m-1 N:2}",
			"--- FAIL: TestRunFailsTheTest/rolled_back_and_run_again", "{ID:m-1 N:4}", "--- PASS: TestRunFailsTheTest/restart",
		},
	}
	for name, want := range tests {
		t.Run(name, func(t *testing.T) {
			binary, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), binary, "-test.run=^TestRunFailsTheTest$", "-test.v")
			cmd.Env = append(os.Environ(), childEnv+"="+name)
			cmd.Dir = filepath.Dir(binary)
			out, err := cmd.CombinedOutput()
			if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 1 {
				t.Errorf("the child ended with %v, want exit status 1\n%s", err, out)
			}
			for _, words := range want {
				if !strings.Contains(string(out), words) {
					t.Errorf("the child did not say %q\n%s", words, out)
				}
			}
		})
	}
}
