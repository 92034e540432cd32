package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/sdk"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	topicT = "orders"
	groupG = "billing"
)

// rig is a driver on a fresh network.
type rig struct {
	t testing.TB
	n *Network
	d sdk.Driver
	b *Broker
}

// bubble runs a test in virtual time with a fresh rig, whose driver is closed at the end.
func bubble(t *testing.T, opts Options, test func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, opts)
		defer r.close()
		test(r)
	})
}

func newRig(tb testing.TB, opts Options) *rig {
	tb.Helper()
	n := NewNetwork(opts)
	r := &rig{t: tb, n: n, b: n.Broker("b")}
	r.d = r.driver()
	return r
}

// driver opens another driver on the same broker.
func (r *rig) driver() sdk.Driver {
	r.t.Helper()
	d, err := r.n.Driver("b")
	if err != nil {
		r.t.Fatalf("Driver: %v", err)
	}
	return d
}

func (r *rig) close() {
	r.t.Helper()
	if err := r.d.Close(context.Background()); err != nil {
		r.t.Errorf("Close: %v", err)
	}
}

func (r *rig) prepare(topic, group string) {
	r.t.Helper()
	if err := r.d.Prepare(r.t.Context(), sdk.Binding{Topic: topic, Group: group, Declare: true}); err != nil {
		r.t.Fatalf("Prepare: %v", err)
	}
}

// open prepares and opens a source of a group.
func (r *rig) open(b sdk.Binding) sdk.Source {
	r.t.Helper()
	r.prepare(b.Topic, b.Group)
	s, err := r.d.Open(r.t.Context(), b)
	if err != nil {
		r.t.Fatalf("Open: %v", err)
	}
	return s
}

// consumer is open for the usual topic and group.
func (r *rig) consumer(window int) sdk.Source {
	r.t.Helper()
	return r.open(sdk.Binding{Topic: topicT, Group: groupG, Window: window})
}

// messages makes one message for each name; "k/a" is message "k/a" with the order key "k".
func messages(names ...string) []sdk.Message {
	msgs := make([]sdk.Message, 0, len(names))
	for _, name := range names {
		m := sdk.Message{ID: name, Payload: []byte(name)}
		if key, _, keyed := strings.Cut(name, "/"); keyed {
			m.Key = key
		}
		msgs = append(msgs, m)
	}
	return msgs
}

func numbered(n int) []sdk.Message {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("m%05d", i)
	}
	return messages(names...)
}

func (r *rig) send(topic string, names ...string) {
	r.t.Helper()
	if err := r.d.Send(r.t.Context(), topic, messages(names...)); err != nil {
		r.t.Fatalf("Send: %v", err)
	}
}

// receive takes what is there at this instant: it starts a Receive, lets the bubble come to rest, and cancels.
func (r *rig) receive(s sdk.Source, limit int) ([]sdk.Delivery, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	type answer struct {
		got []sdk.Delivery
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		got, err := s.Receive(ctx, limit)
		answers <- answer{got, err}
	}()
	synctest.Wait()
	cancel()
	a := <-answers
	if a.err != nil && errors.Is(a.err, context.Canceled) {
		if len(a.got) > 0 {
			r.t.Errorf("Receive took %d deliveries and returned its context's error", len(a.got))
		}
		return nil, nil
	}
	return a.got, a.err
}

// expect receives exactly the named messages in this order, and nothing where there are no names.
func (r *rig) expect(s sdk.Source, limit int, names ...string) []sdk.Delivery {
	r.t.Helper()
	got, err := r.receive(s, limit)
	if err != nil {
		r.t.Fatalf("Receive: %v", err)
	}
	if ids := idsOf(got); !slices.Equal(ids, names) {
		r.t.Fatalf("received %q, want %q", ids, names)
	}
	return got
}

func idsOf(got []sdk.Delivery) []string {
	var ids []string
	for _, d := range got {
		ids = append(ids, d.ID)
	}
	return ids
}

func settlements(v sdk.Verdict, delay time.Duration, got ...sdk.Delivery) []sdk.Settlement {
	batch := make([]sdk.Settlement, 0, len(got))
	for _, d := range got {
		batch = append(batch, sdk.Settlement{Token: d.Token, Verdict: v, Delay: delay})
	}
	return batch
}

func (r *rig) settle(s sdk.Source, v sdk.Verdict, got ...sdk.Delivery) {
	r.t.Helper()
	if err := s.Settle(r.t.Context(), settlements(v, 0, got...)); err != nil {
		r.t.Fatalf("Settle %s: %v", v, err)
	}
}

// holds checks what the broker has of the usual topic and group.
func (r *rig) holds(pending, unsettled int) {
	r.t.Helper()
	if p, u := r.b.Pending(topicT, groupG), r.b.Unsettled(topicT, groupG); p != pending || u != unsettled {
		r.t.Fatalf("the broker holds %d pending and %d unsettled, want %d and %d", p, u, pending, unsettled)
	}
}

// entriesAre checks that err is a *sdk.BatchError that names exactly these entries, each with the outcome and the cause.
func entriesAre(tb testing.TB, err error, kind sdk.Outcome, cause error, indexes ...int) {
	tb.Helper()
	be, ok := errors.AsType[*sdk.BatchError](err)
	if !ok {
		tb.Fatalf("error is %T %v, want a *sdk.BatchError", err, err)
	}
	if !slices.Equal(be.Indexes(), indexes) {
		tb.Fatalf("error names entries %v, want %v", be.Indexes(), indexes)
	}
	for i, e := range be.Entries {
		if kind != 0 && sdk.OutcomeOf(e) != kind {
			tb.Errorf("entry %d: outcome %s, want %s (%v)", i, sdk.OutcomeOf(e), kind, e)
		}
		if !errors.Is(e, cause) {
			tb.Errorf("entry %d: %v, want %v", i, e, cause)
		}
	}
}

func upTo(from, to int) []int {
	var indexes []int
	for i := from; i < to; i++ {
		indexes = append(indexes, i)
	}
	return indexes
}
