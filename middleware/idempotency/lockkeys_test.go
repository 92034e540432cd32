package idempotency

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
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

// A function of the configuration that panics fails its message like a handler, and is counted like one.
func TestConfiguredFunctionsThatPanic(t *testing.T) {
	for name, change := range map[string]func(c *Config){
		"LockKeys":    func(c *Config) { c.LockKeys = func(*message.Message) []string { panic("by hand") } },
		"Fingerprint": func(c *Config) { c.Fingerprint = func(*message.Message) []byte { panic("by hand") } },
		"Validate":    func(c *Config) { c.Validate = func(*message.Message) error { panic("by hand") } },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(c *Config, _ *fakeStore) { change(c) }, func(e *env) {
				c := e.share(e.marking(nil), messages("a b")...)
				c.wantEndings("a:panicked", "b:panicked")
				e.wantApplied("")
			})
		})
	}
}

// Messages of one key are in one lane at a time, in their order, while other keys use the other lanes, and so are those that lock
// the same rows, where they are named; also when handlers fail, panic, stand still or meet contention now and then, and the store fails in every call.
func TestAKeyIsInOneLaneAtATime(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			o := &orderRun{random: rand.New(rand.NewPCG(seed, 1)), next: map[byte]int{}, running: map[byte]int{}, locked: map[string]int{}} //nolint:gosec // a test
			bubble(t, func(c *Config, s *fakeStore) {
				keyed(c)
				s.several(1 + int(seed%4))
				s.info.Parts = seed%3 > 0
				c.BatchSize = []int{1, 2, 5, 100}[seed/4%4]
				c.Atomicity = Atomicity(seed / 2 % 2)
				if o.rows = seed%8 < 4 && seed%3 > 0; o.rows { // what is claimed elsewhere runs aside, whatever it locks
					c.LockKeys = rowsOf
				}
				if seed%8 < 4 {
					return
				}
				for _, put := range placeFault() {
					put(s, func(int) error { return o.fault() })
				}
			}, func(e *env) {
				o.e = e
				uuids := o.uuids(60)
				e.inOrder(e.marking(o.handle), uuids)
				e.wantInOrder(uuids)
				e.wantNothingLeft()
				if e.m.lanes.all > 1 && o.most < 2 {
					e.Errorf("at most %d handlers ran at a time", o.most)
				}
			})
		})
	}
}

// orderRun is one run of that test.
type orderRun struct {
	e *env

	mu            sync.Mutex
	random        *rand.Rand
	next, running map[byte]int
	rows          bool // they are named
	locked        map[string]int
	most          int
}

// rowsOf names two of seven rows.
func rowsOf(msg *message.Message) []string {
	n, _ := strconv.Atoi(msg.UUID[1:])
	return []string{fmt.Sprint("row ", n%7), fmt.Sprint("row ", 3*n%7)}
}

func (o *orderRun) uuids(n int) string {
	var uuids []string
	for range n {
		key := "jklm-"[o.random.IntN(5)]
		o.next[key]++
		uuids = append(uuids, fmt.Sprintf("%c%d", key, o.next[key]))
	}
	return strings.Join(uuids, " ")
}

// fault is an error of the store, now and then.
func (o *orderRun) fault() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch o.random.IntN(40) {
	case 0:
		return errBusy
	case 1:
		return errGone
	case 2:
		return errSQL
	default:
		return nil
	}
}

// lock notes that a handler holds its rows, or with -1 that it does not any more.
func (o *orderRun) lock(msg *message.Message, n int) {
	if !o.rows {
		return
	}
	for _, row := range slices.Compact(rowsOf(msg)) {
		if o.locked[row] += n; o.locked[row] > 1 {
			o.e.Errorf("%d handlers have locked %s", o.locked[row], row)
		}
	}
}

func (o *orderRun) handle(msg *message.Message) error {
	key := msg.UUID[0]
	o.mu.Lock()
	if o.running[key]++; o.running[key] > 1 && key != '-' {
		o.e.Errorf("%d handlers of key %c", o.running[key], key)
	}
	o.lock(msg, 1)
	sum := 0
	for _, n := range o.running {
		sum += n
	}
	o.most = max(o.most, sum)
	dice := o.random.IntN(50)
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.running[key]--
		o.lock(msg, -1)
	}()
	time.Sleep(time.Duration(dice%20) * time.Millisecond)
	switch dice {
	case 1, 2:
		return errHandler
	case 3, 4:
		return errBusy
	case 5:
		panic("by hand")
	case 6:
		return errGone
	}
	return nil
}

// A lane does not wait for rows of another one: what will lock them waits outside, and what is behind it goes first.
func TestRowsOfAnotherLaneAreNotWaitedFor(t *testing.T) {
	bubble(t, func(c *Config, s *fakeStore) {
		s.several(4)
		c.LockKeys = func(msg *message.Message) []string { return strings.Split(string(msg.Payload), "") }
	}, func(e *env) {
		h := e.marking(only("1", func(*message.Message) error { time.Sleep(time.Second); return nil }))
		c := &crowd{e: e}
		c.enter(h, deliver("1", "ab"))
		c.enter(h, deliver("2", "bc"), deliver("3", "cd"))
		c.wait()
		c.wantEndings()
		for uuid, want := range map[string]time.Duration{"1": time.Second, "2": time.Second, "3": 0} {
			if took := c.of(uuid).took; took != want {
				e.Errorf("%s took %v, want %v", uuid, took, want)
			}
		}
		if len(e.m.lanes.locked) > 0 {
			e.Errorf("rows are locked in the end: %v", e.m.lanes.locked)
		}
	})
}

// A message that waits for rows is not overtaken by later ones of its order key.
func TestRowsAndOrderKeys(t *testing.T) {
	e := newEnv(t, func(_ *Config, s *fakeStore) { s.several(4) })
	q := e.m.newQueue(nil, nil)
	e.m.lanes.locked = with(nil, "a")
	for _, msg := range messages("k1:a k2:b -1:c j1:d j2:a j3:d -2:a") {
		p := e.m.newPending(msg, false)
		key, row, _ := strings.Cut(msg.UUID, ":")
		p.line, p.locks = strings.TrimRight(key, "-0123456789"), []string{row}
		q.pending = append(q.pending, p)
	}
	list := func(pending []*pending[*fakeTx]) string {
		var uuids []string
		for _, p := range pending {
			uuids = append(uuids, p.msg.UUID)
		}
		return strings.Join(uuids, " ")
	}
	if got := list(q.take()); got != "-1:c j1:d" {
		t.Errorf("the next batch is %s", got)
	}
	if got := list(q.pending); got != "k1:a k2:b j2:a j3:d -2:a" {
		t.Errorf("%s stay", got)
	}
}
