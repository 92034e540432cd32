package receipts

import (
	"context"
	"database/sql"
	"fmt"
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
	args, err := parkedArgs(p)
	if err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, s.q.park, args...)
	return err
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
