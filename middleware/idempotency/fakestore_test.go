package idempotency

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// The fake database's errors, told apart by Classify as a real one's are by code.
var (
	errBusy = errors.New("fake: busy")
	errGone = errors.New("fake: connection refused")
	errSQL  = errors.New("fake: constraint")
)

// commitFault is how a COMMIT goes wrong.
type commitFault struct {
	err   error // returned as it is, nothing committed
	lost  bool  // the answer is ErrCommitUnknown
	apply bool  // with lost: it did commit
}

// fakeStore keeps rows in memory with one writer at a time, or as many as fit into writer, and fails where a test says so.
// Each hook is asked with the number of calls so far, from 1; nil and zero mean no fault. A hook may also wait or panic.
type fakeStore struct {
	onBegin, onClaim, onAddOutputs, onDivert func(n int) error
	onPart, onKeep, onUndo, onUnclaim        func(n int) error
	onResolve, onUnsent, onOutputs, onMark   func(n int) error
	onCommit                                 func(n int) commitFault
	onRollback                               func() error // asked where the transaction was still open
	heldElsewhere                            int          // the first claims wait for another transaction, until their context ends

	info     receipts.Info
	checkErr error
	writer   chan struct{}

	mu        sync.Mutex
	calls     map[string]int
	receipts  map[string]receipts.Receipt
	markers   map[receipts.Nonce]bool
	outputs   []receipts.Output
	letters   []receipts.DeadLetter
	effects   map[string]int
	order     []string // in which effects became durable
	claims    fakeClaims
	open      int
	mostOpen  int
	rolledBck int
	sizes     []int // of the calls of Claim
}

func newFakeStore() *fakeStore {
	return &fakeStore{
		info:   receipts.Info{Dialect: "sqlite", Lanes: 1, Parts: true, Pool: 4, Schema: 1},
		writer: make(chan struct{}, 1), calls: map[string]int{},
		receipts: map[string]receipts.Receipt{}, markers: map[receipts.Nonce]bool{}, effects: map[string]int{},
		claims: fakeClaims{by: map[string]*fakeTx{}, changed: make(chan struct{})},
	}
}

// several makes it a store with n writers.
func (s *fakeStore) several(n int) {
	s.info.Dialect, s.info.Lanes, s.info.Pool, s.writer = "postgres", n, 0, make(chan struct{}, n+1)
}

func (s *fakeStore) fault(name string, hook func(int) error) error {
	s.mu.Lock()
	s.calls[name]++
	n := s.calls[name]
	s.mu.Unlock()
	if hook == nil {
		return nil
	}
	return hook(n)
}

func (s *fakeStore) count(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[name]
}

func (s *fakeStore) Check(context.Context) (receipts.Info, error) { return s.info, s.checkErr }
func (s *fakeStore) Migrate(context.Context) error                { return nil }

func (s *fakeStore) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[*fakeTx], error) {
	if err := s.fault("begin", s.onBegin); err != nil {
		return nil, err
	}
	select {
	case s.writer <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open++
	s.mostOpen = max(s.mostOpen, s.open)
	tx := &fakeTx{s: s, nonce: receipts.NewNonce(), claimWait: opts.ClaimWait, effects: map[string]int{}, fresh: map[string]receipts.Receipt{}}
	tx.limit(opts.Budget)
	return tx, nil
}

func (s *fakeStore) Resolve(_ context.Context, nonce receipts.Nonce) (bool, error) {
	if err := s.fault("resolve", s.onResolve); err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.markers[nonce], nil
}

func (s *fakeStore) Unsent(_ context.Context, q receipts.UnsentQuery) ([]receipts.Output, error) {
	if err := s.fault("unsent", s.onUnsent); err != nil {
		return nil, err
	}
	return s.find(q.Limit, func(o receipts.Output) bool {
		return !o.Sent && !o.ViaRouter && (q.Before.IsZero() || o.At.Before(q.Before)) &&
			strings.HasPrefix(o.Scope, q.Prefix) && (q.Scope == "" || o.Scope == q.Scope && string(o.Key) == string(q.Key))
	}), nil
}

func (s *fakeStore) Outputs(_ context.Context, scope string, key []byte) ([]receipts.Output, error) {
	if err := s.fault("outputs", s.onOutputs); err != nil {
		return nil, err
	}
	return s.find(1<<20, func(o receipts.Output) bool { return o.Scope == scope && string(o.Key) == string(key) }), nil
}

func (s *fakeStore) find(limit int, wanted func(receipts.Output) bool) []receipts.Output {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []receipts.Output
	for _, o := range s.outputs {
		if wanted(o) && len(found) < limit {
			o.Metadata = maps.Clone(o.Metadata)
			found = append(found, o)
		}
	}
	return found
}

func (s *fakeStore) MarkSent(_ context.Context, refs []receipts.OutputRef, _ time.Time) error {
	if err := s.fault("mark", s.onMark); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.outputs {
		if slices.Contains(refs, s.outputs[i].OutputRef) {
			s.outputs[i].Sent = true
		}
	}
	return nil
}

func (s *fakeStore) DeadLetters(context.Context, int) ([]receipts.DeadLetter, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.letters), nil
}

func (s *fakeStore) Stats(context.Context) (receipts.Stats, error) { return receipts.Stats{}, nil }

func (s *fakeStore) Classify(err error) receipts.Class {
	switch {
	case errors.Is(err, errBusy):
		return receipts.ClassContention
	case errors.Is(err, errGone):
		return receipts.ClassOutage
	default:
		return receipts.ClassOther
	}
}

func (s *fakeStore) effect(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.effects[name]
}

func (s *fakeStore) openNow() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

// times gives err at the first n calls.
func times(n int, err error) func(int) error {
	return func(call int) error {
		if call <= n {
			return err
		}
		return nil
	}
}
