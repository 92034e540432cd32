package idempotency

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// parkingStore is a fake store that can park.
type parkingStore struct {
	*fakeStore

	mu         sync.Mutex
	rows       []receipts.Parked
	position   int64
	slow       time.Duration // what each call takes
	fault      error         // what each call answers; nil: it works
	unreadable string        // the order key that Parked cannot read
	say        func(format string, args ...any)
}

func (s *parkingStore) tell(format string, args ...any) {
	if s.say != nil {
		s.say(format, args...)
	}
}

func (s *parkingStore) call(ctx context.Context) error {
	s.mu.Lock()
	slow, fault := s.slow, s.fault
	s.mu.Unlock()
	time.Sleep(slow)
	return errors.Join(fault, ctx.Err())
}

func (s *parkingStore) set(slow time.Duration, fault error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slow, s.fault = slow, fault
}

func (s *parkingStore) Park(ctx context.Context, messages []receipts.Parked) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range messages {
		s.tell("%s is parked", m.UUID)
		if slices.ContainsFunc(s.rows, func(r receipts.Parked) bool {
			return r.Scope == m.Scope && r.OrderKey == m.OrderKey && r.UUID == m.UUID && maps.Equal(r.Metadata, m.Metadata)
		}) {
			continue
		}
		s.position++
		m.Position, m.Metadata = s.position, maps.Clone(m.Metadata)
		s.rows = append(s.rows, m)
	}
	return nil
}

func (s *parkingStore) ParkedKeys(ctx context.Context, scope string) ([]receipts.ParkedKey, error) {
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []receipts.ParkedKey
	for _, r := range s.rows {
		if r.Scope != scope {
			continue
		}
		i := slices.IndexFunc(keys, func(k receipts.ParkedKey) bool { return k.OrderKey == r.OrderKey })
		if i < 0 {
			i, keys = len(keys), append(keys, receipts.ParkedKey{OrderKey: r.OrderKey})
		}
		keys[i].Messages++
	}
	return keys, nil
}

func (s *parkingStore) Parked(ctx context.Context, scope, key string, after int64, limit int) ([]receipts.Parked, error) {
	if err := s.call(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if key == s.unreadable {
		return nil, errSQL
	}
	var rows []receipts.Parked
	for _, r := range s.rows {
		if r.Scope == scope && r.OrderKey == key && r.Position > after && len(rows) < limit {
			rows = append(rows, r)
			s.tell("%s is read", r.UUID)
		}
	}
	return rows, nil
}

func (s *parkingStore) Unpark(ctx context.Context, positions []int64) error {
	if err := s.call(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rows = slices.DeleteFunc(s.rows, func(r receipts.Parked) bool { return slices.Contains(positions, r.Position) })
	return nil
}

// parked lists the UUIDs in the table.
func (s *parkingStore) parked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	uuids := []string{}
	for _, r := range s.rows {
		uuids = append(uuids, r.UUID)
	}
	return uuids
}
