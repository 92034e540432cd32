package stage

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

// Point is a moment at which a consumer process is killed.
type Point string

// The points that every consumer passes. A program may have others, where it calls [Trigger.Pass] itself.
const (
	BeforeCommit Point = "before COMMIT"
	// MidBatch is passed only where the store can undo the messages of a transaction one by one.
	MidBatch    Point = "between two messages of one transaction"
	AfterCommit Point = "after COMMIT, before the acks"
	AckInFlight Point = "acks about to be sent"
	// AtRandom is the parent's doing.
	AtRandom Point = "at random"
)

// Kill says when one consumer process dies: at the point, once it has passed it After times. The consumer kills itself,
// so that the moment is exact; AtRandom is done by the parent, a random while after that many acknowledgements.
type Kill struct {
	Point Point
	After int
	Wait  time.Duration
}

// Plan spreads kills over about half of the work. At most 60 % of the events lie before the last one; the rest is for
// what a killed consumer had done without the broker hearing of it, so that each kill is sure to happen.
func Plan(points []Point, count, events int, seed uint64) []Kill {
	rnd := rand.New(rand.NewPCG(seed, 3))
	kills := make([]Kill, count)
	for i := range kills {
		longest := events * 6 / 10 / count
		kills[i] = Kill{
			Point: points[i%len(points)],
			After: longest*3/4 + rnd.IntN(longest/4),
			Wait:  time.Duration(rnd.Int64N(int64(15 * time.Millisecond))),
		}
	}
	return kills
}

// LastWords are what a consumer says in the moment before it kills itself: for how many messages work was done in the open
// transaction, or had just been committed.
type LastWords struct {
	Open, Committed int
}

// Trigger ends this process when its point has been passed often enough. It is safe for concurrent use.
type Trigger struct {
	say func(LastWords)

	mu   sync.Mutex
	kill Kill // After counts down
}

// NewTrigger makes one; say is called just before the end.
func NewTrigger(k Kill, say func(LastWords)) *Trigger { return &Trigger{kill: k, say: say} }

// Set changes when the process is to die. What was passed before does not count.
func (t *Trigger) Set(k Kill) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kill = k
}

// Line writes a line to the parent, at once: what a pipe holds survives its writer.
func Line(out io.Writer, line []byte) { _, _ = out.Write(append(line, '\n')) }

// Pass counts n passages of a point; it does not return from the last one. The process dies with words about what was open.
func (t *Trigger) Pass(p Point, n int, words LastWords) {
	t.mu.Lock()
	defer t.mu.Unlock() // not released by the last passage: nothing else is passed then
	if t.kill.Point != p {
		return
	}
	if t.kill.After -= n; t.kill.After > 0 {
		return
	}
	t.say(words)
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Kill() // SIGKILL: no deferred call runs, no connection is closed in an orderly way
	}
	fmt.Fprintln(os.Stderr, "cannot kill this process:", err)
	select {}
}

// KillingStore kills its process around COMMIT, and in the middle of a transaction for several messages. It is to be the
// only thing between the middleware and its store.
type KillingStore[T any] struct {
	receipts.Store[T]
	Trigger *Trigger
}

// Begin begins a transaction in which the process can die.
func (s KillingStore[T]) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
	tx, err := s.Store.Begin(ctx, opts)
	if err != nil {
		return nil, err
	}
	return &killingTx[T]{Tx: tx, trigger: s.Trigger}, nil
}

type killingTx[T any] struct {
	receipts.Tx[T]
	trigger *Trigger
	claimed int // messages that this transaction is for
	kept    int // of which so many are done
}

func (t *killingTx[T]) Claim(ctx context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results, err := t.Tx.Claim(ctx, claims)
	for _, r := range results {
		if r.Status == receipts.ClaimFresh {
			t.claimed++
		}
	}
	return results, err
}

func (t *killingTx[T]) Unclaim(ctx context.Context, claims []receipts.Claim) error {
	t.claimed -= len(claims)
	return t.Tx.Unclaim(ctx, claims)
}

// Keep is called between two messages, where there are several.
func (t *killingTx[T]) Keep(ctx context.Context) error {
	err := t.Tx.Keep(ctx)
	if t.kept++; err == nil && t.kept < t.claimed {
		t.trigger.Pass(MidBatch, 1, LastWords{Open: t.kept})
	}
	return err
}

func (t *killingTx[T]) Commit(ctx context.Context) error {
	t.trigger.Pass(BeforeCommit, t.claimed, LastWords{Open: t.claimed})
	err := t.Tx.Commit(ctx)
	if err == nil {
		t.trigger.Pass(AfterCommit, t.claimed, LastWords{Committed: t.claimed})
	}
	return err
}

// KillingDriver kills its process when a batch of settlements is about to be sent to the broker.
type KillingDriver struct {
	sdk.Driver
	Trigger *Trigger
}

// Open opens a source whose settlements may be the last thing the process thought of.
func (d KillingDriver) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	source, err := d.Driver.Open(ctx, b)
	if err != nil {
		return nil, err
	}
	if extender, ok := source.(sdk.LeaseExtender); ok {
		return killingLeaseSource{killingSource{source, d.Trigger}, extender}, nil
	}
	return killingSource{source, d.Trigger}, nil
}

type killingSource struct {
	sdk.Source
	trigger *Trigger
}

func (s killingSource) Settle(ctx context.Context, batch []sdk.Settlement) error {
	s.trigger.Pass(AckInFlight, len(batch), LastWords{Committed: len(batch)})
	return s.Source.Settle(ctx, batch)
}

type killingLeaseSource struct {
	killingSource
	sdk.LeaseExtender
}
