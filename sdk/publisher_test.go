package sdk

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

func newTestPublisher(t *testing.T, d Driver, cfg PublisherConfig) (*Publisher, *recorder) {
	t.Helper()
	rec := &recorder{}
	cfg.Observer = rec
	p, err := NewPublisher(d, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p, rec
}

func messagesOf(ids ...string) []*message.Message {
	out := make([]*message.Message, len(ids))
	for i, id := range ids {
		out[i] = message.NewMessage(id, message.Payload("secret payload of "+id))
		out[i].Metadata.Set(MetadataKey, "key-"+id)
		out[i].Metadata.Set("kind", "test")
	}
	return out
}

func TestPublishCopiesAndConverts(t *testing.T) {
	d := newFake(confirming())
	d.onSend = func(_ context.Context, _ int, batch []Message) error {
		for i := range batch {
			batch[i].Metadata["spoiled"] = "yes"
		}
		return nil
	}
	p, _ := newTestPublisher(t, d, PublisherConfig{})
	msgs := messagesOf("a")
	if err := p.Publish("t", msgs...); err != nil {
		t.Fatal(err)
	}
	sent := d.queues["t\x00g"].pending[0].Message
	if sent.ID != "a" || sent.Key != "key-a" || sent.Metadata["kind"] != "test" || string(sent.Payload) != "secret payload of a" {
		t.Errorf("sent %+v", sent)
	}
	if _, there := sent.Metadata[MetadataKey]; there {
		t.Error("the key is sent twice: as Key and as metadata")
	}
	if msgs[0].Metadata.Get("spoiled") != "" || msgs[0].Metadata.Get(MetadataKey) != "key-a" {
		t.Errorf("the driver changed the caller's metadata: %v", msgs[0].Metadata)
	}
	back := toWatermill(t.Context(), &sent)
	if back.Metadata.Get(MetadataKey) != "key-a" || back.UUID != "a" {
		t.Errorf("back came %+v", back.Metadata)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func TestPublishPreparesEachTopicOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		failures := 2
		d.onPrepare = func(context.Context, Binding) error {
			if failures--; failures >= 0 {
				return errCut
			}
			return nil
		}
		p, rec := newTestPublisher(t, d, PublisherConfig{VerifyOnly: true})
		for _, topic := range []string{"t", "u", "t", "t"} {
			if err := p.Publish(topic, messagesOf("a")...); err != nil {
				t.Fatal(err)
			}
		}
		if n := d.counted("prepare"); n != 4 {
			t.Errorf("%d prepares, want two that fail and one for each topic", n)
		}
		if want := (Binding{Topic: "t"}); d.bindings[0] != want {
			t.Errorf("binding %+v", d.bindings[0])
		}
		if n := len(rec.of(EventPublishRetried)); n != 2 {
			t.Errorf("%d retries reported", n)
		}
	})
}

// A topic that is deleted is prepared anew before the next attempt (F04).
func TestPublishPreparesAgainAfterAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSend = func(_ context.Context, n int, _ []Message) error {
			if n == 2 {
				return &BatchError{Entries: map[int]error{0: errRejected}}
			}
			return nil
		}
		p, _ := newTestPublisher(t, d, PublisherConfig{})
		for range 3 {
			if err := p.Publish("t", messagesOf("a")...); err != nil {
				t.Fatal(err)
			}
		}
		if n := d.counted("prepare"); n != 2 {
			t.Errorf("%d prepares", n)
		}
	})
}

func TestPublishRetriesOnlyWhatFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		var attempts [][]string
		d.onSend = func(_ context.Context, n int, batch []Message) error {
			var got []string
			for _, m := range batch {
				got = append(got, m.ID)
			}
			attempts = append(attempts, got)
			switch n {
			case 1:
				return &BatchError{Entries: map[int]error{1: errRejected, 3: &OutcomeError{Kind: OutcomeUnknown, Err: errCut}}}
			case 2:
				return &BatchError{Entries: map[int]error{1: errRejected}}
			default:
				return nil
			}
		}
		p, rec := newTestPublisher(t, d, PublisherConfig{})
		if err := p.Publish("t", messagesOf("a", "b", "c", "d")...); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(attempts); got != "[[a b c d] [b d] [d]]" {
			t.Errorf("attempts %v", got)
		}
		if got := fmt.Sprint(d.pending("t", "g")); got != "[a c b d]" {
			t.Errorf("arrived %v", got)
		}
		retries := rec.of(EventPublishRetried)
		if len(retries) != 2 || retries[0].ID != "b" || retries[0].Attempt != 1 || retries[0].Delay < DefaultBackoffMin {
			t.Errorf("reported %+v", retries)
		}
	})
}

