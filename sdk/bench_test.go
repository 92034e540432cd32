package sdk

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

// fastDriver is a broker that costs next to nothing: what is measured is the engine.
type fastDriver struct {
	caps    Capabilities
	left    atomic.Int64
	settled atomic.Int64
	calls   atomic.Int64
	all     chan struct{}
	total   int64
}

func newFast(total int) *fastDriver {
	d := &fastDriver{caps: Capabilities{Settle: SettleConfirmed}, all: make(chan struct{}), total: int64(total)}
	d.left.Store(d.total)
	return d
}

func (d *fastDriver) Capabilities() Capabilities                    { return d.caps }
func (d *fastDriver) Prepare(context.Context, Binding) error        { return nil }
func (d *fastDriver) Send(context.Context, string, []Message) error { return nil }
func (d *fastDriver) Open(context.Context, Binding) (Source, error) { return &fastSource{d: d}, nil }
func (d *fastDriver) Close(context.Context) error                   { return nil }
func (s *fastSource) Capabilities() Capabilities                    { return s.d.caps }
func (s *fastSource) Close(context.Context) error                   { return nil }

type fastSource struct {
	d       *fastDriver
	next    int64
	payload []byte
}

func (s *fastSource) Receive(ctx context.Context, limit int) ([]Delivery, error) {
	n := min(int64(limit), s.d.left.Load())
	if n == 0 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	s.d.left.Add(-n)
	if s.payload == nil {
		s.payload = make([]byte, 256)
	}
	out := make([]Delivery, n)
	for i := range out {
		s.next++
		out[i] = Delivery{
			Message: Message{ID: "id", Metadata: map[string]string{"kind": "scan"}, Payload: s.payload},
			Token:   Token(strconv.FormatInt(s.next, 10)),
			Attempt: 1,
		}
	}
	return out, nil
}

func (s *fastSource) Settle(_ context.Context, batch []Settlement) error {
	s.d.calls.Add(1)
	if s.d.settled.Add(int64(len(batch))) == s.d.total {
		close(s.d.all)
	}
	return nil
}

func benchmarkEngine(b *testing.B, cfg SubscriberConfig, consume func(<-chan *message.Message)) {
	b.Helper()
	b.ReportAllocs()
	d := newFast(b.N)
	cfg.Group = "g"
	sub, err := NewSubscriber(d, cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	out, err := sub.Subscribe(b.Context(), "t")
	if err != nil {
		b.Fatal(err)
	}
	go consume(out)
	<-d.all
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	b.ReportMetric(float64(b.N)/float64(d.calls.Load()), "msg/settle")
	if err := sub.Close(); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkEngine acknowledges at once, in the goroutine that reads the channel.
func BenchmarkEngine(b *testing.B) {
	for _, window := range []int{1, 16, 256, 4096} {
		b.Run("window="+strconv.Itoa(window), func(b *testing.B) {
			benchmarkEngine(b, SubscriberConfig{MaxInFlight: window}, func(out <-chan *message.Message) {
				for msg := range out {
					msg.Ack()
				}
			})
		})
	}
}

// BenchmarkEngineObserved is BenchmarkEngine with an observer.
func BenchmarkEngineObserved(b *testing.B) {
	benchmarkEngine(b, SubscriberConfig{Observer: discard{}}, func(out <-chan *message.Message) {
		for msg := range out {
			msg.Ack()
		}
	})
}

type discard struct{}

func (discard) Observe(Event) {}

// BenchmarkEngineGoroutines acknowledges in a goroutine per message, as Watermill's router does.
func BenchmarkEngineGoroutines(b *testing.B) {
	benchmarkEngine(b, SubscriberConfig{}, func(out <-chan *message.Message) {
		for msg := range out {
			go msg.Ack()
		}
	})
}
