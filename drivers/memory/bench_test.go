package memory

import (
	"context"
	"fmt"
	"testing"

	"github.com/penstock-mq/penstock/sdk"
)

// BenchmarkThroughput is send + receive + settle of one message, in batches of 256, on one goroutine; the backlog says
// how many messages wait behind them.
func BenchmarkThroughput(b *testing.B) {
	for _, bc := range []struct {
		name    string
		keys    int
		groups  int
		backlog int
	}{
		{"plain", 0, 1, 0},
		{"keys=64", 64, 1, 0},
		{"distinct keys", 1 << 20, 1, 0},
		{"groups=4", 0, 4, 0},
		{"backlog=50000", 0, 1, 50000},
	} {
		b.Run(bc.name, func(b *testing.B) { benchmark(b, bc.keys, bc.groups, bc.backlog) })
	}
}

func benchmark(b *testing.B, keys, groups, backlog int) {
	b.Helper()
	r := newRig(b, Options{})
	defer r.close()
	const size = 256
	sources := make([]sdk.Source, groups)
	for i := range sources {
		sources[i] = r.open(sdk.Binding{Topic: topicT, Group: fmt.Sprint(i), Window: size})
	}
	batch := make([]sdk.Message, size)
	for i := range batch {
		batch[i] = sdk.Message{
			ID: fmt.Sprint(i), Payload: make([]byte, 200), Metadata: map[string]string{"correlation_id": "0123456789"},
		}
		if keys > 0 {
			batch[i].Key = fmt.Sprint(i % keys)
		}
	}
	ctx := context.Background()
	send := func() {
		if err := r.d.Send(ctx, topicT, batch); err != nil {
			b.Fatal(err)
		}
	}
	for range backlog / size {
		send()
	}
	settled := make([]sdk.Settlement, 0, size)
	b.ReportAllocs()
	b.ResetTimer()
	for n := 0; n < b.N; n += size {
		send()
		for _, s := range sources {
			for taken := 0; taken < size; {
				got, err := s.Receive(ctx, size)
				if err != nil {
					b.Fatal(err)
				}
				taken += len(got)
				settled = settled[:0]
				for _, d := range got {
					settled = append(settled, sdk.Settlement{Token: d.Token, Verdict: sdk.Ack})
				}
				if err := s.Settle(ctx, settled); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
}

// BenchmarkHandOver is one message at a time between a sender and a consumer that waits for it.
func BenchmarkHandOver(b *testing.B) {
	r := newRig(b, Options{})
	defer r.close()
	s := r.consumer(1)
	ctx := context.Background()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range b.N {
			got, err := s.Receive(ctx, 1)
			if err != nil {
				b.Errorf("Receive: %v", err)
				return
			}
			if err := s.Settle(ctx, settlements(sdk.Ack, 0, got...)); err != nil {
				b.Errorf("Settle: %v", err)
				return
			}
		}
	}()
	batch := messages("a")
	for range b.N {
		if err := r.d.Send(ctx, topicT, batch); err != nil {
			b.Fatal(err)
		}
	}
	<-done
}
