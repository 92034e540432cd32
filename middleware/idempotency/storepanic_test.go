package idempotency

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// placeFault puts a fault into each call of the store that a batch makes.
func placeFault() map[string]func(s *fakeStore, fault func(n int) error) {
	return map[string]func(s *fakeStore, fault func(n int) error){
		"begin":      func(s *fakeStore, fault func(int) error) { s.onBegin = fault },
		"claim":      func(s *fakeStore, fault func(int) error) { s.onClaim = fault },
		"divert":     func(s *fakeStore, fault func(int) error) { s.onDivert = fault },
		"part":       func(s *fakeStore, fault func(int) error) { s.onPart = fault },
		"addOutputs": func(s *fakeStore, fault func(int) error) { s.onAddOutputs = fault },
		"keep":       func(s *fakeStore, fault func(int) error) { s.onKeep = fault },
		"undo":       func(s *fakeStore, fault func(int) error) { s.onUndo = fault },
		"unclaim":    func(s *fakeStore, fault func(int) error) { s.onUnclaim = fault },
		"commit": func(s *fakeStore, fault func(int) error) {
			s.onCommit = func(n int) commitFault { return commitFault{err: fault(n)} }
		},
	}
}

// everything is a batch that makes every call of the store: "bad" fails, "out" has an output, "refused" becomes a dead
// letter, and the rest is handled.
func (e *env) everything() *crowd {
	h := e.m.Wrap(func(msg *message.Message) ([]*message.Message, error) {
		_, err := marked(only("bad", func(*message.Message) error { return errHandler }))(msg)
		if msg.UUID == "out" {
			return []*message.Message{message.NewMessage("o-1", nil)}, err
		}
		return nil, err
	})
	msgs := messages("a bad b out refused c")
	for _, msg := range msgs {
		msg.SetContext(&routed{Context: msg.Context().(*routed).Context, handler: "charge", topic: "orders", publishTopic: "shipped"})
	}
	return e.share(h, msgs...)
}

func withEverything(c *Config, pub *recording) {
	c.Outputs = pub
	c.Validate = func(msg *message.Message) error {
		if msg.UUID == "refused" {
			return errSQL
		}
		return nil
	}
}

// A store that panics, or ends the goroutine, in a worker would end the process, or let a batch's deliveries wait for ever.
func TestStoreBreaksOnce(t *testing.T) {
	for place, put := range placeFault() {
		for how, act := range map[string]func(){"panics": func() { panic("store") }, "exits": runtime.Goexit} {
			t.Run(place+" "+how, func(t *testing.T) {
				pub := &recording{}
				bubble(t, func(c *Config, s *fakeStore) {
					withEverything(c, pub)
					put(s, func(n int) error {
						if n == 1 {
							act()
						}
						return nil
					})
				}, func(e *env) {
					c := e.everything()
					c.wantEndings("bad:failed")
					e.wantApplied("a b out c")
					e.wantCounts(map[string]uint64{"Handled": 4, "Refused": 1, "Failed": 1, "OutputsSent": 1})
					if got := pub.all(); len(got) != 1 || e.store.count(place) == 0 {
						e.Errorf("published %v; %d calls", got, e.store.count(place))
					}
				})
			})
		}
	}
}

// One that always does reaches each delivery's own goroutine, in which it is charged, and where a Recoverer sees it.
func TestStoreBreaksAlways(t *testing.T) {
	for _, place := range []string{"begin", "claim", "commit"} {
		for how, act := range map[string]func(){"panicked": func() { panic("store") }, "exited": runtime.Goexit} {
			t.Run(place+" "+how, func(t *testing.T) {
				bubble(t, func(_ *Config, s *fakeStore) { placeFault()[place](s, func(int) error { act(); return nil }) }, func(e *env) {
					c := e.share(e.marking(nil), messages("a b c d")...)
					c.wantEndings("a:"+how, "b:"+how, "c:"+how, "d:"+how)
					e.wantApplied("")
					e.wantCounts(map[string]uint64{"Failed": 4})
					if len(e.log.Captured()[watermill.ErrorLogLevel]) == 0 {
						e.Error("nothing is logged")
					}
				})
			})
		}
	}
}

// Where nobody can tell whether the transaction committed, at most once means that the handlers do not run again.
func TestStoreBreaksInCommitOfTheOtherGuarantees(t *testing.T) {
	for mode, want := range map[Guarantee]struct{ commit, runs int }{AtMostOnce: {2, 3}, AtLeastOnce: {1, 6}} {
		t.Run(fmt.Sprint(mode), func(t *testing.T) {
			bubble(t, guaranteed(mode, func(_ *Config, s *fakeStore) {
				placeFault()["commit"](s, func(n int) error {
					if n == want.commit {
						panic("store")
					}
					return nil
				})
			}), func(e *env) {
				runs := 0
				c := e.share(e.marking(func(*message.Message) error { runs++; return nil }), messages("a b c")...)
				if mode == AtMostOnce {
					c.wantEndings("a:returned", "b:returned", "c:returned")
				} else {
					c.wantEndings()
				}
				if runs != want.runs {
					e.Errorf("%d handlers ran, want %d", runs, want.runs)
				}
			})
		})
	}
}
