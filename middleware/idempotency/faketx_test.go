package idempotency

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// fakeTx is both the store's transaction and what handlers get.
type fakeTx struct {
	s         *fakeStore
	nonce     receipts.Nonce
	claimWait time.Duration
	budget    *time.Timer

	effects map[string]int
	order   []string // of the effects
	fresh   map[string]receipts.Receipt
	outputs []receipts.Output
	letters []receipts.DeadLetter

	part *fakePart

	member int
	held   []*receipts.MemberError // statements that will fail when they are sent
	broken error

	mu      sync.Mutex
	ended   bool
	expired bool // its budget ended it
	stole   bool // the handler committed or rolled back
}

// fakePart is what Undo goes back to.
type fakePart struct {
	effects                 map[string]int
	order, outputs, letters int
}

func (tx *fakeTx) Unclaim(_ context.Context, claims []receipts.Claim) error {
	if err := tx.s.fault("unclaim", tx.s.onUnclaim); err != nil {
		return err
	}
	if err := tx.over(); err != nil {
		return err
	}
	for _, c := range claims {
		delete(tx.fresh, receiptKey(c.Scope, c.Key)) // others still wait for the end of this transaction
	}
	return nil
}

func (tx *fakeTx) Part(context.Context) error {
	if err := tx.s.fault("part", tx.s.onPart); err != nil {
		return err
	}
	if err := tx.over(); err != nil {
		return err
	}
	tx.parts(false)
	tx.part = &fakePart{effects: maps.Clone(tx.effects), order: len(tx.order), outputs: len(tx.outputs), letters: len(tx.letters)}
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
	undone := tx.part
	if err := tx.partOver(); err != nil {
		return err
	}
	tx.effects, tx.order = undone.effects, tx.order[:undone.order]
	tx.outputs, tx.letters = tx.outputs[:undone.outputs], tx.letters[:undone.letters]
	return nil
}

func (tx *fakeTx) partOver() error {
	tx.parts(true)
	tx.part = nil
	return tx.over()
}

// parts checks that parts are used where there are some, and do not nest.
func (tx *fakeTx) parts(open bool) {
	if !tx.s.info.Parts || (tx.part != nil) != open {
		panic(fmt.Sprintf("fake: a part in a store with parts %v, open %v", tx.s.info.Parts, tx.part != nil))
	}
}

// over tells whether somebody else than the store has ended the transaction.
func (tx *fakeTx) over() error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	switch {
	case tx.expired:
		return receipts.ErrBudgetEnded
	case tx.stole, tx.ended:
		return receipts.ErrTxEnded
	default:
		return nil
	}
}

// Member implements receipts.Attributing.
func (tx *fakeTx) Member(n int) { tx.member = n }

// hold is a statement that the store holds back, and that fails when it is sent.
func (tx *fakeTx) hold(err error) {
	tx.held = append(tx.held, &receipts.MemberError{Member: tx.member, Err: err})
}

// send sends what is held back, as a statement does whose answer the handler wants.
func (tx *fakeTx) send() error {
	if tx.broken == nil && len(tx.held) > 0 {
		tx.broken = fmt.Errorf("fake: %w", tx.held[0])
	}
	return tx.broken
}

func (tx *fakeTx) add(name string, n int) {
	tx.effects[name] += n
	tx.order = append(tx.order, name)
}

// commitByHand is what a handler must not do: effect and receipt become durable, without a marker.
func (tx *fakeTx) commitByHand() {
	if tx.over() != nil {
		return
	}
	tx.apply(false)
	tx.mu.Lock()
	defer tx.mu.Unlock()
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
	if err := tx.over(); err != nil {
		return nil, err
	}
	if err := tx.s.claims.take(ctx, tx, claims); err != nil {
		return nil, err
	}
	tx.s.mu.Lock()
	defer tx.s.mu.Unlock()
	tx.s.sizes = append(tx.s.sizes, len(claims))
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
	if err := cmp.Or(tx.over(), ctx.Err(), tx.send()); err != nil {
		return nil, err
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
	tx.budget.Stop()
	if err := tx.over(); err != nil {
		tx.end()
		return err
	}
	if fault.err == nil {
		fault.err = cmp.Or(ctx.Err(), tx.send())
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
	tx.s.order = append(tx.s.order, tx.order...)
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
		if tx.s.onRollback != nil {
			return tx.s.onRollback()
		}
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
	tx.budget.Stop()
	tx.s.mu.Lock()
	tx.s.open--
	tx.s.mu.Unlock()
	tx.s.claims.leave(tx)
	<-tx.s.writer
	return true
}

// limit ends the transaction when its budget is over.
func (tx *fakeTx) limit(budget time.Duration) {
	if budget <= 0 {
		budget = time.Hour
	}
	tx.mu.Lock()
	defer tx.mu.Unlock()
	tx.budget = time.AfterFunc(budget, func() {
		tx.mu.Lock()
		tx.expired = !tx.ended
		tx.mu.Unlock()
		_ = tx.Rollback(context.Background())
	})
}

// fakeClaims knows which open transaction has claimed an identity.
type fakeClaims struct {
	mu      sync.Mutex
	by      map[string]*fakeTx
	changed chan struct{} // closed, and replaced, when a transaction ends
}

// take waits for other open transactions, in key order, for as long as the transaction's ClaimWait and ctx allow.
func (c *fakeClaims) take(ctx context.Context, tx *fakeTx, claims []receipts.Claim) error {
	if tx.claimWait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, tx.claimWait)
		defer cancel()
	}
	ids := make([]string, len(claims))
	for i, claim := range claims {
		ids[i] = receiptKey(claim.Scope, claim.Key)
	}
	slices.Sort(ids)
	for _, id := range ids {
		for {
			c.mu.Lock()
			other, changed := c.by[id], c.changed
			if other == nil || other == tx {
				c.by[id] = tx
				c.mu.Unlock()
				break
			}
			c.mu.Unlock()
			select {
			case <-changed:
			case <-ctx.Done():
				return fmt.Errorf("%w: claimed by another transaction", errBusy)
			}
		}
	}
	return nil
}

func (c *fakeClaims) leave(tx *fakeTx) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.by, func(_ string, by *fakeTx) bool { return by == tx })
	close(c.changed)
	c.changed = make(chan struct{})
}
