package memstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// The model: every transaction is a list of what it did, and a row is locked if any other list has it. Nobody waits here:
// a wait is over after a nanosecond.

type step struct{ what, key string } // what: claim, add, divert

type modelTx struct {
	real   receipts.Tx[*Tx]
	steps  []step
	part   []step // nil outside a part
	open   bool
	failed string // where: "", "part" or "all"
}

type model struct {
	t     *rapid.T
	store *Store
	db    *Database
	txs   []*modelTx

	counters map[string]int64
	done     map[string]bool // receipt → whole
	letters  map[string]bool
}

// locked tells whether another open transaction has the row.
func (m *model) locked(by *modelTx, s step) bool {
	return slices.ContainsFunc(m.txs, func(o *modelTx) bool {
		return o != by && o.open && slices.Contains(o.locks(), s)
	})
}

// locks are the rows of a transaction: what it gave back is locked, too.
func (x *modelTx) locks() []step {
	var rows []step
	for _, s := range append(slices.Clone(x.steps), x.part...) {
		if s.what == "unclaim" {
			s.what = "claim"
		}
		rows = append(rows, s)
	}
	return rows
}

func (x *modelTx) has(s step) bool {
	return slices.Contains(append(slices.Clone(x.steps), x.part...), s)
}

func (x *modelTx) do(s step) {
	if x.part != nil {
		x.part = append(x.part, s)
		return
	}
	x.steps = append(x.steps, s)
}

func (x *modelTx) fail() {
	if x.part != nil {
		x.failed, x.part = "part", []step{}
		return
	}
	x.failed, x.steps = "all", nil
}

// claims are the receipts that it would commit.
func (x *modelTx) claims() map[string]bool {
	found := map[string]bool{}
	for _, s := range x.steps {
		switch s.what {
		case "claim":
			found[s.key] = true
		case "unclaim":
			delete(found, s.key)
		}
	}
	return found
}

func (m *model) commit(x *modelTx, whole bool) {
	for key := range x.claims() {
		m.done[key] = whole
	}
	for _, s := range append(x.steps, x.part...) {
		switch s.what {
		case "add":
			m.counters[s.key]++
		case "divert":
			m.letters[s.key] = true
		}
	}
	x.open = false
}

// pick chooses a transaction that may have ended already.
func (m *model) pick() *modelTx {
	if len(m.txs) == 0 {
		m.begin()
	}
	return m.txs[max(0, len(m.txs)-1-rapid.IntRange(0, 3).Draw(m.t, "tx"))]
}

func (m *model) begin() {
	tx, err := m.store.Begin(context.Background(), receipts.TxOptions{ClaimWait: 1})
	require.NoError(m.t, err)
	m.txs = append(m.txs, &modelTx{real: tx, open: true})
}

func (m *model) key() string { return rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(m.t, "key") }

// writable tells what every statement has to answer before it does anything; nil where it works.
func (x *modelTx) writable() error {
	if !x.open || x.failed != "" {
		return receipts.ErrTxEnded
	}
	return nil
}

func (m *model) wants(want, err error, what string) {
	if want == nil {
		require.NoError(m.t, err, what)
		return
	}
	require.ErrorIs(m.t, err, want, what)
}

func (m *model) claim() {
	x := m.pick()
	keys := rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 1, 3, rapid.ID).Draw(m.t, "keys")
	results, err := x.real.Claim(context.Background(), claimsOf(keys...))
	if want := x.writable(); want != nil || x.part != nil {
		require.Error(m.t, err)
		m.wants(want, errOr(want, err), "claim")
		return
	}
	wants := map[string]receipts.ClaimStatus{}
	for _, key := range slices.Sorted(slices.Values(keys)) {
		row := step{"claim", key}
		want := fresh
		whole, there := m.done[key]
		switch {
		case x.claims()[key]:
			want = held
		case there && whole:
			want = held
		case there:
			want = torn
		case m.locked(x, row):
			require.ErrorIs(m.t, err, ErrBusy)
			x.fail()
			return
		default:
			x.do(row)
		}
		wants[key] = want
	}
	require.NoError(m.t, err)
	for i, key := range keys {
		assert.Equal(m.t, wants[key], results[i].Status, key)
	}
}

// errOr keeps an error out of a comparison with nil.
func errOr(want, err error) error {
	if want == nil {
		return nil
	}
	return err
}

