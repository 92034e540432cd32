package memory

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// The defaults of [Options].
const (
	DefaultCapacity      = 65536
	DefaultCapacityBytes = 256 << 20
	DefaultMaxPayload    = 16 << 20
	DefaultLease         = 30 * time.Second
	// DefaultWindow is the window of a source whose Binding.Window is 0.
	DefaultWindow = 256
)

// DeadSuffix is what the name of a topic's dead-letter topic ends with.
const DeadSuffix = ".dead"

// maxName bounds the names of brokers, topics and groups, in bytes. maxDeadName is larger, so that every topic that can
// be prepared has a dead-letter topic that can be prepared as well.
const (
	maxName     = 512
	maxDeadName = 1024
)

// The errors of this package that callers compare against with errors.Is.
var (
	// ErrConnectionLost: the source, or the Send that waited for room, was cut by [Broker.Disconnect] or
	// [Broker.Restart].
	ErrConnectionLost = errors.New("connection lost")
	// ErrTopicDropped: the source's topic was removed by [Broker.DropTopic].
	ErrTopicDropped = errors.New("topic was dropped")
	// ErrNotPrepared: the topic or group does not exist; the error says which.
	ErrNotPrepared = errors.New("not prepared")
	// ErrFull: a queue has no room.
	ErrFull = errors.New("queue is full")
	// ErrRefused: the topic refuses messages, because of [Broker.Refuse] with a nil error.
	ErrRefused = errors.New("topic refuses messages")
)

// Options bound the brokers of a [Network]. The zero value means the defaults; a negative value is an error.
type Options struct {
	// Capacity is the most messages that one group of a topic holds, unsettled ones included. 0 means 65,536.
	Capacity int
	// CapacityBytes is the most bytes that one group of a topic holds: payloads, metadata, keys and ids. 0 means 256 MiB.
	CapacityBytes int64
	// MaxPayload is the largest payload in bytes. 0 means 16 MiB, or CapacityBytes where that is less.
	MaxPayload int
	// Lease is how long a delivery is lent where its Binding asks for nothing else. 0 means 30 s.
	Lease time.Duration
	// Horizon is declared as the redelivery horizon and is not enforced: a message stays until it is settled, however
	// long that takes, so this is the owner's promise about how long consumers are ever away. 0 declares nothing.
	Horizon time.Duration
	// AcceptUnroutable makes Send drop, knowingly, what no group takes, instead of failing. In a URL: unroutable=accept.
	AcceptUnroutable bool
}

func (o Options) withDefaults() Options {
	if o.Capacity == 0 {
		o.Capacity = DefaultCapacity
	}
	if o.CapacityBytes == 0 {
		o.CapacityBytes = DefaultCapacityBytes
	}
	if o.MaxPayload == 0 {
		o.MaxPayload = int(min(DefaultMaxPayload, o.CapacityBytes))
	}
	if o.Lease == 0 {
		o.Lease = DefaultLease
	}
	return o
}

// validate checks options that have their defaults.
func (o Options) validate() error {
	switch {
	case o.Capacity < 1:
		return fmt.Errorf("capacity is %d messages: it must be at least 1, or 0 for the default", o.Capacity)
	case o.CapacityBytes < 1:
		return fmt.Errorf("capacity is %d bytes: it must be at least 1, or 0 for the default", o.CapacityBytes)
	case o.MaxPayload < 1:
		return fmt.Errorf("maximum payload is %d bytes: it must be at least 1, or 0 for the default", o.MaxPayload)
	case int64(o.MaxPayload) > o.CapacityBytes:
		return fmt.Errorf("maximum payload is %d bytes, but a queue holds only %d: lower the one or raise the other",
			o.MaxPayload, o.CapacityBytes)
	case o.Lease < 0:
		return fmt.Errorf("lease is %s: it must be positive, or 0 for the default", o.Lease)
	case o.Horizon < 0:
		return fmt.Errorf("horizon is %s: it must be positive, or 0 to declare none", o.Horizon)
	}
	return nil
}

// checkName refuses names that are empty, hold a NUL or are absurdly long. what says whose name it is.
func checkName(what, name string) error {
	limit := maxName
	if strings.HasSuffix(name, DeadSuffix) {
		limit = maxDeadName
	}
	switch {
	case name == "":
		return fmt.Errorf("%s name is empty", what)
	case len(name) > limit:
		return fmt.Errorf("%s name has %d bytes: at most %d are allowed", what, len(name), limit)
	case strings.ContainsRune(name, 0):
		return fmt.Errorf("%s name %q contains a NUL", what, name)
	}
	return nil
}

// shorten keeps an absurd name out of an error message.
func shorten(name string) string {
	if len(name) > maxDeadName {
		return name[:64] + "…"
	}
	return name
}