func TestPublishSplitsBatches(t *testing.T) {
	caps := confirming()
	caps.MaxBatch = 300
	d := newFake(caps)
	p, _ := newTestPublisher(t, d, PublisherConfig{})
	want := ids(1000)
	if err := p.Publish("t", messagesOf(want...)...); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(d.sentBatch); got != "[300 300 300 100]" {
		t.Errorf("batches %v", got)
	}
	if got := fmt.Sprint(d.pending("t", "g")); got != fmt.Sprint(want) {
		t.Error("the order is lost")
	}
	if err := p.Publish("t"); err != nil || len(d.sentBatch) != 4 {
		t.Errorf("publishing nothing: %v, %d sends", err, len(d.sentBatch))
	}
}

func TestPublishErrors(t *testing.T) {
	permanent := &OutcomeError{Kind: OutcomePermanent, Err: ErrUnroutable}
	entries := func(errs ...error) error {
		be := &BatchError{Entries: map[int]error{}}
		for i, err := range errs {
			if err != nil {
				be.Entries[i] = err
			}
		}
		return be
	}
	for name, c := range map[string]struct {
		first, then error // the answer to the first Send, and to all others
		outcome     Outcome
		is          error
		failed      string
		atOnce      bool
	}{
		"permanent":                {entries(nil, permanent), nil, OutcomePermanent, ErrUnroutable, "1 of 3", true},
		"permanent among rejected": {entries(errRejected, permanent), nil, OutcomePermanent, ErrUnroutable, "2 of 3", true},
		"rejected":                 {entries(errRejected), entries(errRejected), OutcomeRejected, nil, "1 of 3", false},
		"unknown":                  {errCut, errCut, OutcomeUnknown, errCut, "3 of 3", false},
		"unknown, then rejected":   {errCut, entries(errRejected), OutcomeUnknown, nil, "1 of 3", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newFake(confirming())
				d.onSend = func(_ context.Context, n int, _ []Message) error {
					if n == 1 {
						return c.first
					}
					return c.then
				}
				p, _ := newTestPublisher(t, d, PublisherConfig{})
				start := time.Now()
				err := p.Publish("orders", messagesOf("a", "b", "c")...)
				took := time.Since(start)
				if err == nil || OutcomeOf(err) != c.outcome || (c.is != nil && !errors.Is(err, c.is)) {
					t.Fatalf("error %v", err)
				}
				for _, want := range []string{`"orders"`, c.outcome.String(), c.failed} {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("%q does not say %s", err, want)
					}
				}
				if strings.Contains(err.Error(), "secret") {
					t.Errorf("the error holds a payload: %q", err)
				}
				if c.atOnce != (took == 0) || took > DefaultPublishTimeout {
					t.Errorf("returned after %v", took)
				}
			})
		})
	}
}

func TestPublishCountsWhatFailed(t *testing.T) {
	caps := confirming()
	caps.MaxBatch = 2
	d := newFake(caps)
	d.onSend = func(_ context.Context, n int, _ []Message) error {
		if n == 2 {
			return &BatchError{Entries: map[int]error{1: &OutcomeError{Kind: OutcomePermanent, Err: ErrUnroutable}}}
		}
		return nil
	}
	p, _ := newTestPublisher(t, d, PublisherConfig{})
	err := p.Publish("t", messagesOf("a", "b", "c", "d", "e")...) // d fails, e is not sent
	if err == nil || !strings.Contains(err.Error(), "2 of 5") {
		t.Errorf("error %v", err)
	}
}