func (m *model) unclaim() {
	x, key := m.pick(), m.key()
	err := x.real.Unclaim(context.Background(), claimsOf(key))
	if want := x.writable(); want != nil || x.part != nil {
		require.Error(m.t, err)
		return
	}
	require.NoError(m.t, err)
	if x.claims()[key] {
		x.do(step{"unclaim", key})
	}
}

func (m *model) add() {
	x, row := m.pick(), step{"add", m.key()}
	err := x.real.Raw().Add(row.key, 1)
	switch {
	case !x.open:
		require.ErrorIs(m.t, err, ErrEnded)
	case x.failed != "":
		require.ErrorIs(m.t, err, ErrFailed)
	case m.locked(x, row):
		require.ErrorIs(m.t, err, ErrBusy)
		x.fail()
	default:
		require.NoError(m.t, err)
		x.do(row)
	}
}

func (m *model) divert() {
	x, row := m.pick(), step{"divert", m.key()}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	err := x.real.Divert(ctx, []receipts.DeadLetter{{Scope: "s", Key: []byte(row.key), Kind: receipts.KindTorn}})
	switch want := x.writable(); {
	case want != nil:
		require.ErrorIs(m.t, err, want)
	case errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrBusy): // a busy machine: it had not begun
	case m.letters[row.key]:
		require.NoError(m.t, err)
	case m.locked(x, row):
		require.ErrorIs(m.t, err, ErrBusy)
		x.fail()
	default:
		require.NoError(m.t, err)
		if !x.has(row) {
			x.do(row)
		}
	}
}

func (m *model) beginPart() {
	x := m.pick()
	err := x.real.Part(context.Background())
	if want := x.writable(); want != nil || x.part != nil {
		require.Error(m.t, err)
		return
	}
	require.NoError(m.t, err)
	x.part = []step{}
}

func (m *model) keep() {
	x := m.pick()
	err := x.real.Keep(context.Background())
	if want := x.writable(); want != nil || x.part == nil {
		require.Error(m.t, err)
		return
	}
	require.NoError(m.t, err)
	x.steps, x.part = append(x.steps, x.part...), nil
}

func (m *model) undo() {
	x := m.pick()
	err := x.real.Undo(context.Background())
	if !x.open || x.part == nil || x.failed == "all" {
		require.Error(m.t, err)
		return
	}
	require.NoError(m.t, err)
	x.failed, x.part = "", nil
}

func (m *model) end() {
	x := m.pick()
	how := rapid.SampledFrom([]string{"commit", "commit", "roll back", "handler commits", "handler rolls back"}).Draw(m.t, "end")
	switch how {
	case "commit":
		err := x.real.Commit(context.Background())
		if x.writable() != nil {
			require.ErrorIs(m.t, err, receipts.ErrTxEnded)
			x.open = false
			return
		}
		if x.part != nil {
			require.Error(m.t, err)
			x.open = false
			return
		}
		require.NoError(m.t, err)
		m.commit(x, true)
	case "handler commits":
		err := x.real.Raw().Commit()
		if x.writable() != nil {
			require.Error(m.t, err)
			x.open = false
			return
		}
		require.NoError(m.t, err)
		m.commit(x, false)
	case "handler rolls back":
		err := x.real.Raw().Rollback()
		assert.Equal(m.t, x.open, err == nil)
		x.open = false
	default:
		require.NoError(m.t, x.real.Rollback(context.Background()))
		x.open = false
	}
}

// check compares what is committed.
func (m *model) check(*rapid.T) {
	assert.Equal(m.t, m.counters, m.db.Counters())
	stats, err := m.store.Stats(context.Background())
	require.NoError(m.t, err)
	whole := 0
	for _, w := range m.done {
		if w {
			whole++
		}
	}
	assert.Equal(m.t, [3]int{whole, len(m.done) - whole, len(m.letters)}, [3]int{stats.Done, stats.Torn, stats.DeadLetters[receipts.KindTorn]})
	if !slices.ContainsFunc(m.txs, func(x *modelTx) bool { return x.open }) {
		assert.Empty(m.t, m.db.locks)
	}
}

