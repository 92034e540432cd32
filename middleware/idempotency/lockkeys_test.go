package idempotency

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// A batch's messages run in the order of the rows they lock; those of one order key as they arrived, together, at the place of
// the smallest of theirs.
func TestOrderInsideABatch(t *testing.T) {
	// A message is its order key, "-" for none, a number, and after a colon the names of its rows.
	for _, tt := range []struct {
		name        string
		lock, order bool
		in, want    string
	}{
		{"nothing is known", false, false, "-3 -1 -2", "-3 -1 -2"},
		{"rows", true, false, "-1:c -2:a -3:b", "-2:a -3:b -1:c"},
		{"equal rows stay as they came", true, false, "-3:a -1:a -2:a", "-3:a -1:a -2:a"},
		{"several rows, in any order", true, false, "-1:cb -2:ca -3:a", "-3:a -2:ca -1:cb"},
		{"fewer rows first", true, false, "-1:ab -2:a -3", "-3 -2:a -1:ab"},
		{"order keys", false, true, "k1 j1 k2 -1 j2", "-1 j1 j2 k1 k2"},
		{"order keys and rows", true, true, "k1:c j1:b k2:a j2:z", "k1:c k2:a j1:b j2:z"},
		{"and some without key", true, true, "k1:c -1:b k2:a -2:a", "-2:a k1:c k2:a -1:b"},
		{"keys of equal rows do not mix", true, true, "k1:a j1:a k2:a j2:a", "j1:a j2:a k1:a k2:a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t, func(c *Config, _ *fakeStore) {
				if tt.lock {
					c.LockKeys = func(msg *message.Message) []string {
						_, rows, _ := strings.Cut(msg.UUID, ":")
						return strings.Split(rows, "")
					}
				}
				if tt.order {
					keyed(c)
				}
			})
			b := &batch[*fakeTx]{m: e.m}
			for _, msg := range messages(tt.in) {
				p := e.m.newPending(msg, false)
				if tt.order {
					p.line = e.m.cfg.OrderKey(msg)
				}
				if tt.lock {
					p.locks = slices.Sorted(slices.Values(e.m.cfg.LockKeys(msg)))
				}
				b.members = append(b.members, p)
			}
			b.inOrder()
			var got []string
			for _, p := range b.members {
				got = append(got, p.msg.UUID)
			}
			if strings.Join(got, " ") != tt.want {
				t.Errorf("%v, want %s", got, tt.want)
			}
		})
	}
}

// The order of LockKeys is the one in which handlers run, and claims are answered to whom they belong all the same.
func TestLockKeysInTheFlow(t *testing.T) {
	for _, parts := range []bool{true, false} {
		bubble(t, func(c *Config, s *fakeStore) {
			c.LockKeys = func(msg *message.Message) []string { return []string{string(msg.Payload)} }
			s.info.Parts = parts
		}, func(e *env) {
			h := e.marking(only("b", func(*message.Message) error { return errHandler }))
			c := e.share(h, deliver("a", "z"), deliver("b", "y"), deliver("c", "x"), deliver("d", "w"))
			c.wantEndings("b:failed")
			e.wantApplied("a c d")
			if want := strings.Fields("u:d u:c u:a"); !slices.Equal(e.store.order, want) {
				e.Errorf("they ran as %v", e.store.order)
			}
		})
	}
}

// Messages of one key are in one lane at a time, in their order, while other keys use the other lanes; also when handlers
// fail, panic or meet contention now and then.
func TestAKeyIsInOneLaneAtATime(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, func(c *Config, s *fakeStore) {
				keyed(c)
				s.several(4)
				c.BatchSize = 5
			}, func(e *env) {
				random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // a test
				var uuids []string
				next := map[byte]int{}
				for range 60 {
					key := "jklm-"[random.IntN(5)]
					next[key]++
					uuids = append(uuids, fmt.Sprintf("%c%d", key, next[key]))
				}
				var mu sync.Mutex
				running, most := map[byte]int{}, 0
				h := e.marking(func(msg *message.Message) error {
					key := msg.UUID[0]
					mu.Lock()
					running[key]++
					if running[key] > 1 && key != '-' {
						e.Errorf("%d handlers of key %c", running[key], key)
					}
					sum := 0
					for _, n := range running {
						sum += n
					}
					most = max(most, sum)
					dice := random.IntN(20)
					mu.Unlock()
					defer func() {
						mu.Lock()
						running[key]--
						mu.Unlock()
					}()
					time.Sleep(time.Duration(dice) * time.Millisecond)
					switch dice {
					case 1:
						return errHandler
					case 2:
						return errBusy
					case 3:
						panic("by hand")
					}
					return nil
				})
				e.inOrder(h, strings.Join(uuids, " "))
				e.wantInOrder(strings.Join(uuids, " "))
				e.wantNothingLeft()
				if most < 2 {
					e.Errorf("at most %d handlers ran at a time", most)
				}
			})
		})
	}
}
