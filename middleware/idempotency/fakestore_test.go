package idempotency

import (
	"cmp"
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

// fakeStore keeps rows in memory with one writer at a time, and fails where a test says so. Each hook is asked with the
// number of calls so far, from 1; nil and zero mean no fault.
type fakeStore struct {
	onBegin, onClaim, onAddOutputs, onDivert func(n int) error
	onPart, onKeep, onUndo, onUnclaim        func(n int) error
	onResolve, onUnsent, onOutputs, onMark   func(n int) error
	onCommit                                 func(n int) commitFault
	heldElsewhere                            int // the first claims wait for another transaction, until their context ends

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
	open      int
	mostOpen  int
	rolledBck int
}

func newFakeStore() *fakeStore {
	return &fakeStore{
		info:   receipts.Info{Dialect: "sqlite", Lanes: 1, Parts: true, Pool: 4, Schema: 1},
		writer: make(chan struct{}, 1), calls: map[string]int{},
		receipts: map[string]receipts.Receipt{}, markers: map[receipts.Nonce]bool{}, effects: map[string]int{},
	}
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

func (s *fakeStore) Begin(ctx context.Context, _ receipts.TxOptions) (receipts.Tx[*fakeTx], error) {
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
	return &fakeTx{s: s, nonce: receipts.NewNonce(), effects: map[string]int{}, fresh: map[string]receipts.Receipt{}}, nil
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

// fakeTx is both the store's transaction and what handlers get.
type fakeTx struct {
	s       *fakeStore
	nonce   receipts.Nonce
	effects map[string]int
	fresh   map[string]receipts.Receipt
	outputs []receipts.Output
	letters []receipts.DeadLetter

	part *fakePart

	mu    sync.Mutex
	ended bool
	stole bool // the handler committed or rolled back
}

// fakePart is what Undo goes back to.
type fakePart struct {
	effects          map[string]int
	outputs, letters int
}

func (tx *fakeTx) Unclaim(_ context.Context, claims []receipts.Claim) error {
	if err := tx.s.fault("unclaim", tx.s.onUnclaim); err != nil {
		return err
	}
	for _, c := range claims {
		delete(tx.fresh, receiptKey(c.Scope, c.Key))
	}
	return nil
}

func (tx *fakeTx) Part(context.Context) error {
	if err := tx.s.fault("part", tx.s.onPart); err != nil {
		return err
	}
	tx.part = &fakePart{effects: maps.Clone(tx.effects), outputs: len(tx.outputs), letters: len(tx.letters)}
	return nil
}

func (tx *fakeTx) Keep(context.Context) error {
	if err := tx.s.fault("keep", tx.s.onKeep); err != nil {
		return err
	}
	return tx.partOver()
}

func (tx *fakeTx) Undo(context.Context) error {
	if err := tx.s.fault("undo", tx.s.onUndo); err != nil {
		return err
	}
	if err := tx.partOver(); err != nil {
		return err
	}
	tx.effects, tx.outputs, tx.letters = tx.part.effects, tx.outputs[:tx.part.outputs], tx.letters[:tx.part.letters]
	return nil
}

func (tx *fakeTx) partOver() error {
	if tx.stole {
		return receipts.ErrTxEnded
	}
	return nil
}

func (tx *fakeTx) add(name string, n int) { tx.effects[name] += n }

// commitByHand is what a handler must not do: effect and receipt become durable, without a marker.
func (tx *fakeTx) commitByHand() {
	tx.apply(false)
	tx.stole = true
}

func (tx *fakeTx) Raw() *fakeTx          { return tx }
func (tx *fakeTx) Nonce() receipts.Nonce { return tx.nonce }

func receiptKey(scope string, key []byte) string { return scope + "\x00" + string(key) }

func (tx *fakeTx) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	if err := tx.s.fault("claim", tx.s.onClaim); err != nil {
		return nil, err
	}
	if tx.s.count("claim") <= tx.s.heldElsewhere {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	tx.s.mu.Lock()
	defer tx.s.mu.Unlock()
	results := make([]receipts.ClaimResult, len(claims))
	for i, c := range claims {
		id := receiptKey(c.Scope, c.Key)
		held, there := tx.s.receipts[id]
		switch {
		case !there:
			tx.fresh[id] = receipts.Receipt{Fingerprint: slices.Clone(c.Fingerprint), Nonce: tx.nonce, State: c.State, At: c.At}
			results[i].Status = receipts.ClaimFresh
		case tx.s.markers[held.Nonce]:
			results[i] = receipts.ClaimResult{Status: receipts.ClaimHeld, Receipt: held}
		default:
			results[i] = receipts.ClaimResult{Status: receipts.ClaimTorn, Receipt: held}
		}
	}
	return results, nil
}

func (tx *fakeTx) AddOutputs(ctx context.Context, outputs []receipts.Output) ([]receipts.Output, error) {
	if err := tx.s.fault("addOutputs", tx.s.onAddOutputs); err != nil {
		return nil, err
	}
	if tx.stole {
		return nil, receipts.ErrTxEnded
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	stored := slices.Clone(outputs)
	for i := range stored {
		stored[i].OutputRef = receipts.OutputRef{Nonce: tx.nonce, Position: len(tx.outputs) + i}
	}
	tx.outputs = append(tx.outputs, stored...)
	return slices.Clone(stored), nil
}

func (tx *fakeTx) Divert(ctx context.Context, letters []receipts.DeadLetter) error {
	if err := tx.s.fault("divert", tx.s.onDivert); err != nil {
		return err
	}
	tx.letters = append(tx.letters, letters...)
	return ctx.Err()
}

func (tx *fakeTx) Commit(ctx context.Context) error {
	tx.s.mu.Lock()
	tx.s.calls["commit"]++
	n := tx.s.calls["commit"]
	tx.s.mu.Unlock()
	var fault commitFault
	if tx.s.onCommit != nil {
		fault = tx.s.onCommit(n)
	}
	if tx.stole {
		tx.end()
		return receipts.ErrTxEnded
	}
	if fault.err == nil {
		fault.err = ctx.Err()
	}
	if fault.err != nil {
		tx.end()
		return fault.err
	}
	if !fault.lost || fault.apply {
		tx.apply(true)
	}
	tx.end()
	if fault.lost {
		return receipts.ErrCommitUnknown
	}
	return nil
}

func (tx *fakeTx) apply(whole bool) {
	tx.s.mu.Lock()
	defer tx.s.mu.Unlock()
	maps.Copy(tx.s.receipts, tx.fresh)
	if whole && len(tx.fresh) > 0 {
		tx.s.markers[tx.nonce] = true
	}
	for name, n := range tx.effects {
		tx.s.effects[name] += n
	}
	tx.s.outputs = append(tx.s.outputs, tx.outputs...)
	for _, l := range tx.letters {
		known := slices.ContainsFunc(tx.s.letters, func(o receipts.DeadLetter) bool {
			return cmp.Or(cmp.Compare(o.Scope, l.Scope), slices.Compare(o.Key, l.Key), slices.Compare(o.Fingerprint, l.Fingerprint)) == 0
		})
		if !known {
			tx.s.letters = append(tx.s.letters, l)
		}
	}
}

func (tx *fakeTx) Rollback(context.Context) error {
	if tx.end() {
		tx.s.mu.Lock()
		tx.s.rolledBck++
		tx.s.mu.Unlock()
	}
	return nil
}

func (tx *fakeTx) end() bool {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.ended {
		return false
	}
	tx.ended = true
	tx.s.mu.Lock()
	tx.s.open--
	tx.s.mu.Unlock()
	<-tx.s.writer
	return true
}

// once gives err at the first call only, times at the first n.
func times(n int, err error) func(int) error {
	return func(call int) error {
		if call <= n {
			return err
		}
		return nil
	}
}
