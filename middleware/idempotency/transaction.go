package idempotency

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// rollbackBound is how long a rollback may take before the store has to close the connection instead.
const rollbackBound = 5 * time.Second

// transaction is one transaction for one message, from Begin to COMMIT. However it is left, the transaction has ended.
func (m *Middleware[T]) transaction(p *pending[T], lane *lane, h message.HandlerFunc) verdict {
	tx, v := m.begin(p)
	if tx == nil {
		return v
	}
	r := &running[T]{tx: tx, begun: time.Now(), lane: lane}
	defer m.rollback(p, r)
	if p.refused != "" {
		return m.divert(p, r, receipts.KindRefused, p.refused, &m.counters.refused, runAgain)
	}
	if m.claims(p) {
		result, v := m.claim(p, r)
		if v.kind != kindNone {
			return v
		}
		if result.Status != receipts.ClaimFresh {
			return m.held(p, r, result)
		}
	}
	switch {
	case p.permanent != nil:
		return m.divert(p, r, receipts.KindPermanent, p.permanent.Error(), &m.counters.diverted, m.whenDiverting())
	case m.claimsAhead(p):
		return m.commit(p, r, verdict{kind: kindClaimed}, askAgain, returnedAndHeld)
	default:
		return m.run(p, r, h)
	}
}

// begin waits for a connection and the right to write, at most TxBudget. A nil transaction comes with the verdict.
func (m *Middleware[T]) begin(p *pending[T]) (receipts.Tx[T], verdict) {
	ctx, cancel := context.WithTimeout(p.ctx, m.cfg.TxBudget)
	defer cancel()
	tx, err := m.store.Begin(ctx, receipts.TxOptions{Budget: m.cfg.TxBudget})
	switch {
	case err == nil:
		return tx, verdict{}
	case p.ctx.Err() != nil:
		return nil, returned(p.ctx.Err())
	}
	err = fmt.Errorf("begin: %w", err)
	if ctx.Err() != nil {
		return nil, m.classify(err, outage) // no connection for so long: the pool is exhausted, or nobody answers
	}
	return nil, m.classify(err, returnedAndHeld)
}

// claim asks for the receipt. A verdict other than none ends the round.
func (m *Middleware[T]) claim(p *pending[T], r *running[T]) (receipts.ClaimResult, verdict) {
	state := receipts.StateDone
	if p.permanent != nil {
		state = receipts.StateDiverted
	}
	ctx, cancel := context.WithDeadline(p.ctx, r.begun.Add(m.cfg.TxBudget))
	defer cancel()
	results, err := r.tx.Claim(ctx, []receipts.Claim{{Scope: p.scope, Key: p.key, Fingerprint: p.fingerprint, State: state, At: time.Now()}})
	switch {
	case err == nil && len(results) == 1:
		return results[0], verdict{}
	case err == nil:
		err = fmt.Errorf("the store gave %d answers to one claim", len(results))
	case p.ctx.Err() != nil:
		return receipts.ClaimResult{}, returned(p.ctx.Err())
	}
	err = fmt.Errorf("claim: %w", err)
	if ctx.Err() != nil {
		return receipts.ClaimResult{}, m.classify(err, contention) // the same identity is claimed elsewhere and stays open
	}
	return receipts.ClaimResult{}, m.classify(err, returnedAndHeld)
}

// held answers a delivery whose identity has a receipt already.
func (m *Middleware[T]) held(p *pending[T], r *running[T], result receipts.ClaimResult) verdict {
	receipt := result.Receipt
	switch {
	case result.Status == receipts.ClaimTorn:
		reason := fmt.Sprintf("its receipt of %s belongs to transaction %s, which did not commit as a whole", stamp(receipt.At), receipt.Nonce)
		if p.permanent != nil {
			reason += "; its handler gave up: " + p.permanent.Error()
		}
		return m.divert(p, r, receipts.KindTorn, reason, &m.counters.torn, runAgain)
	case bytes.Equal(receipt.Fingerprint, p.fingerprint):
		v := done(&m.counters.replayed)
		v.replay = receipt.State == receipts.StateDone
		return v // the transaction is empty, and rolled back
	case m.cfg.Conflict == HoldConflicts:
		m.counters.conflicted.Add(1)
		return returnedAndHeld(fmt.Errorf("%w at %s", ErrConflict, stamp(receipt.At)))
	default:
		reason := "the identity was processed with another payload at " + stamp(receipt.At)
		return m.divert(p, r, receipts.KindConflict, reason, &m.counters.conflicted, runAgain)
	}
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// unknown says what to do about a COMMIT whose answer was lost.
type unknown uint8

const (
	askAgain unknown = iota // the transaction had a fresh claim: the database can tell what became of it
	runAgain                // it had none, but doing it twice changes nothing
	giveBack                // it had none, and nobody can tell: the message goes back
)

// commit ends a transaction, cut loose from the message's context. then is what the round is worth once it is durable,
// and other the verdict on an error that is neither contention nor outage.
func (m *Middleware[T]) commit(p *pending[T], r *running[T], then verdict, lost unknown, other func(error) verdict) verdict {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), m.cfg.TxBudget)
	defer cancel()
	err := r.tx.Commit(ctx)
	r.ended = true
	switch {
	case err == nil:
		m.committed()
		return then
	case !errors.Is(err, receipts.ErrCommitUnknown):
		return m.classify(fmt.Errorf("commit: %w", err), other)
	case lost == askAgain:
		return verdict{kind: kindUnknown, err: err, nonce: r.tx.Nonce(), then: &then}
	}
	m.counters.unknownCommits.Add(1)
	if lost == runAgain {
		return contention(err)
	}
	return returned(fmt.Errorf("%w: %w", ErrUndecided, err))
}

// rollback undoes what was not committed.
func (m *Middleware[T]) rollback(p *pending[T], r *running[T]) {
	if r.ended {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), rollbackBound)
	defer cancel()
	if err := r.tx.Rollback(ctx); err != nil {
		m.log.Debug("Rollback failed; the connection is closed", m.fields(p).Add(map[string]any{"error": err.Error()}))
	}
}
