package stage

import (
	"context"
	"sync"

	"github.com/penstock-mq/penstock/sdk"
)

// Tally counts at the broker's side, where no kill of a consumer reaches: what was handed out and what was acknowledged. It
// is safe for concurrent use.
type Tally struct {
	mu         sync.Mutex
	deliveries int
	acks       int
	changed    chan struct{} // closed and replaced at each ack
}

// NewTally starts at zero.
func NewTally() *Tally { return &Tally{changed: make(chan struct{})} }

// Counts gives deliveries and acks so far, and a channel that is closed at the next ack.
func (t *Tally) Counts() (deliveries, acks int, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.deliveries, t.acks, t.changed
}

// Driver is d with what passes through its sources counted.
func (t *Tally) Driver(d sdk.Driver) sdk.Driver { return talliedDriver{d, t} }

func (t *Tally) delivered(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.deliveries += n
}

func (t *Tally) acked(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.acks += n
	close(t.changed)
	t.changed = make(chan struct{})
}

type talliedDriver struct {
	sdk.Driver
	tally *Tally
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
	tally *Tally
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
