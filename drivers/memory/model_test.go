package memory

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/sdk"
)

// The oracle: what the queues must hold and hand out, written as plainly as possible: one slice per group in the order
// sent, searched from the front every time.

type oracleMsg struct {
	id, key string
	attempt int
	src     *oracleSource // in flight there
	token   sdk.Token
	until   time.Time // end of the lease, or of the delay
	delayed bool
	gone    bool
	dead    bool
}

type oracleSource struct {
	real   sdk.Source
	group  string
	window int
	lease  time.Duration
	open   bool
}

type oracle struct {
	groups  map[string][]*oracleMsg
	sources []*oracleSource
	tokens  []heldToken // every token ever given, also the stale ones
	sent    int
}

type heldToken struct {
	src   *oracleSource
	msg   *oracleMsg
	token sdk.Token
}

func (o *oracle) advance(now time.Time) {
	for _, msgs := range o.groups {
		for _, m := range msgs {
			if (m.src != nil || m.delayed) && !now.Before(m.until) {
				m.src, m.delayed = nil, false
			}
		}
	}
}

func (o *oracle) held(group string) (pending, unsettled, dead int) {
	for _, m := range o.groups[group] {
		switch {
		case m.dead:
			dead++
		case m.gone:
		case m.src != nil:
			unsettled++
		default:
			pending++
		}
	}
	return pending, unsettled, dead
}

func (o *oracle) inFlight(s *oracleSource) (n int) {
	for _, m := range o.groups[s.group] {
		if m.src == s {
			n++
		}
	}
	return n
}

// take says what a Receive must give, and notes it as handed out.
func (o *oracle) take(s *oracleSource, limit int, now time.Time) (out []*oracleMsg) {
	limit = min(limit, s.window-o.inFlight(s))
	for _, m := range o.groups[s.group] {
		if len(out) >= limit {
			break
		}
		if m.gone || m.delayed || m.src != nil || o.keyElsewhere(m, s) {
			continue
		}
		m.src, m.until = s, now.Add(s.lease)
		m.attempt++
		out = append(out, m)
	}
	return out
}

func (o *oracle) keyElsewhere(m *oracleMsg, s *oracleSource) bool {
	return m.key != "" && slices.ContainsFunc(o.groups[s.group], func(x *oracleMsg) bool {
		return x.key == m.key && x.src != nil && x.src != s
	})
}

func (o *oracle) end(s *oracleSource) {
	s.open = false
	for _, m := range o.groups[s.group] {
		if m.src == s {
			m.src = nil
		}
	}
}

// machine runs random programs against a broker and the oracle, side by side, in virtual time.
type machine struct {
	*rig
	o *oracle
}

const modelCapacity = 12

func TestModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The wrapper hides t.Deadline, which must not be called in a bubble.
		rapid.Check(struct{ rapid.TB }{t}, func(rt *rapid.T) {
			m := &machine{rig: newRig(t, Options{Capacity: modelCapacity, Lease: 10 * time.Second})}
			defer m.close()
			m.o = &oracle{groups: make(map[string][]*oracleMsg)}
			for _, g := range []string{"g1", "g2"} {
				m.prepare(topicT, g)
				m.o.groups[g] = nil
			}
			rt.Repeat(map[string]func(*rapid.T){
				"send": m.doSend, "open": m.doOpen, "receive": m.doReceive, "receive more": m.doReceive,
				"settle": m.doSettle, "settle more": m.doSettle, "extend": m.doExtend, "advance": m.doAdvance,
				"close": m.doClose, "cut": m.doCut, "": m.check,
			})
		})
	})
}

