package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

func TestSendArrivesByteForByte(t *testing.T) {
	many := make(map[string]string)
	for i := range 100 {
		many[fmt.Sprintf("key-%d-ü", i)] = strings.Repeat("v", i)
	}
	for name, m := range map[string]sdk.Message{
		"nothing":      {},
		"empty":        {ID: "1", Metadata: map[string]string{}, Payload: []byte{}},
		"one byte":     {ID: "2", Payload: []byte{0}},
		"invalid utf8": {ID: "3", Payload: []byte("\xff\x00\xfe"), Metadata: map[string]string{"": "", "x": "\xff"}},
		"1 MiB":        {ID: "4", Payload: bytes.Repeat([]byte{0, 1, 0xff}, 1<<20/3)},
		"100 keys":     {ID: "5", Key: "k", Metadata: many},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{}, func(r *rig) {
				t := r.t
				s := r.consumer(1)
				if err := r.d.Send(t.Context(), topicT, []sdk.Message{m}); err != nil {
					t.Fatal(err)
				}
				got, err := r.receive(s, 1)
				if err != nil || len(got) != 1 {
					t.Fatalf("received %d, %v", len(got), err)
				}
				g := got[0]
				if g.ID != m.ID || g.Key != m.Key || !bytes.Equal(g.Payload, m.Payload) {
					t.Errorf("arrived changed")
				}
				if len(g.Metadata) != len(m.Metadata) {
					t.Errorf("%d metadata arrived, want %d", len(g.Metadata), len(m.Metadata))
				}
				for k, v := range m.Metadata {
					if w, ok := g.Metadata[k]; !ok || w != v {
						t.Errorf("metadata %q is %q, want %q", k, w, v)
					}
				}
				if g.Attempt != 1 || g.Redelivered || g.Err != nil || g.Token == "" {
					t.Errorf("first attempt is %d, redelivered %t, error %v", g.Attempt, g.Redelivered, g.Err)
				}
			})
		})
	}
}

// Neither the sender nor a consumer can change what another consumer, or a later attempt, gets.
func TestCopies(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		one := r.consumer(1)
		two := r.open(sdk.Binding{Topic: topicT, Group: "other"})
		batch := []sdk.Message{{ID: "a", Payload: []byte("payload"), Metadata: map[string]string{"k": "v"}}}
		if err := r.d.Send(t.Context(), topicT, batch); err != nil {
			t.Fatal(err)
		}
		spoil := func(m sdk.Message) {
			m.Payload[0] = 'X'
			m.Metadata["k"] = "spoiled"
		}
		spoil(batch[0])
		check := func(got []sdk.Delivery) {
			t.Helper()
			if string(got[0].Payload) != "payload" || got[0].Metadata["k"] != "v" {
				t.Errorf("got payload %q and metadata %v", got[0].Payload, got[0].Metadata)
			}
			spoil(got[0].Message)
		}
		got := r.expect(one, 1, "a")
		check(got)
		check(r.expect(two, 1, "a"))
		r.settle(one, sdk.Requeue, got...)
		check(r.expect(one, 1, "a"))
	})
}

func TestSendRefused(t *testing.T) {
	done, cancel := context.WithCancel(context.Background())
	cancel()
	late, cancelLate := context.WithDeadlineCause(context.Background(), time.Unix(0, 0), nil)
	defer cancelLate()
	big := sdk.Message{ID: "big", Payload: make([]byte, 11)}
	wide := sdk.Message{ID: "wide", Metadata: map[string]string{"k": strings.Repeat("v", 101)}}
	ok := sdk.Message{ID: "ok", Payload: make([]byte, 10)}
	for _, tc := range []struct {
		name    string
		ctx     context.Context
		topic   string
		batch   []sdk.Message
		kind    sdk.Outcome
		cause   error
		indexes []int
	}{
		{"context done", done, topicT, messages("a", "b"), sdk.OutcomeRejected, context.Canceled, upTo(0, 2)},
		{"deadline passed", late, topicT, messages("a"), sdk.OutcomeRejected, context.DeadlineExceeded, upTo(0, 1)},
		{"no such topic", nil, "nowhere", messages("a", "b"), sdk.OutcomePermanent, sdk.ErrUnroutable, upTo(0, 2)},
		{"no group", nil, "lonely", messages("a"), sdk.OutcomePermanent, sdk.ErrUnroutable, upTo(0, 1)},
		{"too large", nil, topicT, []sdk.Message{big}, sdk.OutcomePermanent, sdk.ErrTooLarge, upTo(0, 1)},
		{"never fits", nil, topicT, []sdk.Message{wide}, sdk.OutcomePermanent, sdk.ErrTooLarge, upTo(0, 1)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bubble(t, Options{MaxPayload: 10, CapacityBytes: 100}, func(r *rig) {
				t := r.t
				s := r.consumer(5)
				r.prepare("lonely", "")
				ctx := tc.ctx
				if ctx == nil {
					ctx = t.Context()
				}
				entriesAre(t, r.d.Send(ctx, tc.topic, tc.batch), tc.kind, tc.cause, tc.indexes...)
				r.holds(0, 0)
				if err := r.d.Send(t.Context(), topicT, []sdk.Message{ok}); err != nil {
					t.Errorf("the next message: %v", err)
				}
				r.expect(s, 5, "ok")
			})
		})
	}
}