func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		db := NewDatabaseWith(Options{LockWait: 1})
		m := &model{t: rt, db: db, store: db.Store(), counters: map[string]int64{}, done: map[string]bool{}, letters: map[string]bool{}}
		action := func(f func()) func(*rapid.T) { return func(*rapid.T) { f() } }
		rt.Repeat(map[string]func(*rapid.T){
			"":      m.check,
			"begin": action(m.begin), "claim": action(m.claim), "unclaim": action(m.unclaim), "add": action(m.add),
			"divert": action(m.divert), "part": action(m.beginPart), "keep": action(m.keep), "undo": action(m.undo), "end": action(m.end),
		})
	})
}

// Many at a time: whatever they run into, effects, receipts and parts belong together.
func TestManyAtATime(t *testing.T) {
	for name, opts := range map[string]Options{
		"usual": {LockWait: 20 * time.Millisecond}, "one writer": {Serial: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := NewDatabaseWith(opts)
			s := db.Store()
			const workers, each, identities = 8, 300, 400
			var busy atomic.Int64
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					random := rand.New(rand.NewPCG(1, uint64(w)))
					for range each {
						err := oneBatch(s, []int{random.IntN(identities), random.IntN(identities), random.IntN(identities)})
						if errors.Is(err, ErrBusy) {
							busy.Add(1)
						} else if err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			t.Logf("met contention: %d", busy.Load())
			counters := db.Counters()
			done := int64(stats(t, s).Done)
			var sum, shared int64
			for key, n := range counters {
				if strings.HasPrefix(key, "shared") {
					shared += n
					continue
				}
				assert.LessOrEqual(t, n, int64(1), key)
				sum += n
			}
			assert.Equal(t, [2]int64{done, done}, [2]int64{sum, shared}, "two effects for each receipt")
			assert.NotZero(t, done)
			assert.Zero(t, stats(t, s).Torn)
			assert.Empty(t, db.locks)
		})
	}
}

// oneBatch is what the middleware does: a claim of many, and a part for each fresh one, of which some fail.
func oneBatch(s *Store, identities []int) error {
	slices.Sort(identities)
	keys := make([]string, 0, len(identities))
	for _, i := range slices.Compact(identities) {
		keys = append(keys, fmt.Sprint(i))
	}
	ctx := context.Background()
	tx, err := s.Begin(ctx, receipts.TxOptions{ClaimWait: 20 * time.Millisecond, Budget: 10 * time.Second})
	if err != nil {
		return err
	}
	results, err := tx.Claim(ctx, claimsOf(keys...))
	if err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	// The effects in another order than the claims: rows are locked crosswise.
	for i, r := range slices.Backward(results) {
		if r.Status != fresh {
			continue
		}
		err := errors.Join(tx.Part(ctx), tx.Raw().Add(keys[i], 1))
		runtime.Gosched()
		err = errors.Join(err, tx.Raw().Add("shared"+keys[i][len(keys[i])-1:], 1))
		switch {
		case err != nil:
			return errors.Join(err, tx.Rollback(ctx))
		case len(keys[i])%2 == 0 && i == 0:
			err = errors.Join(tx.Undo(ctx), tx.Unclaim(ctx, claimsOf(keys[i])))
		default:
			err = tx.Keep(ctx)
		}
		if err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
	}
	return tx.Commit(ctx)
}

// The counters that Counters gives are the caller's.
func TestCountersAreACopy(t *testing.T) {
	db := NewDatabase()
	tx := begin(t, db.Store())
	require.NoError(t, tx.Raw().Add("n", 1))
	commit(t, tx)
	counters := db.Counters()
	maps.DeleteFunc(counters, func(string, int64) bool { return true })
	assert.Equal(t, map[string]int64{"n": 1}, db.Counters())
}

// A transaction with one claim and one counter, on a database that already holds many.
func BenchmarkTransaction(b *testing.B) {
	for _, size := range []int{0, 100_000} {
		b.Run(fmt.Sprintf("receipts=%d", size), func(b *testing.B) {
			s := NewDatabase().Store()
			n := 0
			one := func() {
				n++
				tx, err := s.Begin(b.Context(), receipts.TxOptions{})
				if err == nil {
					_, err = tx.Claim(b.Context(), claimsOf(fmt.Sprint(n)))
				}
				if err = errors.Join(err, tx.Raw().Add("n", 1), tx.Commit(b.Context())); err != nil {
					b.Fatal(err)
				}
			}
			for range size {
				one()
			}
			b.ReportAllocs()
			for b.Loop() {
				one()
			}
		})
	}
}
