package idempotency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// without leaves one out of a list of UUIDs.
func without(uuid, uuids string) string {
	return strings.Join(slices.DeleteFunc(strings.Fields(uuids), func(s string) bool { return s == uuid }), " ")
}

// ailment is what can be wrong with one message of a batch.
type ailment struct {
	act     func(msg *message.Message, cancel func()) error
	change  func(c *Config, s *fakeStore)
	ours    bool // a delivery of an sdk.Subscriber
	ends    string
	err     error
	counts  string // the counter it belongs to, where that is not its ending's
	letters int
}

func ailments() map[string]ailment {
	returning := func(err error) func(*message.Message, func()) error {
		return func(*message.Message, func()) error { return err }
	}
	return map[string]ailment{
		"it fails":                 {act: returning(errHandler), ends: "failed", err: errHandler},
		"it is given up":           {act: returning(Permanent(errHandler)), ends: "done", counts: "Diverted", letters: 1},
		"it asks for a delay":      {act: returning(RetryAfter(errHandler, time.Hour)), ours: true, ends: "failed", err: errHandler},
		"it nacks":                 {act: func(msg *message.Message, _ func()) error { msg.Nack(); return nil }, ends: "failed", err: errNacked},
		"it acks, then fails":      {act: func(msg *message.Message, _ func()) error { msg.Ack(); return errHandler }, ends: "failed", err: errHandler},
		"it fails in the database": {act: returning(fmt.Errorf("insert: %w", errSQL)), ends: "failed", err: errSQL},
		"it goes away and stops": {
			act:  func(msg *message.Message, cancel func()) error { cancel(); return msg.Context().Err() },
			ends: "returned", err: context.Canceled,
		},
		"it goes away and fails": {
			act:  func(_ *message.Message, cancel func()) error { cancel(); return Permanent(errHandler) },
			ends: "returned", err: context.Canceled,
		},
		"it is lost and finishes": {
			act: func(_ *message.Message, cancel func()) error { cancel(); return nil }, ours: true,
			ends: "returned", err: context.Canceled,
		},
		"it never asks for its transaction": {change: func(c *Config, _ *fakeStore) { c.RequireTx = true }, ends: "returned", err: ErrTxUnused},
		"it swallows a failure": {act: func(msg *message.Message, _ func()) error {
			carrierIn(msg.Context()).spoil(errSQL)
			return nil
		}, ends: "failed", err: ErrTxFailed},
		"it swallows contention": {act: func(msg *message.Message, _ func()) error {
			carrierIn(msg.Context()).spoil(errBusy)
			return nil
		}, change: func(c *Config, _ *fakeStore) { c.ContentionRetries = 2 }, ends: "returned", err: ErrContention},
	}
}

// T12: whatever is wrong with one message, and wherever in the batch it is, its neighbours are applied and acknowledged
// once; nothing of it is left, and it is counted as what it was.
func TestOneBadMessageInABatch(t *testing.T) {
	const uuids = "a b c d e"
	for name, ill := range ailments() {
		for _, parts := range []bool{true, false} {
			for _, bad := range []string{"a", "c", "e"} {
				for _, mode := range []Guarantee{EffectivelyOnce, AtLeastOnce} {
					t.Run(fmt.Sprintf("%s, as %s, parts %v, guarantee %d", name, bad, parts, mode), func(t *testing.T) {
						bubble(t, guaranteed(mode, func(c *Config, s *fakeStore) {
							if s.info.Parts = parts; ill.change != nil {
								ill.change(c, s)
							}
						}), func(e *env) { badNeighbour(e, ill, bad, uuids) })
					})
				}
			}
		}
	}
}

func badNeighbour(e *env, ill ailment, bad, uuids string) {
	var cancel context.CancelFunc
	msgs := messages(uuids)
	for i, msg := range msgs {
		if msg.UUID == bad {
			if msgs[i], cancel = withCancel(msg); ill.ours {
				msgs[i], _ = withDelivery(msg)
			}
			defer cancel()
		}
	}
	h := e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		if msg.UUID == bad && ill.act == nil {
			return nil, nil
		}
		return marked(only(bad, func(msg *message.Message) error { return ill.act(msg, cancel) }))(msg)
	})
	c := e.share(h, msgs...)
	c.wantEndings(bad + ":" + ill.ends)
	if o := c.of(bad); ill.err != nil && !errors.Is(o.err, ill.err) {
		e.Errorf("got %v, want %v", o.err, ill.err)
	}
	e.wantApplied(without(bad, uuids))
	r := e.m.Report()
	if n := uint64(len(msgs) - 1); r.Handled != n || r.WithoutTx != 0 && !errors.Is(ill.err, ErrTxUnused) {
		e.Errorf("report %+v", r)
	}
	if ill.counts == "Diverted" && r.Diverted != 1 || len(e.store.letters) != ill.letters {
		e.Errorf("%d diverted, %d dead letters", r.Diverted, len(e.store.letters))
	}
}

