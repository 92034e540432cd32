package idempotency

import (
	"bytes"
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

const (
	// rollbackBound is how long a rollback may take before the store has to close the connection instead.
	rollbackBound = 5 * time.Second
	// blockedShare is into how many parts a batch is cut when one of its claims waits for another transaction: few rounds
	// find the one of 256, and the others pass meanwhile.
	blockedShare = 16
	// defaultClaimWait is how long a claim waits for another transaction before its message is set aside.
	defaultClaimWait = 100 * time.Millisecond
)

// errBatch is why a message goes back that did not fail itself.
var errBatch = errors.New("another message of the same batch failed, and Atomicity is PerBatch")

// errBroke is why a batch ended in the middle.
var errBroke = errors.New("the store panicked, or ended the goroutine, in the middle of a batch")

// batch is one transaction and the deliveries that share it, one or several. run is left with each of them decided: v says
// what became of it.
type batch[T any] struct {
	m       *Middleware[T]
	q       *queue[T]
	members []*pending[T] // in the order in which they run
	one     [1]*pending[T]
	self    *pending[T] // the one whose goroutine this is; nil: a worker's
	lead    *pending[T] // in whose context the transaction begins
	lane    *lane       // given up early where what follows needs no transaction

	waits  *bounded        // for Begin and Claim, which wait for others
	ctx    context.Context // for what must not be cut: the values of the first message's
	claims [1]receipts.Claim
	tx     receipts.Tx[T]
	begun  time.Time
	ended  bool // Commit was called, whatever it answered

	turns   []*pending[T] // whose handlers run, in this order
	letters []receipts.DeadLetter
	given   []receipts.Claim // claimed, but not to be committed
	parts   bool             // each message's work can be undone alone
	stuck   map[string]bool  // order keys of which a message came to nothing here
	shrink  bool             // the next batch is to be smaller
	met     int              // how often in a row contention was met
	cut     bool             // the rest of the handlers run in the next batch
	ran     int              // handlers that ran
	took    time.Duration    // how long they did
}

// several tells whether there are neighbours to think of.
func (b *batch[T]) several() bool { return len(b.members) > 1 }

// run is the transaction, from Begin to COMMIT. However it is left, the transaction has ended.
func (b *batch[T]) run() {
	if !b.ready() || !b.begin() {
		return
	}
	defer b.rollback()
	if !b.claimAll() || !b.divertAll() {
		return
	}
	if !b.runAll() || !b.worthIt() {
		return
	}
	b.commit()
}

// ready decides about messages that need no transaction any more. It tells whether there are others.
func (b *batch[T]) ready() bool {
	now := time.Now().UnixNano()
	for _, p := range b.members {
		p.begin()
		p.began.CompareAndSwap(0, now)
		b.m.disown(p) // of a transaction that did not commit
		if err := p.ctx.Err(); err != nil {
			p.v = returned(err)
		} else if b.m.claimsAhead(p) && p.behind() {
			p.v = returnedAndHeld(errBehind) // once its receipt is committed it would be lost
		} else if b.lead == nil {
			b.lead = p
		}
	}
	switch {
	case b.lead == nil:
		return false
	case b.m.gate.paused.Load() && !b.lead.probing:
		b.rest(verdict{kind: kindPaused}) // somebody found out meanwhile: do not try the same
		return false
	}
	b.inOrder()
	return true
}

// rest decides all that are not decided.
func (b *batch[T]) rest(v verdict) {
	for _, p := range b.members {
		if !p.decided() {
			p.v = v
		}
	}
}

// broken decides what an error of the transaction itself means for all that are not decided. Where it is neither contention
// nor an outage and there are several, they run again in halves, until it is known whose it is.
func (b *batch[T]) broken(err error, other func(error) verdict) {
	v := b.m.classify(err, other)
	if held := b.guilty(v); held != nil {
		b.blame(held)
		return
	}
	if v.kind != kindContention && v.kind != kindOutage && b.several() {
		if errors.Is(err, receipts.ErrTxEnded) {
			b.spare(err)
		}
		v = again(len(b.members)/2, err)
	}
	b.rest(v)
}

// broke decides after something else than a handler panicked, or with nil ended the goroutine, in a worker. The messages run
// again alone: what does not end by itself then reaches their own goroutines.
func (b *batch[T]) broke(value any) {
	err := fmt.Errorf("%w: %v", errBroke, value)
	b.m.log.Error("The messages of a batch run again, each alone", err, watermill.LogFields{"messages": len(b.members)})
	b.spare(err)
	b.rest(again(1, err))
}

// spare decides, where a transaction may have been committed by somebody else, about messages whose handlers must not run
// twice and have no receipt in it that would tell.
func (b *batch[T]) spare(err error) {
	for _, p := range b.members {
		if p.claimed && p.kept && !p.decided() {
			p.v = returnedAndHeld(fmt.Errorf("%w: %w", ErrUndecided, err))
		}
	}
}

// begin waits for a connection and the right to write, at most TxBudget.
func (b *batch[T]) begin() bool {
	m := b.m
	b.waits = boundedBy(b.lead.ctx, time.Now().Add(m.cfg.TxBudget))
	tx, err := m.store.Begin(b.waits, receipts.TxOptions{Budget: m.cfg.TxBudget, ClaimWait: b.claimWait()})
	if err == nil {
		b.tx, b.begun = tx, time.Now()
		b.ctx = context.WithoutCancel(b.lead.ctx)
		return true
	}
	ended := b.waits.Err()
	b.waits.stop()
	if err := over(b.lead.ctx); err != nil {
		b.cancelled(err)
		return false
	}
	other := returnedAndHeld
	if ended != nil {
		other = outage // no connection for so long: the pool is exhausted, or nobody answers
	}
	b.broken(fmt.Errorf("begin: %w", err), other)
	return false
}

// claimWait is short where others would wait with this message; one that is known to be blocked waits for as long as its
// transaction may last.
func (b *batch[T]) claimWait() time.Duration {
	if b.lead.blocked || !b.m.sideLane() {
		return 0
	}
	return cmp.Or(b.m.info.ClaimWait, defaultClaimWait)
}

// cancelled follows the end of the context in which the transaction waits: the others try again.
func (b *batch[T]) cancelled(err error) {
	b.lead.v = returned(err)
	b.rest(again(0, err))
}

// claimAll asks for the receipts, all in one statement, and decides by the answers.
func (b *batch[T]) claimAll() bool {
	defer b.waits.stop()
	claims := b.claims[:0]
	if b.several() {
		claims = make([]receipts.Claim, 0, len(b.members))
	}
	now := time.Now()
	for _, p := range b.members {
		if !p.decided() && p.refused == "" && b.m.claims(p) {
			claims = append(claims, p.claim(now))
		}
	}
	results, ok := b.ask(claims)
	if !ok {
		return false
	}
	i := 0
	for _, p := range b.members {
		switch {
		case p.decided():
		case p.refused != "":
			b.divert(p, receipts.KindRefused, p.refused, &b.m.counters.refused, runAgain)
		case !b.m.claims(p):
			b.unclaimed(p)
		default:
			b.claimed(p, results[i])
			i++
		}
	}
	return true
}

// ask claims. Where it fails everything is decided.
func (b *batch[T]) ask(claims []receipts.Claim) ([]receipts.ClaimResult, bool) {
	if len(claims) == 0 {
		return nil, true
	}
	first := b.lead.ctx
	results, err := b.tx.Claim(b.waits, claims)
	switch {
	case err == nil && len(results) == len(claims):
		return results, true
	case err == nil:
		err = fmt.Errorf("the store gave %d answers to %d claims", len(results), len(claims))
	case over(first) != nil:
		b.cancelled(over(first))
		return nil, false
	}
	err = fmt.Errorf("claim: %w", err)
	other := returnedAndHeld
	if b.waits.Err() != nil {
		other = contention // the same identity is claimed elsewhere and stays open
	}
	if v := b.m.classify(err, other); v.kind == kindContention && b.claimWait() > 0 {
		b.blocked(v.err)
		return nil, false
	}
	b.broken(err, other)
	return nil, false
}

// blocked cuts a batch up, one of whose claims waits for another transaction, until that one is alone and can be set aside.
func (b *batch[T]) blocked(err error) {
	b.m.counters.contention.Add(1)
	if b.several() {
		b.rest(again(max(1, len(b.members)/blockedShare), err))
		return
	}
	b.rest(verdict{kind: kindBlocked, err: err})
}

// unclaimed decides about a message without claim in this transaction.
func (b *batch[T]) unclaimed(p *pending[T]) {
	if p.permanent != nil {
		b.divert(p, receipts.KindPermanent, p.permanent.Error(), &b.m.counters.diverted, b.m.whenDiverting())
	}
}

// claimed decides by the answer to a claim: nothing is decided yet where the handler has to run.
func (b *batch[T]) claimed(p *pending[T], result receipts.ClaimResult) {
	if result.Status != receipts.ClaimFresh {
		b.held(p, result)
		return
	}
	p.fresh = true
	switch {
	case p.permanent != nil:
		b.divert(p, receipts.KindPermanent, p.permanent.Error(), &b.m.counters.diverted, b.m.whenDiverting())
	case b.m.claimsAhead(p):
		p.stays(verdict{kind: kindClaimed}, askAgain)
	}
}

// held decides about a delivery whose identity has a receipt already.
func (b *batch[T]) held(p *pending[T], result receipts.ClaimResult) {
	receipt, counters := result.Receipt, &b.m.counters
	switch {
	case result.Status == receipts.ClaimTorn:
		reason := fmt.Sprintf("its receipt of %s belongs to transaction %s, which did not commit as a whole", stamp(receipt.At), receipt.Nonce)
		if p.permanent != nil {
			reason += "; its handler gave up: " + p.permanent.Error()
		}
		b.divert(p, receipts.KindTorn, reason, &counters.torn, runAgain)
	case bytes.Equal(receipt.Fingerprint, p.fingerprint):
		p.v = done(&counters.replayed)
		p.v.replay = receipt.State == receipts.StateDone
		p.v.applied = b.m.tells()
	case b.m.cfg.Conflict == HoldConflicts:
		counters.conflicted.Add(1)
		p.v = returnedAndHeld(fmt.Errorf("%w at %s", ErrConflict, stamp(receipt.At)))
	default:
		reason := "the identity was processed with another payload at " + stamp(receipt.At)
		b.divert(p, receipts.KindConflict, reason, &counters.conflicted, runAgain)
	}
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// divert makes the message's dead letter part of the transaction.
func (b *batch[T]) divert(p *pending[T], why receipts.DeadLetterKind, reason string, count *atomic.Uint64, lost unknown) {
	b.letters = append(b.letters, b.m.letter(p, why, reason))
	then := done(count)
	then.diverted = why
	p.stays(then, lost)
}

// divertAll stores the dead letters. Storing one again adds nothing.
func (b *batch[T]) divertAll() bool {
	if len(b.letters) == 0 {
		return true
	}
	ctx := b.detached()
	defer ctx.stop()
	if err := b.tx.Divert(ctx, b.letters); err != nil {
		b.broken(fmt.Errorf("divert: %w", err), returnedAndHeld)
		return false
	}
	return true
}

// detached gives a context for statements that the end of a message's must not cut: it ends after TxBudget, or by its stop.
func (b *batch[T]) detached() *bounded {
	return boundedBy(b.ctx, time.Now().Add(b.m.cfg.TxBudget))
}

// unknown says what to do about a COMMIT whose answer was lost.
type unknown uint8

const (
	askAgain unknown = iota // the transaction had a fresh claim: the database can tell what became of it
	runAgain                // it had none, but doing it twice changes nothing
	giveBack                // it had none, and nobody can tell: the message goes back
)

// worthIt tells whether something is to be committed; where it is, claims that came to nothing are given up.
func (b *batch[T]) worthIt() bool {
	if !slices.ContainsFunc(b.members, func(p *pending[T]) bool { return p.kept }) {
		return false // what is decided needs no commit
	}
	if len(b.given) == 0 {
		return true
	}
	ctx := b.detached()
	defer ctx.stop()
	if err := b.tx.Unclaim(ctx, b.given); err != nil {
		b.broken(fmt.Errorf("give up claims: %w", err), failed)
		return false
	}
	return true
}

// commit ends the transaction, cut loose from the messages' contexts, and decides about all that it made durable.
func (b *batch[T]) commit() {
	ctx := b.detached()
	defer ctx.stop()
	err := b.tx.Commit(ctx)
	b.ended = true
	switch {
	case err == nil:
		b.durable()
	case errors.Is(err, receipts.ErrCommitUnknown):
		b.unknown(err)
	default:
		b.broken(fmt.Errorf("commit: %w", err), b.refusedCommit)
	}
}

// refusedCommit is what an error of COMMIT means that is neither contention nor outage. What breaks a transaction that
// could claim is what the handler did with it; where none ran, nobody is charged.
func (b *batch[T]) refusedCommit(err error) verdict {
	if b.ran > 0 {
		return failed(err)
	}
	return returnedAndHeld(err)
}

// durable decides that everything kept is done.
func (b *batch[T]) durable() {
	n := 0
	for _, p := range b.members {
		if p.kept && !p.decided() {
			p.v = p.then
			b.m.logDiverted(p)
			n++
		}
	}
	b.m.committed(n)
}

// unknown finds out what became of a COMMIT without an answer.
func (b *batch[T]) unknown(err error) {
	b.lane.release()
	b.m.counters.unknownCommits.Add(1)
	var answer verdict
	n := 0
	for _, p := range b.members {
		if p.decided() {
			continue
		}
		switch p.lost {
		case runAgain:
			p.v = contention(err)
		case giveBack:
			p.v = returned(fmt.Errorf("%w: %w", ErrUndecided, err))
		default:
			if answer.kind == kindNone {
				answer = b.m.resolve(p, b.tx.Nonce(), err)
			}
			if p.v = answer; answer.kind == kindDone {
				p.v = p.then
				b.m.logDiverted(p)
				n++
			}
		}
	}
	if n > 0 {
		b.m.committed(n)
	}
}

// rollback undoes what was not committed.
func (b *batch[T]) rollback() {
	if b.ended {
		return
	}
	b.ended = true
	ctx := boundedBy(b.ctx, time.Now().Add(rollbackBound))
	defer ctx.stop()
	if err := b.tx.Rollback(ctx); err != nil {
		b.m.log.Debug("Rollback failed; the connection is closed", b.m.fields(b.lead).Add(map[string]any{"error": err.Error()}))
		b.acquit(err)
	}
}

// acquit charges nobody whose handler met the network's error in the moment in which the connection of the transaction was lost:
// not every client says whose connection such an error is about. One whose context ended has closed it itself.
func (b *batch[T]) acquit(rollback error) {
	if b.m.store.Classify(rollback) != receipts.ClassOutage {
		return
	}
	for _, p := range b.members {
		if p.v.kind == kindFailed && ofNetwork(p.v.err) {
			p.v = outage(fmt.Errorf("%w: %w", rollback, p.v.err))
		}
	}
}

func ofNetwork(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, driver.ErrBadConn)
}