// One entry that is too large keeps its whole batch back, but only itself for good.
func TestSendTooLargeAmongOthers(t *testing.T) {
	bubble(t, Options{MaxPayload: 2}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		err := r.d.Send(t.Context(), topicT, messages("a", "big", "b"))
		be, ok := errors.AsType[*sdk.BatchError](err)
		if !ok || len(be.Entries) != 3 {
			t.Fatalf("error is %v, want three entries", err)
		}
		want := []sdk.Outcome{sdk.OutcomeRejected, sdk.OutcomePermanent, sdk.OutcomeRejected}
		for i, kind := range want {
			if got := sdk.OutcomeOf(be.Entries[i]); got != kind {
				t.Errorf("entry %d is %s, want %s", i, got, kind)
			}
		}
		if !errors.Is(be.Entries[1], sdk.ErrTooLarge) || errors.Is(be.Entries[0], sdk.ErrTooLarge) {
			t.Errorf("the wrong entry is too large: %v", be.Entries)
		}
		r.expect(s, 5)
	})
}

func TestSendHostileTopics(t *testing.T) {
	bubble(t, Options{AcceptUnroutable: true}, func(r *rig) {
		t := r.t
		for _, topic := range []string{"", "a\x00", strings.Repeat("x", 1<<20)} {
			err := r.d.Send(t.Context(), topic, messages("a"))
			if sdk.OutcomeOf(sdk.EntryErrors(err, 1)[0]) != sdk.OutcomePermanent {
				t.Errorf("topic of %d bytes: %v, want permanent", len(topic), err)
			}
			if len(err.Error()) > 400 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		}
	})
}

func TestSendAcceptsUnroutable(t *testing.T) {
	bubble(t, Options{AcceptUnroutable: true}, func(r *rig) {
		t := r.t
		if r.d.Capabilities().UnroutableDetected {
			t.Error("unroutable-detected is declared")
		}
		if err := r.d.Send(t.Context(), topicT, messages("lost")); err != nil {
			t.Fatal(err)
		}
		s := r.consumer(1)
		r.send(topicT, "a")
		r.expect(s, 5, "a")
	})
}

func TestSendEmptyBatch(t *testing.T) {
	bubble(t, Options{}, func(r *rig) {
		t := r.t
		if err := r.d.Send(t.Context(), "nowhere", nil); err != nil {
			t.Errorf("an empty batch: %v", err)
		}
	})
}

// A batch far beyond the capacity goes through while somebody drains, in order, each message once.
func TestSendBatchBeyondCapacity(t *testing.T) {
	bubble(t, Options{Capacity: 100}, func(r *rig) {
		t := r.t
		s := r.consumer(64)
		batch := numbered(10000)
		sent := make(chan error, 1)
		go func() { sent <- r.d.Send(t.Context(), topicT, batch) }()
		var ids []string
		for len(ids) < len(batch) {
			got, err := s.Receive(t.Context(), 50)
			if err != nil {
				t.Fatal(err)
			}
			if held := r.b.Pending(topicT, groupG) + r.b.Unsettled(topicT, groupG); held > 100 {
				t.Fatalf("the broker holds %d messages", held)
			}
			ids = append(ids, idsOf(got)...)
			r.settle(s, sdk.Ack, got...)
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		for i, m := range batch {
			if ids[i] != m.ID {
				t.Fatalf("message %d is %s, want %s", i, ids[i], m.ID)
			}
		}
		r.holds(0, 0)
	})
}

func TestSendWaitsForRoom(t *testing.T) {
	for name, opts := range map[string]Options{
		"messages": {Capacity: 3},
		"bytes":    {CapacityBytes: 6, MaxPayload: 2}, // a message counts id and payload: 2 bytes
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, opts, func(r *rig) {
				t := r.t
				s := r.consumer(5)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				err := r.d.Send(ctx, topicT, messages("a", "b", "c", "d", "e"))
				entriesAre(t, err, sdk.OutcomeRejected, context.DeadlineExceeded, 3, 4)
				got := r.expect(s, 5, "a", "b", "c")
				sent := make(chan error, 1)
				go func() { sent <- r.d.Send(t.Context(), topicT, messages("d")) }()
				synctest.Wait()
				r.expect(s, 5) // unsettled messages count
				r.settle(s, sdk.Ack, got[1])
				if err := <-sent; err != nil {
					t.Error(err)
				}
				r.expect(s, 5, "d")
			})
		})
	}
}

