package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// point is a moment at which a consumer process is killed.
type point string

const (
	beforeCommit point = "before COMMIT"
	midBatch     point = "between two messages of one transaction"
	afterCommit  point = "after COMMIT, before the acks"
	ackInFlight  point = "acks about to be sent"
	atRandom     point = "at random"
)

func points() []point { return []point{beforeCommit, midBatch, afterCommit, ackInFlight, atRandom} }

// barePoints are those of a consumer whose messages never share a transaction.
func barePoints() []point { return []point{beforeCommit, afterCommit, ackInFlight, atRandom} }

// kill says when one consumer process dies: at the point, once it has passed it After times. The consumer kills itself,
// so that the moment is exact; atRandom is done by the parent, a random while after that many acknowledgements.
type kill struct {
	Point point
	After int
	Wait  time.Duration
}

// planKills spreads kills over about half of the work. At most 60 % of the events lie before the last one; the rest is for
// what a killed consumer had done without the broker hearing of it, so that each kill is sure to happen.
func planKills(points []point, count, events int, seed uint64) []kill {
	rnd := rand.New(rand.NewPCG(seed, 3))
	kills := make([]kill, count)
	for i := range kills {
		longest := events * 6 / 10 / count
		kills[i] = kill{
			Point: points[i%len(points)],
			After: longest*3/4 + rnd.IntN(longest/4),
			Wait:  time.Duration(rnd.Int64N(int64(15 * time.Millisecond))),
		}
	}
	return kills
}

// trigger ends this process when its point has been passed often enough. It is safe for concurrent use.
type trigger struct {
	kill   kill
	out    io.Writer // where the last words go
	passed atomic.Int64
}

// pass counts n passages of a point; it does not return from the last one. The process dies with words about what was open.
func (t *trigger) pass(p point, n int, words lastWords) {
	if t.kill.Point != p || t.passed.Add(int64(n)) < int64(t.kill.After) {
		return
	}
	if line, err := json.Marshal(progress{Last: &words}); err == nil {
		_, _ = t.out.Write(append(line, '\n')) // what a pipe holds survives the writer
	}
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Kill() // SIGKILL: no deferred call runs, no connection is closed in an orderly way
	}
	fmt.Fprintln(os.Stderr, "cannot kill this process:", err)
	select {}
}

// lastWords are what a consumer says in the moment before it kills itself: for how many messages work was done in the open
// transaction, or had just been committed.
type lastWords struct {
	Open, Committed int
}

// killingStore kills its process around COMMIT, and in the middle of a transaction for several messages. It is the only
// thing between the middleware and its store.
type killingStore struct {
	receipts.Store[*sql.Tx]
	trigger *trigger
}

func (s killingStore) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[*sql.Tx], error) {
	tx, err := s.Store.Begin(ctx, opts)
	if err != nil {
		return nil, err
	}
	return &killingTx{Tx: tx, trigger: s.trigger}, nil
}

type killingTx struct {
	receipts.Tx[*sql.Tx]
	trigger *trigger
	claimed int // messages that this transaction is for
	kept    int // of which so many are done
}

func (t *killingTx) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.Tx.Claim(ctx, claims)
	for _, r := range results {
		if r.Status == receipts.ClaimFresh {
			t.claimed++
		}
	}
	return results, err
}

func (t *killingTx) Unclaim(ctx context.Context, claims []receipts.Claim) error {
	t.claimed -= len(claims)
	return t.Tx.Unclaim(ctx, claims)
}

// Keep is called between two messages, where there are several.
func (t *killingTx) Keep(ctx context.Context) error {
	err := t.Tx.Keep(ctx)
	if t.kept++; err == nil && t.kept < t.claimed {
		t.trigger.pass(midBatch, 1, lastWords{Open: t.kept})
	}
	return err
}

func (t *killingTx) Commit(ctx context.Context) error {
	t.trigger.pass(beforeCommit, t.claimed, lastWords{Open: t.claimed})
	err := t.Tx.Commit(ctx)
	if err == nil {
		t.trigger.pass(afterCommit, t.claimed, lastWords{Committed: t.claimed})
	}
	return err
}

// killingDriver kills its process when a batch of settlements is about to be sent to the broker.
type killingDriver struct {
	sdk.Driver
	trigger *trigger
}

func (d killingDriver) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	source, err := d.Driver.Open(ctx, b)
	if err != nil {
		return nil, err
	}
	if extender, ok := source.(sdk.LeaseExtender); ok {
		return killingLeaseSource{killingSource{source, d.trigger}, extender}, nil
	}
	return killingSource{source, d.trigger}, nil
}

type killingSource struct {
	sdk.Source
	trigger *trigger
}

func (s killingSource) Settle(ctx context.Context, batch []sdk.Settlement) error {
	s.trigger.pass(ackInFlight, len(batch), lastWords{Committed: len(batch)})
	return s.Source.Settle(ctx, batch)
}

type killingLeaseSource struct {
	killingSource
	sdk.LeaseExtender
}
