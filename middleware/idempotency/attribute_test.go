package idempotency

import (
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

// leaves is a handler's statement that the store holds back, and that fails later.
func leaves(err error) func(*message.Message) error {
	return func(msg *message.Message) error {
		txIn(msg).hold(err)
		return nil
	}
}

func txIn(msg *message.Message) *fakeTx {
	tx, err := TxFrom[*fakeTx](msg.Context())
	if err != nil {
		panic(err)
	}
	return tx
}

// both lets two messages act, and the others do nothing.
func both(one string, f func(*message.Message) error, two string, g func(*message.Message) error) func(*message.Message) error {
	return func(msg *message.Message) error {
		if msg.UUID == two {
			return g(msg)
		}
		return only(one, f)(msg)
	}
}

// A statement that was held back fails later: at COMMIT, or in another message's handler. Its own message is charged, and the
// others commit, whatever the one does that met the error.
func TestStatementsThatAreHeldBack(t *testing.T) {
	meets := func(msg *message.Message) error { return txIn(msg).send() }
	ignores := func(msg *message.Message) error { _ = txIn(msg).send(); return nil }
	givesUp := func(msg *message.Message) error { return maybePermanent(txIn(msg).send()) }
	for how, act := range map[string]func(*message.Message) error{
		"at commit":                      only("b", leaves(errHandler)),
		"at commit, the first":           both("b", leaves(errHandler), "c", func(*message.Message) error { return nil }),
		"met by a later one":             both("b", leaves(errHandler), "d", meets),
		"ignored by a later one":         both("b", leaves(errHandler), "d", ignores),
		"taken for good by a later one":  both("b", leaves(errHandler), "d", givesUp),
		"met by its own":                 only("b", func(msg *message.Message) error { txIn(msg).hold(errHandler); return txIn(msg).send() }),
		"met while outputs were stored":  both("b", leaves(errHandler), "out", func(*message.Message) error { return nil }),
		"a neighbour is the one to wait": both("b", leaves(errHandler), "a", func(*message.Message) error { return nil }),
	} {
		for _, parts := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, parts %v", how, parts), func(t *testing.T) {
				pub := &recording{}
				bubble(t, func(c *Config, s *fakeStore) {
					c.Outputs = pub
					s.info.Parts = parts
				}, func(e *env) {
					h := e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
						_, err := marked(act)(msg)
						if msg.UUID == "out" {
							return []*message.Message{message.NewMessage("o-1", nil)}, err
						}
						return nil, err
					})
					c := e.share(h, orders("a b c d out e")...)
					c.wantEndings("b:failed")
					e.wantApplied("a c d out e")
					e.wantCounts(map[string]uint64{"Handled": 5, "Failed": 1, "OutputsSent": 1})
				})
			})
		}
	}
}

func maybePermanent(err error) error {
	if err == nil {
		return nil
	}
	return Permanent(err)
}

// All or nothing: the message whose statement failed is charged, the others go back, uncharged.
func TestHeldBackAllOrNothing(t *testing.T) {
	bubble(t, func(c *Config, s *fakeStore) {
		c.Atomicity = PerBatch
		s.info.Parts = false
	}, func(e *env) {
		c := e.share(e.marking(only("b", leaves(errHandler))), messages("a b c")...)
		c.wantEndings("a:returned", "b:failed", "c:returned")
		e.wantApplied("")
	})
}

// Contention and outages are nobody's fault, also where a statement met them that was held back.
func TestHeldBackMeetsTheDatabase(t *testing.T) {
	bubble(t, func(_ *Config, s *fakeStore) { s.info.Parts = false }, func(e *env) {
		met := false
		c := e.share(e.marking(only("b", func(msg *message.Message) error {
			if !met {
				txIn(msg).hold(errBusy)
			}
			met = true
			return nil
		})), messages("a b c")...)
		c.wantEndings()
		e.wantApplied("a b c")
		if e.m.Report().Contention == 0 {
			e.Error("contention was not counted")
		}
	})
}

// A message alone is charged at once.
func TestHeldBackAlone(t *testing.T) {
	bubble(t, nil, func(e *env) {
		c := e.share(e.marking(leaves(errHandler)), messages("a")...)
		c.wantEndings("a:failed")
		e.wantApplied("")
		if n := e.store.count("commit"); n != 1 {
			e.Errorf("%d commits were tried, want 1", n)
		}
	})
}