func (m *machine) doSend(t *rapid.T) {
	keys := rapid.SliceOfN(rapid.SampledFrom([]string{"", "", "a", "b"}), 1, 5).Draw(t, "keys")
	room := modelCapacity
	for g := range m.o.groups {
		p, u, _ := m.o.held(g)
		room = min(room, modelCapacity-p-u)
	}
	var batch []sdk.Message
	for i, key := range keys {
		m.o.sent++
		msg := sdk.Message{ID: fmt.Sprint("m", m.o.sent), Key: key}
		batch = append(batch, msg)
		if i < room {
			for g := range m.o.groups {
				m.o.groups[g] = append(m.o.groups[g], &oracleMsg{id: msg.ID, key: key})
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	sent := make(chan error, 1)
	go func() { sent <- m.d.Send(ctx, topicT, batch) }()
	synctest.Wait()
	cancel()
	for i, err := range sdk.EntryErrors(<-sent, len(batch)) {
		if (err != nil) != (i >= room) {
			t.Fatalf("entry %d of %d with room for %d: %v", i, len(batch), room, err)
		}
	}
}

func (m *machine) doOpen(t *rapid.T) {
	s := &oracleSource{
		group:  rapid.SampledFrom([]string{"g1", "g2"}).Draw(t, "group"),
		window: rapid.IntRange(1, 5).Draw(t, "window"),
		lease:  time.Duration(rapid.IntRange(1, 20).Draw(t, "lease")) * time.Second,
		open:   true,
	}
	s.real = m.open(sdk.Binding{Topic: topicT, Group: s.group, Window: s.window, Lease: s.lease})
	m.o.sources = append(m.o.sources, s)
}

func (m *machine) source(t *rapid.T) *oracleSource {
	if len(m.o.sources) == 0 {
		t.Skip("no source yet")
	}
	return rapid.SampledFrom(m.o.sources).Draw(t, "source index")
}

func (m *machine) doReceive(t *rapid.T) {
	s := m.source(t)
	limit := rapid.IntRange(1, 6).Draw(t, "limit")
	m.o.advance(time.Now())
	got, err := m.receive(s.real, limit)
	if (err != nil) == s.open {
		t.Fatalf("Receive on a source that is open %t: %v", s.open, err)
	}
	if !s.open {
		return
	}
	want := m.o.take(s, limit, time.Now())
	if len(got) != len(want) {
		t.Fatalf("received %q, want %d", idsOf(got), len(want))
	}
	for i, d := range got {
		w := want[i]
		if d.ID != w.id || d.Attempt != w.attempt || d.Redelivered != (w.attempt > 1) {
			t.Fatalf("received %s in attempt %d, want %s in attempt %d", d.ID, d.Attempt, w.id, w.attempt)
		}
		for _, h := range m.o.tokens {
			if h.token == d.Token {
				t.Fatalf("token %q was given before", d.Token)
			}
		}
		w.token = d.Token
		m.o.tokens = append(m.o.tokens, heldToken{s, w, d.Token})
	}
}

// draw picks one of the tokens ever given, and a source to use it on, not always the right one.
func (m *machine) draw(t *rapid.T) (h heldToken, on *oracleSource, live bool) {
	if len(m.o.tokens) == 0 {
		t.Skip("no token yet")
	}
	recent := m.o.tokens[max(0, len(m.o.tokens)-12):]
	h = recent[rapid.IntRange(0, len(recent)-1).Draw(t, "token index")]
	on = h.src
	if rapid.IntRange(0, 9).Draw(t, "stray") == 0 {
		on = m.source(t)
	}
	return h, on, on.open && h.msg.src == on && h.msg.token == h.token
}

func (m *machine) doSettle(t *rapid.T) {
	m.o.advance(time.Now())
	for range rapid.IntRange(1, 4).Draw(t, "settlements") {
		h, on, live := m.draw(t)
		st := sdk.Settlement{Token: h.token, Verdict: sdk.Verdict(rapid.IntRange(1, 3).Draw(t, "verdict"))}
		st.Delay = time.Duration(max(0, rapid.IntRange(-5, 10).Draw(t, "delay"))) * time.Second
		_, _, dead := m.o.held(h.src.group)
		full := st.Verdict == sdk.Reject && m.deadTotal() >= modelCapacity
		err := on.real.Settle(context.Background(), []sdk.Settlement{st})
		if (err == nil) != (live && !full) {
			t.Fatalf("%s with a token that is live %t, %d dead: %v", st.Verdict, live, dead, err)
		}
		if err != nil {
			continue
		}
		h.msg.src = nil
		switch st.Verdict {
		case sdk.Ack:
			h.msg.gone = true
		case sdk.Reject:
			h.msg.gone, h.msg.dead = true, true
		default:
			h.msg.delayed, h.msg.until = st.Delay > 0, time.Now().Add(st.Delay)
		}
	}
}

func (m *machine) deadTotal() (n int) {
	for g := range m.o.groups {
		_, _, dead := m.o.held(g)
		n += dead
	}
	return n
}

func (m *machine) doExtend(t *rapid.T) {
	m.o.advance(time.Now())
	h, on, live := m.draw(t)
	d := time.Duration(rapid.IntRange(0, 15).Draw(t, "lease")) * time.Second
	err := on.real.(sdk.LeaseExtender).Extend(context.Background(), []sdk.Token{h.token}, d)
	if (err == nil) != live {
		t.Fatalf("Extend with a token that is live %t: %v", live, err)
	}
	if live {
		h.msg.until = time.Now().Add(d)
		m.o.advance(time.Now())
	}
}

func (m *machine) doAdvance(t *rapid.T) {
	time.Sleep(time.Duration(rapid.IntRange(1, 8).Draw(t, "seconds")) * time.Second)
	m.o.advance(time.Now())
}

func (m *machine) doClose(t *rapid.T) {
	s := m.source(t)
	m.o.advance(time.Now())
	if err := s.real.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	m.o.end(s)
}

func (m *machine) doCut(t *rapid.T) {
	if rapid.IntRange(0, 3).Draw(t, "really") != 0 {
		t.Skip("seldom")
	}
	m.b.Disconnect()
	for _, s := range m.o.sources {
		m.o.end(s)
	}
}

// check compares what the broker holds, and the structure of its queues, after every step.
func (m *machine) check(t *rapid.T) {
	for g := range m.o.groups {
		p, u, _ := m.o.held(g)
		if rp, ru := m.b.Pending(topicT, g), m.b.Unsettled(topicT, g); rp != p || ru != u {
			t.Fatalf("group %s holds %d pending and %d unsettled, want %d and %d", g, rp, ru, p, u)
		}
		if problem := m.b.topics[topicT].groups[g].inconsistent(); problem != "" {
			t.Fatalf("group %s: %s", g, problem)
		}
	}
	if dead := m.b.Pending(topicT+DeadSuffix, ""); dead != m.deadTotal() {
		t.Fatalf("%d dead letters, want %d", dead, m.deadTotal())
	}
}

// inconsistent says what does not fit together in a queue that nobody waits on.
func (q *queue) inconsistent() string {
	var problems []string
	note := func(bad bool, format string, args ...any) {
		if bad {
			problems = append(problems, fmt.Sprintf(format, args...))
		}
	}
	blocked, keyed := 0, make(map[string]int)
	for key, ks := range q.keys {
		blocked += ks.blocked.len()
		note(ks.inFlight == 0 && ks.blocked.len() == 0, "key %q has nothing", key)
		note((ks.in == nil) != (ks.blocked.len() == 0), "key %q is in the wrong place", key)
		note(ks.in == &q.freeKeys && ks.inFlight > 0, "key %q is free and in flight", key)
		note(ks.in != nil && ks.rank != ks.blocked.min().seq, "key %q has the wrong rank", key)
	}
	for _, it := range q.leases.elems {
		if it.msg.Key != "" {
			keyed[it.msg.Key]++
			note(q.keys[it.msg.Key].owner != it.src, "key %q has two owners", it.msg.Key)
		}
		note(it.src.inFlight[it.token] != it, "a message in flight is not at its source")
	}
	for key, n := range keyed {
		note(q.keys[key].inFlight != n, "key %q: %d in flight, want %d", key, q.keys[key].inFlight, n)
	}
	total := q.fresh.len() + q.returned.len() + q.delayed.len() + q.leases.len() + blocked
	note(total != q.count, "%d messages are somewhere, %d counted", total, q.count)
	note(q.count == 0 && q.bytes != 0, "%d bytes of nothing", q.bytes)
	note(len(q.waiters) != 0 || q.timer != nil, "%d waiters, timer %v", len(q.waiters), q.timer)
	return strings.Join(problems, "; ")
}
