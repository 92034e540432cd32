package contracttest

import (
	"context"
	"os"
	"slices"
	"sync/atomic"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// point is a place in the flow of one message at which a process can be killed. Points are made by wrapping store and
// driver: there is nothing in the code under test that knows of them.
type point string

// The points, in the order of the flow.
const (
	atBegun        point = "begun"
	atClaimed      point = "claimed"
	atEnded        point = "ended inside the handler"
	atKept         point = "between two messages"
	atBeforeCommit point = "before commit"
	atAfterCommit  point = "after commit"
	atBeforeAck    point = "before ack"
	atAfterAck     point = "after ack"
)

// deathPoint kills this process the nth time it comes to a point.
type deathPoint struct {
	at   point
	nth  int64
	seen atomic.Int64
}

// reach is called at a point. At the chosen one it does not return.
func (p *deathPoint) reach(at point) {
	if at != p.at || p.seen.Add(1) != p.nth {
		return
	}
	die()
}

// die ends this process as SIGKILL does, with nothing flushed, answered or rolled back.
func die() {
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Kill()
	}
	if err != nil {
		os.Exit(exitNotKilled)
	}
	select {} // the signal is on its way
}

// mortalStore passes every transaction through the points.
type mortalStore[T any] struct {
	receipts.Store[T]
	p *deathPoint
}

// Begin begins and passes a point.
func (s mortalStore[T]) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
	tx, err := s.Store.Begin(ctx, opts)
	if err != nil {
		return nil, err
	}
	s.p.reach(atBegun)
	return mortalTx[T]{Tx: tx, p: s.p}, nil
}

type mortalTx[T any] struct {
	receipts.Tx[T]
	p *deathPoint
}

// Claim claims and passes a point.
func (t mortalTx[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.Tx.Claim(ctx, claims)
	t.p.reach(atClaimed)
	return results, err
}

// Keep ends a message's part and passes a point.
func (t mortalTx[T]) Keep(ctx context.Context) error {
	err := t.Tx.Keep(ctx)
	t.p.reach(atKept)
	return err
}

// Commit passes a point, commits and passes another.
func (t mortalTx[T]) Commit(ctx context.Context) error {
	t.p.reach(atBeforeCommit)
	err := t.Tx.Commit(ctx)
	t.p.reach(atAfterCommit)
	return err
}

// mortalDriver passes every ack through the points.
type mortalDriver struct {
	sdk.Driver
	p *deathPoint
}

// Open opens a source whose acks pass the points.
func (d mortalDriver) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	src, err := d.Driver.Open(ctx, b)
	if err != nil {
		return nil, err
	}
	return withAbilities(mortalSource{Source: src, p: d.p}, src), nil
}

type mortalSource struct {
	sdk.Source
	p *deathPoint
}

// Settle passes the points where the batch has an ack.
func (s mortalSource) Settle(ctx context.Context, batch []sdk.Settlement) error {
	if !slices.ContainsFunc(batch, func(s sdk.Settlement) bool { return s.Verdict == sdk.Ack }) {
		return s.Source.Settle(ctx, batch)
	}
	s.p.reach(atBeforeAck)
	err := s.Source.Settle(ctx, batch)
	s.p.reach(atAfterAck)
	return err
}

// countingStore counts transactions and claims.
type countingStore[T any] struct {
	receipts.Store[T]
	begun, claimed *atomic.Int64
}

// Begin counts and begins.
func (s countingStore[T]) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
	s.begun.Add(1)
	tx, err := s.Store.Begin(ctx, opts)
	if err != nil {
		return nil, err
	}
	return countingTx[T]{Tx: tx, claimed: s.claimed}, nil
}

type countingTx[T any] struct {
	receipts.Tx[T]
	claimed *atomic.Int64
}

// Claim counts and claims.
func (t countingTx[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	t.claimed.Add(int64(len(claims)))
	return t.Tx.Claim(ctx, claims)
}
