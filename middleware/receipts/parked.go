package receipts

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"time"
)

// Parker is what a store can do beyond [Store]: keep messages aside, in the order of their keys, when their broker is
// acknowledged before they are handled. The middleware needs it for idempotency.ParkKeys only, so a store may do without.
// Like Store it is safe for concurrent use.
type Parker interface {
	// Park stores messages in their order, each behind those that are stored with its scope and order key, all in one
	// transaction. One that is stored already (same scope, order key, UUID, metadata and payload) is left alone. nil: durable.
	Park(ctx context.Context, messages []Parked) error
	// ParkedKeys counts the parked messages of a scope, by order key, the key that was parked first comes first.
	ParkedKeys(ctx context.Context, scope string) ([]ParkedKey, error)
	// Parked lists the messages of an order key behind a position, in order, at most limit, which is at least 1. Position 0
	// is before all.
	Parked(ctx context.Context, scope, orderKey string, after int64, limit int) ([]Parked, error)
	// Unpark deletes parked messages by position. One that is not there is nil.
	Unpark(ctx context.Context, positions []int64) error
}

// Parked is a message set aside.
type Parked struct {
	// Position orders the messages; the store sets it. It grows, and is never used again.
	Position int64
	// Scope names the subscription: consumer, handler and topic. At most MaxScope bytes.
	Scope string
	// OrderKey is at least 1 and at most MaxKey bytes.
	OrderKey string
	// Handler and Topic say where it was consumed, for people.
	Handler, Topic string
	UUID           string
	Metadata       map[string]string
	Payload        []byte
	At             time.Time
}

// ParkedKey is an order key with parked messages.
type ParkedKey struct {
	OrderKey string
	// Messages is at least 1.
	Messages int
}

// digest tells whether two parked messages are the same one, brought twice.
func (p *Parked) digest(metadata []byte) []byte {
	sum := sha256.New()
	for _, part := range [][]byte{[]byte(p.UUID), metadata, p.Payload} {
		_, _ = sum.Write(binary.AppendUvarint(nil, uint64(len(part))))
		_, _ = sum.Write(part)
	}
	return sum.Sum(nil)
}
