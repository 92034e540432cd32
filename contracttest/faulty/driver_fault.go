package faulty

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// DriverFault is one broken promise of a driver, planted as a wrapper around a healthy one. A contract suite that passes
// over it is blind.
type DriverFault struct {
	// Name is what reports call it.
	Name string
	// Breaks says in one sentence what a user would see.
	Breaks string
	// Wrap plants the fault. fired counts how often it did what it should not; a fault that never fires proves nothing.
	// Sources of the healthy driver have to be LeaseExtenders.
	Wrap func(d sdk.Driver, fired *atomic.Int64) sdk.Driver
}

// DriverFaults gives every fault of a driver.
func DriverFaults() []DriverFault {
	return []DriverFault{
		{"ack-before-handing-over", "a consumer that dies loses what it was working on", onSource(ackBeforeHandingOver)},
		{"lose-on-requeue", "a handler that fails once loses its message", onSource(loseOnRequeue)},
		{"redeliver-acked", "what was handled comes again after a reconnect", onSource(redeliverAcked)},
		{"token-reused", "a late ack hits the next attempt", onSource(tokenReused)},
		{"stale-token-settles", "the ack of an attempt that was lost settles the present one", onSource(staleTokenSettles)},
		{"window-ignored", "one member hoards the messages of all", windowIgnored},
		{"metadata-dropped", "metadata with an empty value does not arrive", onSend(metadataDropped)},
		{"empty-payload-lost", "a message without payload does not arrive", onSend(emptyPayloadLost)},
		{"order-swapped", "neighbours in a batch change places", onSend(orderSwapped)},
		{"batch-partly-dropped", "the last message of a batch does not arrive, and Send says nil", onSend(batchPartlyDropped)},
		{"sent-twice", "every message comes twice", sentTwice},
		{"sent-later", "nil from Send, and the message is lost with the process", sentLater},
		{"unroutable-swallowed", "a message that nobody takes is lost unseen", onAnswer(unroutableSwallowed)},
		{"too-large-cut", "a payload that is too large arrives cut", tooLargeCut},
		{"refusal-permanent", "a message that was refused for a moment is given up", onAnswer(refusalPermanent)},
		{"deadline-ignored", "a broker that does not answer holds its callers for ever", deadlineIgnored},
		{"noticed-late", "a caller whose time is over waits on", noticedLate},
		{"closed-still-works", "a driver that was closed goes on working", closedStillWorks},
		{"batch-kept", "the caller changes its message, and what arrives changes too", batchKept},
		{"members-apart", "each member of a group gets every message", membersApart},
		{"groups-mixed", "two groups take each other's messages", groupsMixed},
		{"prepare-blind", "missing topology is not noticed", prepareBlind},
		{"payload-limit-lie", "the declared payload limit is not the real one", payloadLimitLie},
		{"source-declares-less", "a source takes back what its driver promised", onSource(declaresLess)},
		{"delay-ignored", "a delayed requeue comes back at once", onSource(delayIgnored)},
		{"reject-loses", "a rejected message is kept nowhere", onSource(rejectLoses)},
		{"reject-requeues", "a rejected message comes back for ever", onSource(rejectRequeues)},
		{"errors-swallowed", "a settlement that failed counts as confirmed", onSource(errorsSwallowed)},
		{"confirmed-too-early", "confirmed is said before the broker said so", onSource(confirmedTooEarly)},
		{"ack-cumulative", "the ack of one message settles those before it", onSource(ackCumulative)},
		{"extend-forgotten", "a handler that takes long is run again beside itself", onSource(extendForgotten)},
		{"attempt-constant", "attempts are not counted", onSource(attemptConstant)},
		{"neighbours-charged", "one requeue sends its neighbours back too", onSource(neighboursCharged)},
		{"close-forgotten", "what a closed consumer held stays held", onSource(closeForgotten)},
		{"close-acks", "what a closed consumer held is lost", onSource(closeAcks)},
		{"leak", "every source leaves a goroutine behind", onSource(leak)},
	}
}

// driver is a healthy driver with single methods replaced.
type driver struct {
	sdk.Driver
	send    func(ctx context.Context, topic string, batch []sdk.Message) error
	open    func(ctx context.Context, b sdk.Binding) (sdk.Source, error)
	prepare func(ctx context.Context, b sdk.Binding) error
	close   func(ctx context.Context) error
	caps    func() sdk.Capabilities
}

func (d driver) Send(ctx context.Context, topic string, batch []sdk.Message) error {
	if d.send == nil {
		return d.Driver.Send(ctx, topic, batch)
	}
	return d.send(ctx, topic, batch)
}

func (d driver) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	if d.open == nil {
		return d.Driver.Open(ctx, b)
	}
	return d.open(ctx, b)
}

func (d driver) Prepare(ctx context.Context, b sdk.Binding) error {
	if d.prepare == nil {
		return d.Driver.Prepare(ctx, b)
	}
	return d.prepare(ctx, b)
}

