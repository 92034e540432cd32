package idempotency

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// The reasons for refusing a message whose identity is not valid.
const (
	refusedEmpty   = "the identity key is empty"
	refusedTooLong = "the identity key is longer than 512 bytes"
)

// errNoScope stops a message that cannot be told from that of another handler. Nothing is diverted: nothing is lost.
var errNoScope = errors.New("no handler name in the message's context, so that receipts of different handlers could not be told apart: " +
	"let a message.Router call the handler, or set Config.Scope")

// scopeOf builds the scope of a handler: three length-prefixed parts, so that no two triples give the same bytes. A
// configured Scope is one length-prefixed part, which no triple equals either.
func (m *Middleware[T]) scopeOf(handler, topic string) (string, error) {
	buf := make([]byte, 0, 128)
	if m.cfg.Scope != "" {
		return string(appendPart(buf, m.cfg.Scope)), nil
	}
	if handler == "" {
		return "", errNoScope
	}
	if written, ok := m.cfg.Aliases[handler]; ok {
		handler = written
	}
	buf = appendPart(buf, m.cfg.Consumer)
	buf = appendPart(buf, handler)
	buf = appendPart(buf, topic)
	if len(buf) > receipts.MaxScope {
		return "", fmt.Errorf("consumer, handler name and topic make a scope of %d bytes, the most is %d: "+
			"shorten one of them, or set Config.Scope", len(buf), receipts.MaxScope)
	}
	return string(buf), nil
}

// appendPart appends a netstring: length, colon, bytes.
func appendPart(buf []byte, part string) []byte {
	buf = strconv.AppendInt(buf, int64(len(part)), 10)
	buf = append(buf, ':')
	return append(buf, part...)
}

// cloudEventsFields lists the spellings of CloudEvents source and id, in the order they are looked for: the bindings of
// Kafka and of plain metadata, HTTP (as written and as Go's net/http spells headers), AMQP 1.0 and its JMS-friendly twin.
func cloudEventsFields() [5][2]string {
	return [...][2]string{
		{"ce_source", "ce_id"},
		{"ce-source", "ce-id"},
		{"Ce-Source", "Ce-Id"},
		{"cloudEvents:source", "cloudEvents:id"},
		{"cloudEvents_source", "cloudEvents_id"},
	}
}

// The first bytes of a key that is not simply the field's or UUID's own bytes.
const (
	keyEscape      = 0x00 // also starts a UUID or field that itself starts with it, doubled
	keyCloudEvents = 0x01 // after keyEscape: source, length-prefixed, and id
)

// keyOf gives a message's identity key, or the reason for refusing it. A UUID's key is its own bytes, so that people
// can find it in the tables; only one that starts with NUL gets another NUL in front. A CloudEvents key starts with NUL,
// 0x01: no UUID's key does.
func keyOf(msg *message.Message, field string) (key, refused string) {
	switch {
	case field != "":
		value, ok := msg.Metadata[field]
		if !ok {
			return "", fmt.Sprintf("metadata field %q, which holds the message identity, is missing", field)
		}
		key, refused = plainKey(value)
	default:
		source, id, ok := cloudEvent(msg.Metadata)
		if !ok {
			key, refused = plainKey(msg.UUID)
			break
		}
		if source == "" || id == "" {
			return "", "the CloudEvents source or id is empty"
		}
		buf := append(make([]byte, 0, len(source)+len(id)+4), keyEscape, keyCloudEvents)
		buf = binary.AppendUvarint(buf, uint64(len(source)))
		key = string(append(append(buf, source...), id...))
	}
	if len(key) > receipts.MaxKey {
		return "", refusedTooLong
	}
	return key, refused
}

func plainKey(value string) (key, refused string) {
	if value == "" {
		return "", refusedEmpty
	}
	if value[0] == keyEscape {
		return string([]byte{keyEscape}) + value, ""
	}
	return value, ""
}

// cloudEvent finds the first spelling of which both fields are there.
func cloudEvent(metadata message.Metadata) (source, id string, ok bool) {
	if len(metadata) < 2 {
		return "", "", false
	}
	for _, names := range cloudEventsFields() {
		source, hasSource := metadata[names[0]]
		id, hasID := metadata[names[1]]
		if hasSource && hasID {
			return source, id, true
		}
	}
	return "", "", false
}

// identify takes the identity of a pending message. Its error means that the program is put together wrongly; a message
// without a valid identity is no error: it is refused later.
func (m *Middleware[T]) identify(p *pending[T], q *queue[T]) (err error) {
	if p.id.scope, err = m.scopeIn(q, p.handler, p.topic); err != nil {
		return err
	}
	p.scope = p.id.scope
	key, refused := keyOf(p.msg, m.cfg.IdentityField)
	if p.refused = refused; refused == "" {
		p.id.key, p.key = key, []byte(key)
	}
	return nil
}

// scopeIn is scopeOf for a handler whose deliveries come from one topic, as a rule: the last scope is kept.
func (m *Middleware[T]) scopeIn(q *queue[T], handler, topic string) (string, error) {
	if last := q.scope.Load(); last != nil && last.handler == handler && last.topic == topic {
		return last.scope, nil
	}
	scope, err := m.scopeOf(handler, topic)
	if err == nil {
		q.scope.Store(&scopeOfHandler{handler, topic, scope})
	}
	return scope, err
}

type scopeOfHandler struct{ handler, topic, scope string }

// examine asks Validate and takes the fingerprint.
func (m *Middleware[T]) examine(p *pending[T]) error {
	if p.refused == "" && m.cfg.Validate != nil {
		if err := m.cfg.Validate(p.msg); err != nil {
			p.refused = "Validate: " + err.Error()
		}
	}
	if len(p.key) == 0 {
		p.fingerprint = fingerprintOfAll(p.msg)
		return nil
	}
	return m.takeFingerprint(p)
}

// fingerprintOfAll is the fingerprint of a message without a valid identity: its dead letter has no key, so only copies
// that are equal in everything may share one.
func fingerprintOfAll(msg *message.Message) []byte {
	sum := sha256.New()
	add := func(part string) {
		_, _ = sum.Write(binary.AppendUvarint(nil, uint64(len(part))))
		_, _ = sum.Write([]byte(part))
	}
	add(msg.UUID)
	for _, name := range slices.Sorted(maps.Keys(msg.Metadata)) {
		add(name)
		add(msg.Metadata[name])
	}
	_, _ = sum.Write(msg.Payload)
	return sum.Sum(nil)
}

// sameIdentity tells whether a carrier's transaction belongs to this pending message. One without valid identity has no
// key, and no transaction.
func (p *pending[T]) sameIdentity(c *carrier) bool {
	return c.scope == p.scope && bytes.Equal(c.key, p.key)
}
