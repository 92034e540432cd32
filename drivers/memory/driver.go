package memory

import (
	"context"
	"fmt"

	"github.com/penstock-mq/penstock/sdk"
)

// driver is one connection to a broker.
type driver struct {
	b      *Broker
	accept bool
	done   chan struct{} // closed by Close

	// Guarded by the broker's mutex.
	closed  bool
	sources map[*source]struct{}
}

var _ sdk.Driver = (*driver)(nil)

func newDriver(b *Broker, accept bool) *driver {
	return &driver{b: b, accept: accept, done: make(chan struct{}), sources: make(map[*source]struct{})}
}

// Capabilities declares everything but settling in a database transaction, which needs a database.
func (d *driver) Capabilities() sdk.Capabilities {
	return sdk.Capabilities{
		Durable: true, UnroutableDetected: !d.accept, Redelivers: true, DeliveryCount: true, DelayedRequeue: true,
		Reject: true, Ordered: true, KeyOrdered: true, OrderAfterRequeue: true, Groups: true,
		Settle: sdk.SettleConfirmed, Progress: sdk.ProgressLease,
		Lease: d.b.opts.Lease, MaxPayload: d.b.opts.MaxPayload, Horizon: d.b.opts.Horizon,
	}
}

// Prepare makes or verifies a topic and group. It does not block.
func (d *driver) Prepare(ctx context.Context, b sdk.Binding) error {
	if err := d.prepare(ctx, b); err != nil {
		return fmt.Errorf("memory: prepare: %w", err)
	}
	return nil
}

func (d *driver) prepare(ctx context.Context, b sdk.Binding) error {
	if err := d.enter(ctx); err != nil {
		return err
	}
	defer d.b.mu.Unlock()
	if err := checkBinding(b); err != nil {
		return err
	}
	if b.Declare {
		d.b.declare(b.Topic).prepare(b.Group)
		return nil
	}
	_, err := d.verify(b)
	return err
}

// enter takes the broker's mutex, or gives the reason why the driver does not work.
func (d *driver) enter(ctx context.Context) error {
	if err := d.b.pass(ctx, d.done); err != nil {
		return err
	}
	d.b.mu.Lock()
	err := ctx.Err()
	if d.closed {
		err = sdk.ErrClosed
	}
	if err != nil {
		d.b.mu.Unlock()
	}
	return err
}

// verify gives the queue of a group, nil where only a topic is asked for, or an error that names what is missing.
func (d *driver) verify(b sdk.Binding) (*queue, error) {
	t := d.b.topics[b.Topic]
	if t == nil {
		return nil, fmt.Errorf("topic %q: %w", b.Topic, ErrNotPrepared)
	}
	if b.Group == "" {
		return nil, nil
	}
	q := t.groups[b.Group]
	if q == nil {
		return nil, fmt.Errorf("group %q of topic %q: %w", b.Group, b.Topic, ErrNotPrepared)
	}
	return q, nil
}

func checkBinding(b sdk.Binding) error {
	if err := checkName("topic", b.Topic); err != nil {
		return err
	}
	if b.Group != "" {
		if err := checkName("group", b.Group); err != nil {
			return err
		}
	}
	if b.Window < 0 {
		return fmt.Errorf("window of topic %q is %d: it must be at least 1, or 0 for the default", b.Topic, b.Window)
	}
	if b.Lease < 0 {
		return fmt.Errorf("lease of topic %q is %s: it must be positive, or 0 for the default", b.Topic, b.Lease)
	}
	return nil
}

// Send stores the batch. It blocks while a group of the topic is full, until ctx is done; then the entries that found no
// room are named as rejected.
func (d *driver) Send(ctx context.Context, topic string, batch []sdk.Message) error {
	s := &sending{d: d, b: d.b, topic: topic}
	if err := d.enter(ctx); err != nil {
		if len(batch) == 0 {
			return s.fail(sdk.OutcomeRejected, err)
		}
		return failFrom(0, len(batch), s.fail(sdk.OutcomeRejected, err))
	}
	d.b.mu.Unlock()
	if len(batch) == 0 {
		return nil
	}
	if err := s.check(batch); err != nil {
		return err
	}
	chunk := make([]*stored, 0, min(sendChunk, len(batch)))
	for done := 0; done < len(batch); {
		chunk = chunk[:0]
		for _, m := range batch[done:min(done+sendChunk, len(batch))] {
			chunk = append(chunk, keep(m))
		}
		n, err := s.store(ctx, chunk)
		if err != nil {
			return failFrom(done+n, len(batch), err)
		}
		done += len(chunk)
	}
	return nil
}

// check refuses a batch before anything of it is stored: entries that can never be stored as permanent, and their
// neighbours as rejected, so that they can be sent again without them.
func (s *sending) check(batch []sdk.Message) error {
	if err := checkName("topic", s.topic); err != nil {
		return failFrom(0, len(batch), s.fail(sdk.OutcomePermanent, err))
	}
	entries := make(map[int]error)
	opts := s.b.opts
	for i, m := range batch {
		if len(m.Payload) > opts.MaxPayload {
			entries[i] = s.fail(sdk.OutcomePermanent,
				fmt.Errorf("payload has %d bytes, at most %d are taken: %w", len(m.Payload), opts.MaxPayload, sdk.ErrTooLarge))
		} else if size := sizeOf(m); size > opts.CapacityBytes {
			entries[i] = s.fail(sdk.OutcomePermanent,
				fmt.Errorf("message has %d bytes with its metadata, a queue holds %d: %w", size, opts.CapacityBytes, sdk.ErrTooLarge))
		}
	}
	if len(entries) == 0 {
		return nil
	}
	neighbour := s.fail(sdk.OutcomeRejected, fmt.Errorf("nothing of the batch was sent: %d entries are too large", len(entries)))
	for i := range batch {
		if entries[i] == nil {
			entries[i] = neighbour
		}
	}
	return &sdk.BatchError{Entries: entries}
}

// failFrom names the entries from one index on.
func failFrom(from, n int, err error) error {
	entries := make(map[int]error, n-from)
	for i := from; i < n; i++ {
		entries[i] = err
	}
	return &sdk.BatchError{Entries: entries}
}

// Open starts a consumer. It does not block.
func (d *driver) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	s, err := d.open(ctx, b)
	if err != nil {
		return nil, fmt.Errorf("memory: open source: %w", err)
	}
	return s, nil
}

func (d *driver) open(ctx context.Context, b sdk.Binding) (*source, error) {
	if err := d.enter(ctx); err != nil {
		return nil, err
	}
	defer d.b.mu.Unlock()
	if err := checkBinding(b); err != nil {
		return nil, err
	}
	if b.Group == "" {
		return nil, fmt.Errorf("group for topic %q is empty: a source needs one", b.Topic)
	}
	q, err := d.verify(b)
	if err != nil {
		return nil, err
	}
	s := newSource(d, q, b)
	q.sources[s] = struct{}{}
	d.sources[s] = struct{}{}
	return s, nil
}

// Close ends all sources of the driver and its Sends that wait for room. It does not block and always succeeds.
func (d *driver) Close(context.Context) error {
	d.b.mu.Lock()
	defer d.b.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	close(d.done)
	now := d.b.now()
	touched := make(map[*queue]struct{})
	for s := range d.sources {
		s.q.end(s, sdk.ErrClosed)
		touched[s.q] = struct{}{}
	}
	for q := range touched {
		q.pump(now)
	}
	return nil
}
