package sdk

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// The defaults of SubscriberConfig and PublisherConfig.
const (
	DefaultMaxInFlight    = 256
	DefaultLease          = 30 * time.Second
	DefaultDrainTimeout   = 20 * time.Second
	DefaultMaxProcessing  = 10 * time.Minute
	DefaultPublishTimeout = 30 * time.Second
	DefaultAttemptTimeout = 10 * time.Second
)

// SubscriberConfig describes the subscriptions of one [Subscriber]. Group is required; the zero value of everything else
// is right.
type SubscriberConfig struct {
	// Group names the consumers that share a topic's messages: every group gets every message, once per group.
	Group string

	// MaxInFlight is the window of each subscription: the most deliveries taken from the broker and not settled. 0 means
	// 256. 1 keeps the broker's order.
	MaxInFlight int

	// Lease is how long a delivery stays ours without being extended, where the broker lends deliveries; it is extended
	// for as long as the message is in flight. 0 means 30 s. Other brokers ignore it.
	Lease time.Duration

	// DrainTimeout is how long a stopping subscription waits for messages that were handed out. 0 means 20 s. Keep it
	// below the router's CloseTimeout (30 s by default).
	DrainTimeout time.Duration

	// MaxProcessing is the longest time from handing a message out to its Ack or Nack. After it the message's context is
	// cancelled, the message is requeued, and its slot is free; a later Ack is ignored. 0 means 10 min.
	MaxProcessing time.Duration

	// Backoff bounds the delay of a nacked message, of settlements that are tried again and of reopening a lost source.
	// Zero means 100 ms to 1 min.
	Backoff Backoff

	// VerifyOnly makes Prepare verify that topic and group exist, instead of creating them.
	VerifyOnly bool

	// Poison takes a delivery that could not be decoded (Delivery.Err says why, Payload holds the raw bytes): nil
	// acknowledges it, an error (or a panic) requeues it with backoff. It is called in a goroutine of its own, once per
	// attempt, and its context is cancelled like a message's. A nil Poison rejects such deliveries where the broker can
	// reject, and requeues them at the longest backoff elsewhere.
	Poison func(ctx context.Context, d Delivery) error

	// Observer is told what happens; nil means nobody.
	Observer Observer

	// Logger is Watermill's; nil logs nothing.
	Logger watermill.LoggerAdapter
}

func (c SubscriberConfig) withDefaults() SubscriberConfig {
	if c.MaxInFlight == 0 {
		c.MaxInFlight = DefaultMaxInFlight
	}
	if c.Lease == 0 {
		c.Lease = DefaultLease
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = DefaultDrainTimeout
	}
	if c.MaxProcessing == 0 {
		c.MaxProcessing = DefaultMaxProcessing
	}
	if c.Logger == nil {
		c.Logger = watermill.NopLogger{}
	}
	c.Backoff = c.Backoff.orDefault()
	return c
}

// validate checks a configuration before defaults are filled in, against the floor of the driver's capabilities.
func (c SubscriberConfig) validate(caps Capabilities) error {
	if c.Group == "" {
		return errors.New("SubscriberConfig.Group is empty: name the consumers that share the messages, \"billing\" say")
	}
	if c.MaxInFlight < 0 {
		return fmt.Errorf("SubscriberConfig.MaxInFlight is %d: use 1 or more, or 0 for %d", c.MaxInFlight, DefaultMaxInFlight)
	}
	durations := []namedDuration{
		{"Lease", c.Lease}, {"DrainTimeout", c.DrainTimeout}, {"MaxProcessing", c.MaxProcessing},
	}
	if err := refuseNegative("SubscriberConfig", durations); err != nil {
		return err
	}
	if err := c.Backoff.validate("SubscriberConfig"); err != nil {
		return err
	}
	filled := c.withDefaults()
	if caps.Lease > 0 && filled.Backoff.Min >= filled.Lease {
		return fmt.Errorf("SubscriberConfig.Backoff.Min (%v) is not below Lease (%v): a failed message would leave us before "+
			"its shortest retry; lower Backoff.Min or raise Lease", filled.Backoff.Min, filled.Lease)
	}
	if caps.Lease > 0 && filled.Lease < minLease {
		return fmt.Errorf("SubscriberConfig.Lease is %v: it is extended every third of it, so use at least %v", c.Lease, minLease)
	}
	return nil
}

// limits are what a subscription with these capabilities promises to the code above it.
func (c SubscriberConfig) limits(caps Capabilities) Limits {
	l := Limits{MaxInFlight: c.MaxInFlight, Horizon: caps.Horizon}
	if caps.Lease > 0 {
		l.Lease = c.Lease
	}
	return l
}

// binding is how a topic is prepared and opened.
func (c SubscriberConfig) binding(topic string) Binding {
	return Binding{Topic: topic, Group: c.Group, Window: c.MaxInFlight, Lease: c.Lease, Declare: !c.VerifyOnly}
}

// minLease is the shortest lease that can be extended in time by a process that also does other work.
const minLease = 10 * time.Millisecond

type namedDuration struct {
	name  string
	value time.Duration
}

func refuseNegative(where string, durations []namedDuration) error {
	for _, d := range durations {
		if d.value < 0 {
			return fmt.Errorf("%s.%s is %v: use a positive duration, or 0 for the default", where, d.name, d.value)
		}
	}
	return nil
}

func (b Backoff) validate(where string) error {
	err := refuseNegative(where, []namedDuration{{"Backoff.Min", b.Min}, {"Backoff.Max", b.Max}})
	if err != nil {
		return err
	}
	if b.Max > 0 && b.Min > b.Max {
		return fmt.Errorf("%s.Backoff.Min (%v) is above Backoff.Max (%v): swap them", where, b.Min, b.Max)
	}
	return nil
}
