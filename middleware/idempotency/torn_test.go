package idempotency

import (
	"errors"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// stealing is a handler that commits its transaction by hand, which it must not do, and then returns err.
func stealing(err error) func(msg *message.Message) error {
	return func(msg *message.Message) error {
		tx, _ := TxFrom[*fakeTx](msg.Context())
		tx.commitByHand()
		return err
	}
}

// T30 with neighbours: those that ran before are torn and diverted, and so is whatever was claimed with them. Nothing is
// lost, nothing is replayed, and where it shows whose doing it was, that one alone is charged.
func TestHandlerEndsTheTransactionOfItsNeighbours(t *testing.T) {
	for _, parts := range []bool{true, false} {
		for _, err := range []error{nil, errHandler} {
			for _, bad := range []string{"a", "b", "d"} {
				t.Run(fmt.Sprintf("%s, %v, parts %v", bad, err, parts), func(t *testing.T) {
					bubble(t, func(_ *Config, s *fakeStore) { s.info.Parts = parts }, func(e *env) {
						c := e.share(e.marking(only(bad, stealing(err))), messages("a b c d")...)
						if parts {
							c.wantEndings(bad + ":failed")
							if !errors.Is(c.of(bad).err, map[bool]error{true: receipts.ErrTxEnded, false: err}[err == nil]) {
								e.Errorf("got %v", c.of(bad).err)
							}
						} else {
							c.wantEndings()
						}
						torn := uint64(4)
						want := map[string]uint64{"Torn": torn}
						if parts {
							want = map[string]uint64{"Torn": torn - 1, "Failed": 1}
						}
						e.wantCounts(want)
						for _, l := range e.store.letters {
							if l.Kind != receipts.KindTorn {
								e.Errorf("dead letter %+v", l)
							}
						}
						for uuid, n := range e.store.effects {
							if n > 1 {
								e.Errorf("effect of %s: %d", uuid, n)
							}
						}
					})
				})
			}
		}
	}
}

// The same for at-most-once, whose receipts are committed already: a neighbour that ran before must not run again.
func TestHandlerEndsTheTransactionAtMostOnce(t *testing.T) {
	for _, tt := range []struct {
		name  string
		parts bool
		err   error
		want  []string
	}{
		{"parts", true, nil, []string{"a:returned", "b:failed"}},
		{"parts, and fails", true, errHandler, []string{"a:returned", "b:failed"}},
		{"no parts", false, nil, []string{"a:returned", "b:returned", "c:returned"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, guaranteed(AtMostOnce, func(_ *Config, s *fakeStore) { s.info.Parts = tt.parts }), func(e *env) {
				runs := map[string]int{}
				c := e.share(e.marking(func(msg *message.Message) error {
					runs[msg.UUID]++
					return only("b", stealing(tt.err))(msg)
				}), messages("a b c")...)
				c.wantEndings(tt.want...)
				for uuid, n := range runs {
					if n != 1 || e.store.effects["u:"+uuid] > 1 {
						e.Errorf("%s ran %d times, its effect is %d", uuid, n, e.store.effects["u:"+uuid])
					}
				}
				if o := c.of("a"); !errors.Is(o.err, ErrUndecided) {
					e.Errorf("the one before: %v", o.err)
				}
			})
		})
	}
}