// A context that ends before the batch begins, or while a neighbour's handler runs, takes its message out and no other one.
func TestCancelledBeforeItsHandler(t *testing.T) {
	for _, parts := range []bool{true, false} {
		for _, at := range []int{0, 1, 2} {
			for _, when := range []string{"begin", "claim", "handler"} {
				if when == "handler" && at == 0 {
					continue // it is the first one that cancels
				}
				t.Run(fmt.Sprintf("number %d, in %s, parts %v", at, when, parts), func(t *testing.T) {
					bubble(t, func(_ *Config, s *fakeStore) { s.info.Parts = parts }, func(e *env) {
						msgs := messages("a b c")
						bad := msgs[at].UUID
						gone, cancel := withCancel(msgs[at])
						msgs[at] = gone
						hook := func(int) error { cancel(); return nil }
						switch when {
						case "begin":
							e.store.onBegin = hook
						case "claim":
							e.store.onClaim = hook
						}
						ran := false
						c := e.share(e.marking(func(msg *message.Message) error {
							if ran = ran || msg.UUID == bad; when == "handler" {
								cancel()
							}
							return nil
						}), msgs...)
						c.wantEndings(bad + ":returned")
						e.wantApplied(without(bad, "a b c"))
						if ran {
							e.Error("its handler ran")
						}
					})
				})
			}
		}
	}
}

// T13: all or nothing. The bad one is charged, the others go back uncharged, and earlier batches stay.
func TestPerBatch(t *testing.T) {
	for name, ill := range ailments() {
		for _, bad := range []string{"a", "c", "e"} {
			t.Run(name+", as "+bad, func(t *testing.T) {
				bubble(t, func(c *Config, s *fakeStore) {
					if c.Atomicity = PerBatch; ill.change != nil {
						ill.change(c, s)
					}
				}, func(e *env) {
					if errors.Is(ill.err, ErrContention) {
						return // all try again together until it is too much for all of them
					}
					e.share(e.marking(nil), messages("earlier")...)
					all := &crowd{e: e}
					open := e.holdLanes()
					msgs := messages("a b c d e")
					i := slices.IndexFunc(msgs, func(msg *message.Message) bool { return msg.UUID == bad })
					gone, cancel := withCancel(msgs[i])
					if msgs[i] = gone; ill.ours {
						msgs[i], _ = withDelivery(gone)
					}
					defer cancel()
					all.enter(e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
						if msg.UUID == bad && ill.act == nil {
							return nil, nil
						}
						return marked(only(bad, func(msg *message.Message) error { return ill.act(msg, cancel) }))(msg)
					}), msgs...)
					open()
					all.wg.Wait()
					for _, o := range all.all {
						want := "returned"
						if o.msg.UUID == bad {
							want = ill.ends
						}
						if o.String() != want {
							e.Errorf("%s is %s (%v), want %s", o.msg.UUID, o, o.err, want)
						}
						if o.msg.UUID != bad && !errors.Is(o.err, errBatch) {
							e.Errorf("%s: %v", o.msg.UUID, o.err)
						}
					}
					e.wantApplied("earlier")
				})
			})
		}
	}
}

// Contention in a handler of a batch that stands or falls together is contention of all.
func TestPerBatchContention(t *testing.T) {
	bubble(t, func(c *Config, _ *fakeStore) { c.Atomicity = PerBatch }, func(e *env) {
		c := e.share(e.marking(failingTimes("b", 2, func() error { return errBusy })), messages("a b c d")...)
		c.wantEndings()
		e.wantApplied("a b c d")
		e.wantCounts(map[string]uint64{"Handled": 4, "Contention": 2})
	})
}

// What needs no handler: replays, conflicts, refused and torn ones share the batch with what is new, and each ends as alone.
func TestMixedBatch(t *testing.T) {
	for _, parts := range []bool{true, false} {
		bubble(t, func(c *Config, s *fakeStore) {
			withEverything(c, &recording{})
			s.info.Parts = parts
		}, func(e *env) {
			h := e.marking(only("bad", func(*message.Message) error { return errHandler }))
			msg, _ := withDelivery(deliver("torn", "p"))
			_, _ = e.marking(stealing(nil))(msg)
			_, _ = h(deliver("old", "p"))
			c := &crowd{e: e}
			open := e.holdLanes()
			c.enter(h, deliver("a", "p"), deliver("old", "p"), deliver("torn", "p"), deliver("bad", "p"), deliver("refused", "p"))
			c.enter(h, deliver("b", "p"), deliver("", "p"))
			open()
			c.wg.Wait()
			c.wantEndings("bad:failed")
			e.wantCounts(map[string]uint64{"Handled": 3, "Replayed": 1, "Refused": 2, "Torn": 1, "Failed": 2})
			kinds := map[receipts.DeadLetterKind]int{}
			for _, l := range e.store.letters {
				kinds[l.Kind]++
			}
			if kinds[receipts.KindRefused] != 2 || kinds[receipts.KindTorn] != 1 || len(e.store.letters) != 3 {
				e.Errorf("dead letters %v", kinds)
			}
		})
	}
}
