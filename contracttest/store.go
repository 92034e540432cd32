package contracttest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// RunStore checks the clauses for receipts stores, each in a subtest of its own on a database of its own: what
// [receipts.Store], [receipts.Tx] and, where the store has it, [receipts.Parker] promise to the middleware. It is for the
// author of a dialect or of another store; [RunTx] then checks middleware, store and broker together.
func RunStore[T any](t *testing.T, s StoreHarness[T]) {
	t.Helper()
	for _, c := range storeClauses[T]() {
		t.Run(c.ID, func(t *testing.T) { judge(t, examineStore(t, s, c)) })
	}
}

// ExamineStore checks the clauses for stores with these ids, all where there is none, like [RunStore], but leaves the
// judgement to the caller.
func ExamineStore[T any](t *testing.T, s StoreHarness[T], ids ...string) Report {
	t.Helper()
	return collectStore(s, ids, func(c storeClause[T]) Result { return examineStore(t, s, c) })
}

// CheckStore checks the clauses for stores in real time, outside of any test. It is to [RunStore] what [Check] is to [Run].
func CheckStore[T any](ctx context.Context, s StoreHarness[T]) Report {
	return collectStore(s, nil, func(c storeClause[T]) Result {
		if err := ctx.Err(); err != nil {
			return Result{ID: c.ID, Name: c.Name, Status: Failed, Reason: "not started: " + err.Error()}
		}
		return timed(func() Result { return runStoreClause(ctx, s, c, false) })
	})
}

// StoreClauses lists the clauses for stores, which [RunStore] checks, in the order of their ids. Their Check is nil, because
// it needs a store; Hooks are those of [StoreHarness]. The caller owns the slice.
func StoreClauses() []Clause {
	var all []Clause
	for _, c := range storeClauses[struct{}]() {
		all = append(all, c.Clause)
	}
	return all
}

// StoreClauseIDs lists the ids of the clauses for stores, in the order in which they run.
func StoreClauseIDs() []string {
	var ids []string
	for _, c := range storeClauses[struct{}]() {
		ids = append(ids, c.ID)
	}
	return ids
}

// storeClause is a clause about a receipts store alone. Its Hooks are those of the StoreHarness.
type storeClause[T any] struct {
	Clause
	check func(ctx context.Context, e *storeEnv[T]) error
}

// storeClauses lists the clauses for stores in the order of their ids.
func storeClauses[T any]() []storeClause[T] {
	all := slices.Concat(
		schemaClauses[T](), claimClauses[T](), meetingClauses[T](), receiptIdentityClauses[T](), partClauses[T](), endingClauses[T](),
		storedClauses[T](), budgetClauses[T](), brokenClauses[T](), parkerClauses[T](), crowdClauses[T](),
	)
	slices.SortStableFunc(all, func(a, b storeClause[T]) int { return strings.Compare(a.ID, b.ID) })
	return all
}

func collectStore[T any](s StoreHarness[T], ids []string, one func(storeClause[T]) Result) Report {
	rep := Report{Harness: s.Name}
	start := time.Now()
	for _, c := range storeClauses[T]() {
		if len(ids) == 0 || slices.Contains(ids, c.ID) {
			rep.Results = append(rep.Results, one(c))
		}
	}
	rep.Duration = time.Since(start)
	return rep
}

func examineStore[T any](t *testing.T, s StoreHarness[T], c storeClause[T]) Result {
	t.Helper()
	return timed(func() (res Result) {
		if !s.Bubble {
			return runStoreClause(t.Context(), s, c, false)
		}
		synctest.Test(t, func(t *testing.T) { res = runStoreClause(t.Context(), s, c, true) })
		return res
	})
}

// runStoreClause runs one clause on a database of its own.
func runStoreClause[T any](ctx context.Context, s StoreHarness[T], c storeClause[T], bubbled bool) Result {
	res := Result{ID: c.ID, Name: c.Name}
	missing, err := "", s.check()
	if err == nil {
		missing = s.lacksHooks(c.Hooks)
	}
	if missing == "" && err == nil {
		res.Notes, missing, err = checkStore(ctx, s, c, bubbled)
	}
	res.Status, res.Reason = verdict(missing, err, s.Waive[c.ID])
	return res
}

// checkStore makes the environment, runs the clause and cleans up.
func checkStore[T any](
	ctx context.Context, s StoreHarness[T], c storeClause[T], bubbled bool,
) (notes []string, missing string, err error) {
	h := Harness{Name: s.Name, Bubble: bubbled, Patience: s.Patience}
	if h.Patience <= 0 {
		h.Patience = inBubble(bubbled, time.Minute, 10*time.Second)
	}
	dir, err := os.MkdirTemp("", "penstock")
	if err != nil {
		return nil, "", fmt.Errorf("making a directory for the database: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	e := newEnv(h, c.ID)
	clause := c.Clause
	clause.Check = func(ctx context.Context, e *Env) error {
		store, err := newStoreEnv(ctx, e, s, dir)
		if err != nil {
			return err
		}
		if missing = store.lacks(c.Capability); missing != "" {
			return nil
		}
		return c.check(ctx, store)
	}
	err = e.guarded(ctx, clause)
	return e.noted(), missing, err
}

// The capabilities of stores that clauses need. Those of drivers are others.
const (
	// capabilityParts: Info.Parts, one message's work can be undone alone.
	capabilityParts = "parts"
	// capabilityParker: the store is a receipts.Parker.
	capabilityParker = "parker"
)

// storeEnv is what one run of a clause works with: two independent handles on one database, as two processes have them,
// through which the clause acts, and a third one to look at what they did, without planted faults.
type storeEnv[T any] struct {
	*Env
	s     StoreHarness[T]
	dir   string
	a, b  receipts.Store[T]
	look  Database[T]
	info  receipts.Info
	scope string
}

// newStoreEnv opens the handles. What it opened ends with the Env.
func newStoreEnv[T any](ctx context.Context, e *Env, s StoreHarness[T], dir string) (*storeEnv[T], error) {
	env := &storeEnv[T]{Env: e, s: s, dir: dir, scope: e.fresh("scope")}
	var dbs [3]Database[T]
	for i := range dbs {
		db, err := s.Open(ctx, dir)
		if err != nil {
			return nil, fmt.Errorf("opening the database: %w", err)
		}
		e.atEnd(db.Close)
		dbs[i] = db
	}
	env.a, env.b, env.look = env.wrapped(dbs[0].Store), env.wrapped(dbs[1].Store), dbs[2]
	var err error
	if env.info, err = env.a.Check(ctx); err != nil {
		return nil, fmt.Errorf("checking a handle whose tables are there: %w", err)
	}
	return env, nil
}

func (e *storeEnv[T]) wrapped(s receipts.Store[T]) receipts.Store[T] {
	if e.s.Wrap != nil {
		return e.s.Wrap(s)
	}
	return s
}

// lanes tells whether two transactions can be open at a time.
func (e *storeEnv[T]) lanes() bool { return e.info.Lanes > 1 }

// lacks tells why the clause cannot run; empty: it can.
func (e *storeEnv[T]) lacks(capability string) string {
	switch capability {
	case capabilityLanes:
		if !e.lanes() {
			return "capability lanes is not declared: the store has a single writer"
		}
	case capabilityParts:
		if !e.info.Parts {
			return "capability parts is not declared: Info.Parts is false"
		}
	case capabilityParker:
		if _, ok := e.a.(receipts.Parker); !ok {
			return "capability parker is not there: the store does not implement receipts.Parker"
		}
	}
	return ""
}
