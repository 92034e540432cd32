package memstore

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// read looks at what is committed, unless the database is away.
func (s *Store) read(ctx context.Context, look func(d *Database)) error {
	if err := s.there(ctx); err != nil {
		return err
	}
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	look(s.db)
	return nil
}

// Resolve looks for the marker.
func (s *Store) Resolve(ctx context.Context, nonce receipts.Nonce) (committed bool, err error) {
	err = s.read(ctx, func(d *Database) { committed = d.whole(nonce) })
	return committed, err
}

// Unsent lists unsent outputs in commit order.
func (s *Store) Unsent(ctx context.Context, q receipts.UnsentQuery) (found []receipts.Output, err error) {
	err = s.read(ctx, func(d *Database) {
		for _, o := range d.outputs {
			switch {
			case len(found) == q.Limit:
				return
			case !d.toSend(o):
			case !q.Before.IsZero() && !o.At.Before(q.Before):
			case !strings.HasPrefix(o.Scope, q.Prefix):
			case q.Scope != "" && (o.Scope != q.Scope || string(o.Key) != string(q.Key)):
			default:
				found = append(found, o)
			}
		}
	})
	return found, err
}

// toSend tells whether the relay has to send an output. It is called under the mutex.
func (d *Database) toSend(o receipts.Output) bool {
	r, claimed := d.receipts[id{o.Scope, string(o.Key)}]
	torn := claimed && r.Nonce == o.Nonce && !d.whole(o.Nonce)
	return !o.Sent && !o.ViaRouter && !torn
}

// Outputs lists one receipt's outputs.
func (s *Store) Outputs(ctx context.Context, scope string, key []byte) (found []receipts.Output, err error) {
	err = s.read(ctx, func(d *Database) {
		for _, o := range d.outputs {
			if o.Scope == scope && string(o.Key) == string(key) {
				found = append(found, o)
			}
		}
	})
	return found, err
}

// MarkSent marks outputs. Where there is one writer it waits for its turn, as long as ctx.
func (s *Store) MarkSent(ctx context.Context, refs []receipts.OutputRef, _ time.Time) error {
	if err := s.there(ctx); err != nil {
		return err
	}
	turn, err := s.db.begin(ctx, s)
	if err != nil {
		return err
	}
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	for _, ref := range refs {
		if i, there := s.db.refs[ref]; there {
			s.db.outputs[i].Sent = true
		}
	}
	turn.end()
	return nil
}

// DeadLetters lists the oldest ones.
func (s *Store) DeadLetters(ctx context.Context, limit int) (found []receipts.DeadLetter, err error) {
	err = s.read(ctx, func(d *Database) { found = slices.Clone(d.letters[:min(max(limit, 0), len(d.letters))]) })
	return found, err
}

// Stats counts.
func (s *Store) Stats(ctx context.Context) (receipts.Stats, error) {
	stats := receipts.Stats{DeadLetters: map[receipts.DeadLetterKind]int{}}
	err := s.read(ctx, func(d *Database) {
		for _, r := range d.receipts {
			switch {
			case !d.whole(r.Nonce):
				stats.Torn++
			case r.State == receipts.StateDone:
				stats.Done++
			default:
				stats.Diverted++
			}
		}
		stats.Outputs = len(d.outputs)
		for _, o := range d.outputs {
			if !d.toSend(o) {
				continue
			}
			if stats.Unsent++; stats.OldestUnsent.IsZero() || o.At.Before(stats.OldestUnsent) {
				stats.OldestUnsent = o.At
			}
		}
		for _, l := range d.letters {
			stats.DeadLetters[l.Kind]++
		}
	})
	return stats, err
}
