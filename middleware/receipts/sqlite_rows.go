package receipts

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// maxReason is where a dead letter's reason is cut, in bytes.
const maxReason = 1024

// AddOutputs stores outputs. Their payloads are not retained.
func (t *sqliteTx) AddOutputs(ctx context.Context, outputs []Output) ([]Output, error) {
	if len(outputs) == 0 {
		return nil, nil
	}
	if err := t.ready(ctx); err != nil {
		return nil, fmt.Errorf("receipts: storing %d outputs: %w", len(outputs), err)
	}
	stored := slices.Clone(outputs)
	for i := range stored {
		o := &stored[i]
		o.Nonce, o.Position, o.Sent = t.nonce, t.positions, false
		if err := t.addOutput(o); err != nil {
			return nil, fmt.Errorf("receipts: storing output %s to topic %q: %w", o.UUID, o.Topic, t.meaning(err))
		}
		t.positions++
	}
	return stored, nil
}

func (t *sqliteTx) addOutput(o *Output) error {
	metadata, err := encodeMetadata(o.Metadata)
	if err != nil {
		return err
	}
	_, err = t.exec(flowAddOutput, o.Nonce[:], o.Position, []byte(o.Scope), blob(o.Key), []byte(o.Topic),
		[]byte(o.UUID), metadata, blob(o.Payload), o.At.UnixMicro(), boolInt(o.ViaRouter))
	return err
}

// Divert stores dead letters. A reason is cut at 1,024 bytes.
func (t *sqliteTx) Divert(ctx context.Context, letters []DeadLetter) error {
	if len(letters) == 0 {
		return nil
	}
	if err := t.ready(ctx); err != nil {
		return fmt.Errorf("receipts: storing %d dead letters: %w", len(letters), err)
	}
	for _, l := range letters {
		if err := t.divert(l); err != nil {
			return fmt.Errorf("receipts: storing the dead letter of %q in scope %q: %w", l.Key, l.Scope, t.meaning(err))
		}
	}
	return nil
}

func (t *sqliteTx) divert(l DeadLetter) error {
	metadata, err := encodeMetadata(l.Metadata)
	if err != nil {
		return err
	}
	_, err = t.tx.ExecContext(t.ctx, t.s.q.divert, []byte(l.Scope), blob(l.Key), blob(l.Fingerprint), string(l.Kind),
		readable(l.Reason), []byte(l.Consumer), []byte(l.Handler), []byte(l.Topic), []byte(l.UUID), metadata,
		blob(l.Payload), l.At.UnixMicro())
	return err
}

// readable makes a reason safe to keep as text: valid UTF-8 without NUL, at most maxReason bytes.
func readable(reason string) string {
	if len(reason) > maxReason {
		reason = reason[:maxReason]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(reason, "\uFFFD"), "\x00", "\uFFFD")
}

// Unsent lists what the relay has to send: outputs that are not marked as sent, without those that go through the router
// and those of torn receipts.
func (s *SQLite) Unsent(ctx context.Context, q UnsentQuery) ([]Output, error) {
	if q.Limit < 1 {
		return nil, fmt.Errorf("receipts: unsent outputs: limit %d is below 1", q.Limit)
	}
	before := int64(math.MaxInt64)
	if !q.Before.IsZero() {
		before = q.Before.UnixMicro()
	}
	query, args := s.q.unsent, []any{before, len(q.Prefix), blob([]byte(q.Prefix)), q.Limit}
	if q.Scope != "" {
		query, args = s.q.unsentOf, []any{before, []byte(q.Scope), blob(q.Key), q.Limit}
	}
	outputs, err := s.outputs(ctx, query, args)
	if err != nil {
		return nil, fmt.Errorf("receipts: listing unsent outputs: %w", err)
	}
	return outputs, nil
}

// Outputs lists the outputs of one receipt; none and nil where there are none.
func (s *SQLite) Outputs(ctx context.Context, scope string, key []byte) ([]Output, error) {
	outputs, err := s.outputs(ctx, s.q.outputsOf, []any{[]byte(scope), blob(key)})
	if err != nil {
		return nil, fmt.Errorf("receipts: listing the outputs of %q in scope %q: %w", key, scope, err)
	}
	return outputs, nil
}

func (s *SQLite) outputs(ctx context.Context, query string, args []any) ([]Output, error) {
	var outputs []Output
	err := s.read(ctx, func(conn *sql.Conn) error {
		outputs = nil
		return queryAll(ctx, conn, query, args, func(scan scanFunc) error {
			o, err := scanOutput(scan)
			outputs = append(outputs, o)
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	return outputs, nil
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

// MarkSent marks all refs in one transaction. One that is marked already keeps its time; one that is not there is nil.
func (s *SQLite) MarkSent(ctx context.Context, refs []OutputRef, at time.Time) error {
	if len(refs) == 0 {
		return nil
	}
	err := s.write(ctx, true, func(ctx context.Context, conn *sql.Conn) error {
		for _, chunk := range chunks(refs) {
			query := s.q.markSentOne
			if len(chunk) > 1 {
				query = fmt.Sprintf(s.q.markSentMany, tuples(len(chunk), "(?,?)"))
			}
			args := make([]any, 0, 2*len(chunk)+1)
			args = append(args, at.UnixMicro())
			for i := range chunk {
				args = append(args, chunk[i].Nonce[:], chunk[i].Position)
			}
			if _, err := conn.ExecContext(ctx, query, args...); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("receipts: marking %d outputs as sent: %w", len(refs), err)
	}
	return nil
}

// DeadLetters lists dead letters by the time they were stored with. limit is at least 1.
func (s *SQLite) DeadLetters(ctx context.Context, limit int) ([]DeadLetter, error) {
	if limit < 1 {
		return nil, fmt.Errorf("receipts: dead letters: limit %d is below 1", limit)
	}
	var letters []DeadLetter
	err := s.read(ctx, func(conn *sql.Conn) error {
		letters = nil
		return queryAll(ctx, conn, s.q.deadLetters, []any{limit}, func(scan scanFunc) error {
			l, err := scanDeadLetter(scan)
			letters = append(letters, l)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("receipts: listing dead letters: %w", err)
	}
	return letters, nil
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

// Stats counts the rows of all tables in one statement, so that the counts fit together.
func (s *SQLite) Stats(ctx context.Context) (Stats, error) {
	var stats Stats
	err := s.read(ctx, func(conn *sql.Conn) error {
		stats = Stats{DeadLetters: map[DeadLetterKind]int{}}
		return queryAll(ctx, conn, s.q.stats, []any{int64(math.MaxInt64)}, func(scan scanFunc) error {
			var what, label string
			var n int
			var oldest sql.NullInt64
			if err := scan(&what, &label, &n, &oldest); err != nil {
				return err
			}
			stats.add(what, label, n, oldest)
			return nil
		})
	})
	if err != nil {
		return Stats{}, fmt.Errorf("receipts: counting: %w", err)
	}
	return stats, nil
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

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
