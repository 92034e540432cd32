package main

import (
	"context"
	"sync"

	"github.com/penstock-mq/penstock/sdk"
)

// tally counts at the broker's side, where no kill reaches: what was handed out and what was acknowledged.
type tally struct {
	mu         sync.Mutex
	deliveries int
	acks       int
	changed    chan struct{} // closed and replaced at each ack
}

func newTally() *tally { return &tally{changed: make(chan struct{})} }

// counts gives deliveries and acks so far, and a channel that is closed at the next ack.
func (t *tally) counts() (deliveries, acks int, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.deliveries, t.acks, t.changed
}

func (t *tally) delivered(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.deliveries += n
}

func (t *tally) acked(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.acks += n
	close(t.changed)
	t.changed = make(chan struct{})
}

// talliedDriver counts what passes between the consumer and the broker.
type talliedDriver struct {
	sdk.Driver
	tally *tally
}

func (d talliedDriver) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	source, err := d.Driver.Open(ctx, b)
	if err != nil {
		return nil, err
	}
	tallied := talliedSource{source, d.tally}
	if extender, ok := source.(sdk.LeaseExtender); ok {
		return talliedLeaseSource{tallied, extender}, nil
	}
	return tallied, nil
}

type talliedSource struct {
	sdk.Source
	tally *tally
}

func (s talliedSource) Receive(ctx context.Context, limit int) ([]sdk.Delivery, error) {
	deliveries, err := s.Source.Receive(ctx, limit)
	s.tally.delivered(len(deliveries))
	return deliveries, err
}

func (s talliedSource) Settle(ctx context.Context, batch []sdk.Settlement) error {
	err := s.Source.Settle(ctx, batch)
	acks := 0
	for i, failed := range sdk.EntryErrors(err, len(batch)) {
		if failed == nil && batch[i].Verdict == sdk.Ack {
			acks++
		}
	}
	s.tally.acked(acks)
	return err
}

type talliedLeaseSource struct {
	talliedSource
	sdk.LeaseExtender
}