// A group that is full keeps a message out of the other groups too.
func TestSendIsAtomicOverGroups(t *testing.T) {
	bubble(t, Options{Capacity: 2}, func(r *rig) {
		t := r.t
		s := r.consumer(5)
		r.prepare(topicT, "stands still")
		r.send(topicT, "a", "b")
		r.settle(s, sdk.Ack, r.expect(s, 5, "a", "b")...)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		entriesAre(t, r.d.Send(ctx, topicT, messages("c")), sdk.OutcomeRejected, context.DeadlineExceeded, 0)
		r.expect(s, 5)
		if n := r.b.Pending(topicT, "stands still"); n != 2 {
			t.Errorf("the full group holds %d", n)
		}
	})
}

// Senders that wait are served in the order in which they came; one that gives up lets the next go on.
func TestSendersStandInLine(t *testing.T) {
	bubble(t, Options{Capacity: 1}, func(r *rig) {
		t := r.t
		s := r.consumer(1)
		r.send(topicT, "0")
		var wg sync.WaitGroup
		ctx, giveUp := context.WithCancel(t.Context())
		for _, name := range []string{"1", "2", "3", "4"} {
			sendCtx := t.Context()
			if name == "1" || name == "3" {
				sendCtx = ctx
			}
			wg.Go(func() {
				if err := r.d.Send(sendCtx, topicT, messages(name)); (err != nil) != (sendCtx == ctx) {
					t.Errorf("sender %s: %v", name, err)
				}
			})
			synctest.Wait()
		}
		giveUp()
		synctest.Wait()
		var order []string
		for range 3 {
			got, err := s.Receive(t.Context(), 1)
			if err != nil {
				t.Fatal(err)
			}
			order = append(order, got[0].ID)
			r.settle(s, sdk.Ack, got...)
		}
		wg.Wait()
		if !slices.Equal(order, []string{"0", "2", "4"}) {
			t.Errorf("order is %v", order)
		}
		if line := r.b.topics[topicT].line; len(line) != 0 {
			t.Errorf("%d are still in line", len(line))
		}
	})
}

// Room for several lets several senders go on, each waking the next.
func TestRoomForSeveralSenders(t *testing.T) {
	bubble(t, Options{Capacity: 3}, func(r *rig) {
		s := r.consumer(3)
		r.send(topicT, "a", "b", "c")
		var wg sync.WaitGroup
		for _, name := range []string{"d", "e", "f"} {
			wg.Go(func() { r.send(topicT, name) })
			synctest.Wait()
		}
		r.settle(s, sdk.Ack, r.expect(s, 3, "a", "b", "c")...)
		wg.Wait()
		r.expect(s, 3, "d", "e", "f")
	})
}

// A large message at the head of the line is not overtaken for ever by small ones that would fit.
func TestLargeMessageKeepsItsTurn(t *testing.T) {
	bubble(t, Options{CapacityBytes: 10}, func(r *rig) {
		s := r.consumer(3)
		r.send(topicT, "aaa") // 6 bytes: id and payload
		var wg sync.WaitGroup
		for _, name := range []string{"bbbbb", "c"} {
			wg.Go(func() { r.send(topicT, name) })
			synctest.Wait()
		}
		r.holds(1, 0)
		for _, name := range []string{"aaa", "bbbbb", "c"} {
			r.settle(s, sdk.Ack, r.expect(s, 3, name)...)
			synctest.Wait()
		}
		wg.Wait()
	})
}

func TestConcurrentSenders(t *testing.T) {
	r := newRig(t, Options{Capacity: 50})
	defer r.close()
	s := r.consumer(0)
	const senders, each = 8, 300
	var wg sync.WaitGroup
	for i := range senders {
		wg.Go(func() {
			for j := range each {
				if err := r.d.Send(t.Context(), topicT, messages(fmt.Sprintf("%d/%d", i, j))); err != nil {
					t.Errorf("Send: %v", err)
				}
			}
		})
	}
	next := make(map[string]int)
	for n := 0; n < senders*each; {
		got, err := s.Receive(t.Context(), 100)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range got {
			if want := fmt.Sprintf("%s/%d", d.Key, next[d.Key]); d.ID != want {
				t.Fatalf("received %s, want %s", d.ID, want)
			}
			next[d.Key]++
		}
		r.settle(s, sdk.Ack, got...)
		n += len(got)
	}
	wg.Wait()
	r.holds(0, 0)
}

// 10,000 messages while the consumer stands still: what the broker keeps stays inside both bounds.
func TestMemoryStaysBounded(t *testing.T) {
	bubble(t, Options{Capacity: 500, CapacityBytes: 1 << 20}, func(r *rig) {
		t := r.t
		r.consumer(10)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := r.d.Send(ctx, topicT, numbered(10000))
		entriesAre(t, err, sdk.OutcomeRejected, context.DeadlineExceeded, upTo(500, 10000)...)
		q := r.b.topics[topicT].groups[groupG]
		if q.count != 500 || q.bytes > 1<<20 || q.fresh.len() != 500 {
			t.Errorf("the queue holds %d messages, %d bytes", q.count, q.bytes)
		}
	})
}