func TestPublishRefusesLargePayloadsBeforeSending(t *testing.T) { // P07
	caps := confirming()
	caps.MaxPayload = 30
	d := newFake(caps)
	p, _ := newTestPublisher(t, d, PublisherConfig{})
	msgs := messagesOf("a", "b")
	msgs[1].Payload = make([]byte, 31)
	err := p.Publish("t", msgs...)
	if !errors.Is(err, ErrTooLarge) || OutcomeOf(err) != OutcomePermanent || d.counted("send") != 0 {
		t.Errorf("error %v after %d sends", err, d.counted("send"))
	}
	if err := p.Publish("t", msgs[0]); err != nil {
		t.Errorf("the next message: %v", err)
	}
}

// P08: a broker that does not answer at all.
func TestPublishReturnsByItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSend = func(ctx context.Context, _ int, _ []Message) error { <-ctx.Done(); return ctx.Err() }
		p, _ := newTestPublisher(t, d, PublisherConfig{})
		for name, c := range map[string]struct {
			ctx  time.Duration
			want time.Duration
		}{"total": {time.Hour, DefaultPublishTimeout}, "context": {3 * time.Second, 3 * time.Second}, "expired": {0, 0}} {
			ctx, cancel := context.WithTimeout(t.Context(), c.ctx)
			start := time.Now()
			err := p.PublishContext(ctx, "t", messagesOf("a")...)
			cancel()
			if took := time.Since(start); took > c.want || took < c.want-time.Second {
				t.Errorf("%s: returned after %v", name, took)
			}
			if err == nil || (c.ctx > 0 && OutcomeOf(err) != OutcomeUnknown) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if n := d.counted("send"); n > 5 {
			t.Errorf("%d attempts: each should take 10 s", n)
		}
	})
}

func TestPublishAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		d.onSend = func(context.Context, int, []Message) error { time.Sleep(5 * time.Second); return nil }
		p, _ := newTestPublisher(t, d, PublisherConfig{})
		result := make(chan error, 1)
		go func() { result <- p.Publish("t", messagesOf("a")...) }()
		synctest.Wait()
		start := time.Now()
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				if err := p.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		if err := p.Publish("t", messagesOf("b")...); !errors.Is(err, ErrClosed) {
			t.Errorf("publish after close: %v", err)
		}
		wg.Wait()
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("closed after %v: the running call was not waited for", took)
		}
		if err := <-result; err != nil {
			t.Errorf("the running call: %v", err)
		}
		if d.closed {
			t.Error("the driver was closed")
		}
	})
}

func TestPublishWithAClosedDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newFake(confirming())
		_ = d.Close(t.Context())
		p, _ := newTestPublisher(t, d, PublisherConfig{})
		start := time.Now()
		if err := p.Publish("t", messagesOf("a")...); !errors.Is(err, ErrClosed) || time.Since(start) != 0 {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

func TestPublisherConfiguration(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  PublisherConfig
		want string
	}{
		"timeout": {PublisherConfig{Timeout: -1}, "Timeout"},
		"attempt": {PublisherConfig{AttemptTimeout: -1}, "AttemptTimeout"},
		"both":    {PublisherConfig{Timeout: 1, AttemptTimeout: 2}, "lower AttemptTimeout"},
		"backoff": {PublisherConfig{Backoff: Backoff{Min: 2, Max: 1}}, "swap"},
	} {
		if _, err := NewPublisher(newFake(Capabilities{}), c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewPublisher(nil, PublisherConfig{}); err == nil {
		t.Error("a nil driver was accepted")
	}
	if _, err := NewPublisher(newFake(Capabilities{}), PublisherConfig{Timeout: time.Second}); err != nil {
		t.Errorf("a short total with the default attempt: %v", err)
	}
	p, _ := newTestPublisher(t, newFake(Capabilities{}), PublisherConfig{})
	if err := p.Publish("", messagesOf("a")...); err == nil {
		t.Error("an empty topic was accepted")
	}
}

func TestTopicBookIsBounded(t *testing.T) {
	var b topicBook
	for i := range topicsKept + 10 {
		b.remember(fmt.Sprint(i))
	}
	if len(b.prepared) > topicsKept || !b.known(fmt.Sprint(topicsKept+9)) {
		t.Errorf("%d topics are remembered", len(b.prepared))
	}
}
