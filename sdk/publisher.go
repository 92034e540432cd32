package sdk

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// PublisherConfig describes a [Publisher]. The zero value is right.
type PublisherConfig struct {
	// Timeout bounds one Publish with all its attempts. 0 means 30 s.
	Timeout time.Duration
	// AttemptTimeout bounds one Prepare and one Send. 0 means 10 s, or Timeout where that is shorter.
	AttemptTimeout time.Duration
	// Backoff bounds the wait between attempts. Zero means 100 ms to 1 min.
	Backoff Backoff
	// VerifyOnly makes Prepare verify that a topic exists, instead of creating it.
	VerifyOnly bool
	// Observer is told what happens; nil means nobody.
	Observer Observer
	// Logger is Watermill's; nil logs nothing.
	Logger watermill.LoggerAdapter
}

func (c PublisherConfig) validate() error {
	durations := []namedDuration{{"Timeout", c.Timeout}, {"AttemptTimeout", c.AttemptTimeout}}
	if err := refuseNegative("PublisherConfig", durations); err != nil {
		return err
	}
	if err := c.Backoff.validate("PublisherConfig"); err != nil {
		return err
	}
	if total := c.withDefaults().Timeout; c.AttemptTimeout > total {
		return fmt.Errorf("PublisherConfig.AttemptTimeout (%v) is above Timeout (%v), which bounds all attempts together: "+
			"lower AttemptTimeout or raise Timeout", c.AttemptTimeout, total)
	}
	return nil
}

func (c PublisherConfig) withDefaults() PublisherConfig {
	if c.Timeout == 0 {
		c.Timeout = DefaultPublishTimeout
	}
	if c.AttemptTimeout == 0 {
		c.AttemptTimeout = min(DefaultAttemptTimeout, c.Timeout)
	}
	if c.Logger == nil {
		c.Logger = watermill.NopLogger{}
	}
	c.Backoff = c.Backoff.orDefault()
	return c
}

// Publisher turns a [Driver] into a Watermill publisher. It is safe for concurrent use. It does not own the driver.
type Publisher struct {
	driver Driver
	cfg    PublisherConfig
	caps   Capabilities
	report reporter
	topics topicBook

	mu      sync.Mutex
	closed  bool           // guarded by mu
	running sync.WaitGroup // Add is guarded by mu
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher makes a publisher. It does no I/O and starts nothing. Its error says what to change in the configuration.
func NewPublisher(d Driver, cfg PublisherConfig) (*Publisher, error) {
	if d == nil {
		return nil, errors.New("new publisher: the driver is nil: open one with Registry.Open or a driver package")
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("new publisher: %w", err)
	}
	cfg = cfg.withDefaults()
	return &Publisher{
		driver: d,
		cfg:    cfg,
		caps:   d.Capabilities(),
		report: reporter{observer: cfg.Observer, logger: cfg.Logger},
	}, nil
}

// Publish is [Publisher.PublishContext] with no context but the configured Timeout. It does not look at the messages'
// contexts: what a handler produced must go out even while the router shuts down.
func (p *Publisher) Publish(topic string, msgs ...*message.Message) error {
	return p.PublishContext(context.Background(), topic, msgs...)
}

// PublishContext sends the messages in their order. nil promises that every one reached the boundary that the driver
// declares. It blocks until then, until ctx is done, or for Timeout; entries that were rejected, or whose outcome is
// unknown, are sent again meanwhile, with the same identity, so a message may arrive twice. Permanent failures are returned
// at once.
//
// Of an error, [OutcomeOf] tells the outcome: rejected, no failed message was stored; unknown, each of them may have been;
// permanent, at least one of them will never be, and the others were not waited for. Messages that did not fail are stored. The messages are copied and may be used again when it
// returns; their payload is not. After Close the error is [ErrClosed].
func (p *Publisher) PublishContext(ctx context.Context, topic string, msgs ...*message.Message) error {
	if err := p.enter(); err != nil {
		return fmt.Errorf("publish to topic %q: %w", topic, err)
	}
	defer p.running.Done()
	if topic == "" {
		return errors.New("publish: the topic is empty")
	}
	batch := make([]Message, len(msgs))
	for i, msg := range msgs {
		if limit := p.caps.MaxPayload; limit > 0 && len(msg.Payload) > limit {
			err := fmt.Errorf("message %q has %d bytes, the limit is %d: %w", msg.UUID, len(msg.Payload), limit, ErrTooLarge)
			return publishError(topic, len(msgs), len(msgs), OutcomePermanent, err)
		}
		batch[i] = fromWatermill(msg)
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Timeout)
	defer cancel()
	size := len(batch)
	if p.caps.MaxBatch > 0 {
		size = p.caps.MaxBatch
	}
	for from := 0; from < len(batch); from += size {
		chunk := batch[from:min(from+size, len(batch))]
		if left, kind, err := p.sendAll(ctx, topic, chunk); err != nil {
			return publishError(topic, left+len(batch)-from-len(chunk), len(batch), kind, err)
		}
	}
	return nil
}

// publishError says how many messages are not known to be stored.
func publishError(topic string, failed, all int, kind Outcome, err error) error {
	if oe, ok := errors.AsType[*OutcomeError](err); !ok || oe.Kind != kind { // else it says so already
		err = &OutcomeError{Kind: kind, Err: err}
	}
	return fmt.Errorf("publish to topic %q: %d of %d messages failed: %w", topic, failed, all, err)
}

func (p *Publisher) enter() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	p.running.Add(1)
	return nil
}

// Close lets running calls of Publish end, which Timeout bounds, and refuses new ones. It is idempotent and safe for
// concurrent use. The driver stays open.
func (p *Publisher) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.running.Wait()
	return nil
}
