package sdk

import "testing"

// A queue that always holds something must not grow with what has passed through it.
func TestFifoIsBoundedByWhatItHolds(t *testing.T) {
	var q fifo
	const held = 10
	sent := make([]*inflight, 0, 100_000)
	for i := range cap(sent) {
		e := &inflight{attempt: i}
		sent = append(sent, e)
		q.push(e)
		if i < held {
			continue
		}
		if got := q.pop(); got != sent[i-held] {
			t.Fatalf("pop %d gave element %d", i-held, got.attempt)
		}
	}
	if c := cap(q.items); c > 8*held {
		t.Errorf("the queue holds %d elements and has room for %d", held, c)
	}
	for i := range held {
		if got := q.pop(); got != sent[len(sent)-held+i] {
			t.Fatalf("the rest is out of order at %d", i)
		}
	}
	if q.pop() != nil {
		t.Error("an empty queue gave something")
	}
}
