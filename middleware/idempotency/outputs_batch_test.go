package idempotency

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

// shipped is a handler with an output named after its message, which then does what f says.
func (e *env) shipped(f func(msg *message.Message) error) message.HandlerFunc {
	return e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		_, err := marked(f)(msg)
		return []*message.Message{message.NewMessage("o-"+msg.UUID, nil)}, err
	})
}

// orders makes deliveries of a handler that publishes.
func orders(uuids string) []*message.Message {
	var msgs []*message.Message
	for uuid := range strings.FieldsSeq(uuids) {
		msgs = append(msgs, order(uuid))
	}
	return msgs
}

// sentOf lists, sorted, what a publisher took.
func sentOf(pub *recording) string {
	var uuids []string
	for _, p := range pub.all() {
		uuids = append(uuids, p.uuid)
	}
	slices.Sort(uuids)
	return strings.Join(uuids, " ")
}

// T10 in batches: each message's outputs are its own. What committed is sent at once by its own delivery, without a relay,
// and what did not is not there.
func TestOutputsOfABatch(t *testing.T) {
	for _, mode := range []Guarantee{EffectivelyOnce, AtLeastOnce, AtMostOnce} {
		for _, parts := range []bool{true, false} {
			for how, act := range map[string]func(*message.Message) error{
				"all are well": func(*message.Message) error { return nil },
				"one fails":    only("b", func(*message.Message) error { return errHandler }),
				"one panics":   only("b", func(*message.Message) error { panic("by hand") }),
				"one diverts":  only("b", func(*message.Message) error { return Permanent(errHandler) }),
				"one is taken": only("b", func(msg *message.Message) error { msg.Nack(); return nil }),
			} {
				t.Run(fmt.Sprintf("%s, guarantee %d, parts %v", how, mode, parts), func(t *testing.T) {
					pub := &recording{}
					bubble(t, guaranteed(mode, func(c *Config, s *fakeStore) {
						c.Outputs = pub
						s.info.Parts = parts
					}), func(e *env) {
						e.share(e.shipped(act), orders("a b c d")...)
						want := "o-a o-c o-d"
						if how == "all are well" {
							want = "o-a o-b o-c o-d"
						}
						if got := sentOf(pub); got != want {
							e.Errorf("sent %q, want %q", got, want)
						}
						var stored []string
						for _, o := range e.store.outputs {
							if !o.Sent {
								e.Errorf("%s is not marked", o.UUID)
							}
							if string(o.Key) != strings.TrimPrefix(o.UUID, "o-") {
								e.Errorf("%s belongs to %q", o.UUID, o.Key)
							}
							stored = append(stored, o.UUID)
						}
						if got := strings.Join(stored, " "); got != want {
							e.Errorf("stored %q, want %q", got, want)
						}
					})
				})
			}
		}
	}
}

// A second delivery of one message in the same transaction, which only at-least-once has, sends its outputs, too.
func TestOutputsOfCopiesAtLeastOnce(t *testing.T) {
	pub := &recording{}
	bubble(t, guaranteed(AtLeastOnce, withOutputs(pub)), func(e *env) {
		e.share(e.shipped(nil), orders("a b a")...)
		if got := sentOf(pub); got != "o-a "+"o-a o-b" {
			e.Errorf("sent %q", got)
		}
	})
}

// Outputs that the store or the configuration refuses are their message's own trouble.
func TestRefusedOutputsInABatch(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(c *Config, s *fakeStore)
		ends   string
	}{
		{"nobody sends them", func(c *Config, _ *fakeStore) { c.Outputs = nil }, "returned"},
		{"the store refuses them", func(_ *Config, s *fakeStore) {
			s.onAddOutputs = times(1, errSQL)
		}, "failed"},
	} {
		for _, parts := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, parts %v", tt.name, parts), func(t *testing.T) {
				pub := &recording{}
				bubble(t, func(c *Config, s *fakeStore) {
					c.Outputs = pub
					s.info.Parts = parts
					tt.change(c, s)
					if !parts && s.onAddOutputs != nil {
						s.onAddOutputs = times(2, errSQL) // it runs again, alone
					}
				}, func(e *env) {
					h := e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
						_, err := marked(nil)(msg)
						if msg.UUID == "b" {
							return []*message.Message{message.NewMessage("o-b", nil)}, err
						}
						return nil, err
					})
					c := e.share(h, orders("a b c")...)
					c.wantEndings("b:" + tt.ends)
					e.wantApplied("a c")
					if len(pub.all())+len(e.store.outputs) != 0 {
						e.Errorf("sent %v, stored %v", pub.all(), e.store.outputs)
					}
				})
			})
		}
	}
}
