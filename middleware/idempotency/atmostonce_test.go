package idempotency

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// At most once, a batch's receipts commit before any of its handlers runs, and the handlers run in transactions without
// claims: also while new messages arrive all the time.
func TestClaimsAndHandlersDoNotShareATransaction(t *testing.T) {
	for _, lanes := range []int{1, 3} {
		bubble(t, guaranteed(AtMostOnce, func(c *Config, s *fakeStore) {
			s.several(lanes)
			c.BatchSize = 3
			slowCommit(s, 10*time.Millisecond)
		}), func(e *env) {
			h := e.marking(func(msg *message.Message) error {
				tx, _ := TxFrom[*fakeTx](msg.Context())
				if len(tx.fresh) != 0 {
					e.Errorf("the handler of %s shares its transaction with %d claims", msg.UUID, len(tx.fresh))
				}
				e.store.mu.Lock()
				defer e.store.mu.Unlock()
				scope, _ := e.m.scopeOf("charge", "orders")
				if held, there := e.store.receipts[receiptKey(scope, []byte(msg.UUID))]; !there || !e.store.markers[held.Nonce] {
					e.Errorf("the receipt of %s is not committed yet", msg.UUID)
				}
				return nil
			})
			c := &crowd{e: e}
			for _, msg := range numbered(40) {
				c.enter(h, msg)
				time.Sleep(3 * time.Millisecond)
			}
			c.wait()
			c.wantEndings()
			for i := range 40 {
				if got := e.store.effect("u:" + c.all[i].msg.UUID); got != 1 {
					e.Errorf("effect %d of message %d", got, i)
				}
			}
		})
	}
}

// What goes away between its receipt and its handler is lost, not applied twice; its neighbours are applied.
func TestAtMostOnceBetweenReceiptAndHandler(t *testing.T) {
	bubble(t, guaranteed(AtMostOnce, nil), func(e *env) {
		gone, cancel := withCancel(deliver("b", "p"))
		e.store.onCommit = func(n int) commitFault {
			if n == 1 {
				cancel()
			}
			return commitFault{}
		}
		h := e.marking(nil)
		c := e.share(h, deliver("a", "p"), gone, deliver("c", "p"))
		c.wantEndings("b:returned")
		c.enter(h, deliver("b", "p"))
		c.wait()
		c.all = c.all[3:]
		c.wantEndings()
		e.wantApplied("a c")
		e.wantCounts(map[string]uint64{"Handled": 2, "Returned": 1, "Replayed": 1})
	})
}

// At most once, no failure of one runs another one's handler again after it may have been committed, nor loses one whose
// handler did not run.
func TestAtMostOnceNeighboursOfAFailure(t *testing.T) {
	for name, ill := range ailments() {
		for _, parts := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				bubble(t, guaranteed(AtMostOnce, func(c *Config, s *fakeStore) {
					if s.info.Parts = parts; ill.change != nil {
						ill.change(c, s)
					}
				}), func(e *env) {
					if ill.ours && ill.ends == "returned" {
						return // what was lost and finishes is applied all the same: TestCancelledContext
					}
					badNeighbour(e, ill, "c", "a b c d e")
				})
			})
		}
	}
}

// The context in which a transaction waits is its first message's. When that one goes away while it waits, for a connection
// or for a claim, the others wait on without it.
func TestTheFirstOfABatchGoesAway(t *testing.T) {
	for _, where := range []string{"begin", "claim"} {
		t.Run(where, func(t *testing.T) {
			bubble(t, func(_ *Config, s *fakeStore) { s.several(2) }, func(e *env) {
				ctx, cancel := context.WithCancel(context.Background())
				time.AfterFunc(50*time.Millisecond, cancel)
				first := deliver("a", "p")
				first.SetContext(&routed{Context: ctx, handler: "charge", topic: "orders"})
				switch where {
				case "begin":
					for range cap(e.store.writer) {
						e.store.writer <- struct{}{}
						time.AfterFunc(3*time.Second, func() { <-e.store.writer })
					}
				case "claim":
					e.claimElsewhere("c", 3*time.Second)
				}
				c := e.share(e.marking(nil), first, deliver("b", "p"), deliver("c", "p"))
				c.wantEndings("a:returned")
				e.wantApplied("b c")
				if took := c.of("a").took; took != 50*time.Millisecond {
					e.Errorf("the first one left after %v", took)
				}
				if took := c.of("b").took; where == "claim" && took > time.Second || took > 3100*time.Millisecond {
					e.Errorf("the second one took %v", took)
				}
			})
		})
	}
}