func (d driver) Close(ctx context.Context) error {
	if d.close == nil {
		return d.Driver.Close(ctx)
	}
	return d.close(ctx)
}

func (d driver) Capabilities() sdk.Capabilities {
	if d.caps == nil {
		return d.Driver.Capabilities()
	}
	return d.caps()
}

// source is a healthy source with single methods replaced.
type source struct {
	sdk.Source
	caps    func() sdk.Capabilities
	receive func(ctx context.Context, limit int) ([]sdk.Delivery, error)
	settle  func(ctx context.Context, batch []sdk.Settlement) error
	extend  func(ctx context.Context, tokens []sdk.Token, d time.Duration) error
	close   func(ctx context.Context) error
}

var _ sdk.LeaseExtender = source{}

func (s source) Capabilities() sdk.Capabilities {
	if s.caps == nil {
		return s.Source.Capabilities()
	}
	return s.caps()
}

func (s source) Receive(ctx context.Context, limit int) ([]sdk.Delivery, error) {
	if s.receive == nil {
		return s.Source.Receive(ctx, limit)
	}
	return s.receive(ctx, limit)
}

func (s source) Settle(ctx context.Context, batch []sdk.Settlement) error {
	if s.settle == nil {
		return s.Source.Settle(ctx, batch)
	}
	return s.settle(ctx, batch)
}

func (s source) Extend(ctx context.Context, tokens []sdk.Token, d time.Duration) error {
	if s.extend != nil {
		return s.extend(ctx, tokens, d)
	}
	if ext, ok := s.Source.(sdk.LeaseExtender); ok {
		return ext.Extend(ctx, tokens, d)
	}
	return sdk.ErrUnsupported
}

func (s source) Close(ctx context.Context) error {
	if s.close == nil {
		return s.Source.Close(ctx)
	}
	return s.close(ctx)
}

// onSource plants a fault into every source that the driver opens.
func onSource(plant func(s sdk.Source, fired *atomic.Int64) sdk.Source) func(sdk.Driver, *atomic.Int64) sdk.Driver {
	return func(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
		return driver{Driver: d, open: func(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
			s, err := d.Open(ctx, b)
			if err != nil {
				return nil, err
			}
			return plant(s, fired), nil
		}}
	}
}

// onSend plants a fault into what is sent: change gives the batch that really goes out.
func onSend(change func(batch []sdk.Message, fired *atomic.Int64) []sdk.Message) func(sdk.Driver, *atomic.Int64) sdk.Driver {
	return func(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
		return driver{Driver: d, send: func(ctx context.Context, topic string, batch []sdk.Message) error {
			return d.Send(ctx, topic, change(batch, fired))
		}}
	}
}

// onAnswer plants a fault into what Send says about each entry.
func onAnswer(change func(err error, fired *atomic.Int64) error) func(sdk.Driver, *atomic.Int64) sdk.Driver {
	return func(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
		return driver{Driver: d, send: func(ctx context.Context, topic string, batch []sdk.Message) error {
			be := &sdk.BatchError{Entries: map[int]error{}}
			for i, err := range sdk.EntryErrors(d.Send(ctx, topic, batch), len(batch)) {
				if err == nil {
					continue
				}
				if err = change(err, fired); err != nil {
					be.Entries[i] = err
				}
			}
			if len(be.Entries) == 0 {
				return nil
			}
			return be
		}}
	}
}

// verdicts plants a fault into what is settled: change gives the batch that really goes out, entry by entry.
func verdicts(s sdk.Source, change func(sdk.Settlement) sdk.Settlement) source {
	return source{Source: s, settle: func(ctx context.Context, batch []sdk.Settlement) error {
		changed := make([]sdk.Settlement, len(batch))
		for i, st := range batch {
			changed[i] = change(st)
		}
		return s.Settle(ctx, changed)
	}}
}

// held is what a source has handed out and not settled, in order. Its zero value is empty.
type held struct {
	mu sync.Mutex
	ds []sdk.Delivery
}

func (h *held) add(ds []sdk.Delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ds = append(h.ds, ds...)
}

// remove forgets a delivery and returns those that were handed out before it.
func (h *held) remove(t sdk.Token) (before []sdk.Delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, d := range h.ds {
		if d.Token == t {
			before = append(before, h.ds[:i]...)
			h.ds = append(h.ds[:i:i], h.ds[i+1:]...)
			return before
		}
	}
	return nil
}

func (h *held) all() []sdk.Delivery {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]sdk.Delivery(nil), h.ds...)
}

// watched makes a source that keeps account of what it holds.
func watched(s sdk.Source, h *held) source {
	return source{
		Source: s,
		receive: func(ctx context.Context, limit int) ([]sdk.Delivery, error) {
			ds, err := s.Receive(ctx, limit)
			h.add(ds)
			return ds, err
		},
		settle: func(ctx context.Context, batch []sdk.Settlement) error {
			for _, st := range batch {
				h.remove(st.Token)
			}
			return s.Settle(ctx, batch)
		},
	}
}
