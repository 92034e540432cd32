package receipts

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

var _ Parker = (*SQLite)(nil)

// Park stores messages of failing order keys. Their payloads are not retained.
func (s *SQLite) Park(ctx context.Context, messages []Parked) error {
	if len(messages) == 0 {
		return nil
	}
	err := s.write(ctx, true, func(ctx context.Context, conn *sql.Conn) error {
		for i := range messages {
			if err := s.park(ctx, conn, &messages[i]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("receipts: parking %d messages: %w", len(messages), err)
	}
	return nil
}

func (s *SQLite) park(ctx context.Context, conn *sql.Conn, p *Parked) error {
	metadata, err := encodeMetadata(p.Metadata)
	if err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, s.q.park, []byte(p.Scope), []byte(p.OrderKey), p.digest(metadata), []byte(p.Handler),
		[]byte(p.Topic), []byte(p.UUID), metadata, blob(p.Payload), p.At.UnixMicro())
	return err
}

// ParkedKeys counts the parked messages of each order key.
func (s *SQLite) ParkedKeys(ctx context.Context, scope string) ([]ParkedKey, error) {
	var keys []ParkedKey
	err := s.read(ctx, func(conn *sql.Conn) error {
		keys = nil
		return queryAll(ctx, conn, s.q.parkedKeys, []any{[]byte(scope)}, func(scan scanFunc) error {
			var k ParkedKey
			err := scan(&k.OrderKey, &k.Messages)
			keys = append(keys, k)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("receipts: listing parked order keys: %w", err)
	}
	return keys, nil
}

// Parked lists parked messages of one order key.
func (s *SQLite) Parked(ctx context.Context, scope, orderKey string, after int64, limit int) ([]Parked, error) {
	if limit < 1 {
		return nil, fmt.Errorf("receipts: parked messages: limit %d is below 1", limit)
	}
	var parked []Parked
	err := s.read(ctx, func(conn *sql.Conn) error {
		parked = nil
		return queryAll(ctx, conn, s.q.parked, []any{[]byte(scope), []byte(orderKey), after, limit}, func(scan scanFunc) error {
			p, err := scanParked(scan)
			parked = append(parked, p)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("receipts: listing parked messages: %w", err)
	}
	return parked, nil
}

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

// Unpark deletes parked messages, all in one transaction.
func (s *SQLite) Unpark(ctx context.Context, positions []int64) error {
	if len(positions) == 0 {
		return nil
	}
	err := s.write(ctx, true, func(ctx context.Context, conn *sql.Conn) error {
		for _, chunk := range chunks(positions) {
			args := make([]any, len(chunk))
			for i, position := range chunk {
				args[i] = position
			}
			if _, err := conn.ExecContext(ctx, fmt.Sprintf(s.q.unpark, tuples(len(chunk), "?")), args...); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("receipts: deleting %d parked messages: %w", len(positions), err)
	}
	return nil
}
