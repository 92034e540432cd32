package receipts

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"
)

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
	args, err := outputArgs(o)
	if err != nil {
		return err
	}
	_, err = t.exec(flowAddOutput, args...)
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
	for i := range letters {
		l := &letters[i]
		if err := t.divert(l); err != nil {
			return fmt.Errorf("receipts: storing the dead letter of %q in scope %q: %w", l.Key, l.Scope, t.meaning(err))
		}
	}
	return nil
}

func (t *sqliteTx) divert(l *DeadLetter) error {
	args, err := letterArgs(l)
	if err != nil {
		return err
	}
	_, err = t.tx.ExecContext(t.ctx, t.s.q.divert, args...)
	return err
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
