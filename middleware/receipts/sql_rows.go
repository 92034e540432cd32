package receipts

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"
)

// maxReason is where a dead letter's reason is cut, in bytes.
const maxReason = 1024

// The columns of the tables, in the order in which their rows are written and read.
const (
	outputRow = `nonce, position, scope, identity_key, topic, uuid, metadata, payload, created_at, via_router`
	letterRow = `scope, identity_key, fingerprint, kind, reason, consumer, handler, topic, uuid, metadata, payload, created_at`
	parkedRow = `scope, order_key, digest, handler, topic, uuid, metadata, payload, created_at`
)

// outputArgs gives the values of an output's columns, outputRow.
func outputArgs(o *Output) ([]any, error) {
	metadata, err := encodeMetadata(o.Metadata)
	if err != nil {
		return nil, err
	}
	return []any{
		o.Nonce[:], o.Position, []byte(o.Scope), blob(o.Key), []byte(o.Topic), []byte(o.UUID), metadata, blob(o.Payload),
		o.At.UnixMicro(), boolInt(o.ViaRouter),
	}, nil
}

// letterArgs gives the values of a dead letter's columns, letterRow.
func letterArgs(l *DeadLetter) ([]any, error) {
	metadata, err := encodeMetadata(l.Metadata)
	if err != nil {
		return nil, err
	}
	return []any{
		[]byte(l.Scope), blob(l.Key), blob(l.Fingerprint), string(l.Kind), readable(l.Reason), []byte(l.Consumer),
		[]byte(l.Handler), []byte(l.Topic), []byte(l.UUID), metadata, blob(l.Payload), l.At.UnixMicro(),
	}, nil
}

// parkedArgs gives the values of a parked message's columns, parkedRow.
func parkedArgs(p *Parked) ([]any, error) {
	metadata, err := encodeMetadata(p.Metadata)
	if err != nil {
		return nil, err
	}
	return []any{
		[]byte(p.Scope), []byte(p.OrderKey), p.digest(metadata), []byte(p.Handler), []byte(p.Topic), []byte(p.UUID), metadata,
		blob(p.Payload), p.At.UnixMicro(),
	}, nil
}

func scanOutput(scan scanFunc) (Output, error) {
	var o Output
	var nonce, metadata []byte
	var at int64
	err := scan(&nonce, &o.Position, &o.Scope, &o.Key, &o.Topic, &o.UUID, &metadata, &o.Payload, &at, &o.ViaRouter, &o.Sent)
	if err != nil {
		return Output{}, err
	}
	if copy(o.Nonce[:], nonce) != len(o.Nonce) {
		return Output{}, errors.New("a stored nonce is too short")
	}
	o.Key, o.Payload, o.At = blob(o.Key), blob(o.Payload), time.UnixMicro(at).UTC()
	if o.Metadata, err = decodeMetadata(metadata); err != nil {
		return Output{}, fmt.Errorf("output %s, position %d: %w", o.Nonce, o.Position, err)
	}
	return o, nil
}

func scanDeadLetter(scan scanFunc) (DeadLetter, error) {
	var l DeadLetter
	var metadata []byte
	var at int64
	err := scan(&l.Scope, &l.Key, &l.Fingerprint, &l.Kind, &l.Reason, &l.Consumer, &l.Handler, &l.Topic, &l.UUID, &metadata,
		&l.Payload, &at)
	if err != nil {
		return DeadLetter{}, err
	}
	l.Key, l.Fingerprint, l.Payload = blob(l.Key), blob(l.Fingerprint), blob(l.Payload)
	l.At = time.UnixMicro(at).UTC()
	if l.Metadata, err = decodeMetadata(metadata); err != nil {
		return DeadLetter{}, fmt.Errorf("dead letter of %q in scope %q: %w", l.Key, l.Scope, err)
	}
	return l, nil
}

// scanParked reads a position and parkedRow without its digest.
func scanParked(scan scanFunc) (Parked, error) {
	var p Parked
	var metadata []byte
	var at int64
	err := scan(&p.Position, &p.Scope, &p.OrderKey, &p.Handler, &p.Topic, &p.UUID, &metadata, &p.Payload, &at)
	if err != nil {
		return Parked{}, err
	}
	p.Payload, p.At = blob(p.Payload), time.UnixMicro(at).UTC()
	if p.Metadata, err = decodeMetadata(metadata); err != nil {
		return Parked{}, fmt.Errorf("parked message at position %d: %w", p.Position, err)
	}
	return p, nil
}

func (s *Stats) add(what, label string, n int, oldest sql.NullInt64) {
	switch what {
	case "done":
		s.Done = n
	case "diverted":
		s.Diverted = n
	case "torn":
		s.Torn = n
	case "outputs":
		s.Outputs = n
	case "parked":
		s.Parked = n
	case "dead":
		s.DeadLetters[DeadLetterKind(label)] = n
	case "unsent":
		s.Unsent = n
		if oldest.Valid {
			s.OldestUnsent = time.UnixMicro(oldest.Int64).UTC()
		}
	}
}

// readable makes a reason safe to keep as text: valid UTF-8 without NUL, at most maxReason bytes.
func readable(reason string) string {
	if len(reason) > maxReason {
		reason = reason[:maxReason]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(reason, "\uFFFD"), "\x00", "\uFFFD")
}

// blob keeps an empty value a value: drivers store a nil slice as NULL, and modernc reads an empty BLOB as nil.
func blob(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

type scanFunc func(dest ...any) error

// queryAll calls row for every row of a query and reports the first error, also one that ended the rows.
func queryAll(ctx context.Context, conn *sql.Conn, query string, args []any, row func(scan scanFunc) error) error {
	rows, err := conn.QueryContext(ctx, query, args...)
	return eachRow(rows, err, row)
}

// eachRow calls row for every row of what a query gave.
func eachRow(rows *sql.Rows, err error, row func(scan scanFunc) error) error {
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		if err := row(rows.Scan); err != nil {
			return err
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	return rows.Close()
}
