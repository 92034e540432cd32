package contracttest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// StoreHarness connects the clauses for stores, which [RunStore] checks, and the transaction clauses, which [RunTx] checks,
// to one receipts store and its database. Name, Open and Apply are required; each further hook lets more clauses run.
type StoreHarness[T any] struct {
	// Name is the name in reports, and what a child process finds its harness by.
	Name string
	// Open gives an independent handle on the database kept in dir: the same database for the same dir, in this process
	// and in any other, with its tables there. The suite closes it.
	Open func(ctx context.Context, dir string) (Database[T], error)
	// Apply adds to a named counter inside the transaction: the effect whose number of times is counted.
	Apply func(ctx context.Context, tx T, counter string, by int64) error
	// Read gives a counter's value inside the transaction, 0 where there is none, as an application reads what it is about to
	// write: what was read stays true until the transaction ends, so it locks the row where the database does not do so by
	// itself.
	Read func(ctx context.Context, tx T, counter string) (int64, error)
	// End ends the transaction as a handler must not: see [Ending]. It returns the database's error.
	End func(ctx context.Context, tx T, how Ending) error
	// Endings are the ways that End knows beyond commit, rollback and text.
	Endings []Ending
	// Violate executes a statement that violates a constraint, and returns the database's error.
	Violate func(ctx context.Context, tx T) error
	// Errors execute statements, by name, whose errors leave the transaction in another state than a handler thinks that
	// swallows them: it is over, or takes nothing but a rollback. They return the database's error.
	Errors map[string]func(ctx context.Context, tx T) error
	// OpenFaulty is like Open, through connections that fail on request.
	OpenFaulty func(ctx context.Context, dir string) (Database[T], DatabaseFaults, error)
	// Wrap is put around every store the clauses consume with. It is how faults are planted; nil plants none.
	Wrap func(receipts.Store[T]) receipts.Store[T]
	// Empty is like Open, on a database of its own for each dir that nobody has made the store's tables in.
	Empty func(ctx context.Context, dir string) (Database[T], error)
	// Newer makes of dir's tables what the next version of the store would, which this one can still run on.
	Newer func(ctx context.Context, dir string) error
	// Limited is like Open, as a role that has the rights that the store asks for and no others: it may not make or change
	// tables. They are there.
	Limited func(ctx context.Context, dir string) (Database[T], error)
	// Kill ends the session in which a transaction is open from outside, as an administrator does, and returns when it is
	// gone. It uses the transaction, if at all, before that only.
	Kill func(ctx context.Context, tx T) error
	// Bubble says that the database lives in this process and does no I/O: [RunStore] runs each clause in a bubble of
	// testing/synctest, where waiting costs nothing.
	Bubble bool
	// Patience is the longest wait of a clause for stores for what has to come. 0 means 10 s, in a bubble 1 min.
	Patience time.Duration
	// Waive names clauses that this store is known to break, each with the reason. They still run, and have to fail.
	Waive map[string]string
}

// Database is one handle on a store's database.
type Database[T any] struct {
	Store receipts.Store[T]
	// Effects reads the committed value of every counter.
	Effects func(ctx context.Context) (map[string]int64, error)
	// Close closes the handle.
	Close func() error
}

// Ending is a way in which a handler can end a transaction that is not its own.
type Ending string

// The endings.
const (
	// EndCommit calls the transaction's own Commit.
	EndCommit Ending = "commit"
	// EndRollback calls its Rollback.
	EndRollback Ending = "rollback"
	// EndText executes COMMIT as a statement, behind the back of the transaction object.
	EndText Ending = "text"
	// EndImplicit executes a statement that commits by itself, as DDL does on MySQL. Only harnesses that list it in Endings have
	// to know it.
	EndImplicit Ending = "implicit"
)

// DatabaseFaults makes connections fail on request. Each func is optional; a part of a clause whose func is nil is left
// out, and the report's notes say so. fired tells how often the fault has hit since it was switched on.
type DatabaseFaults struct {
	// LoseCommit makes the next COMMIT's answer be lost: before it is forwarded (nothing is committed) or after
	// (everything is). asBadConn: the client sees driver.ErrBadConn, else an error without a code.
	LoseCommit func(forwarded, asBadConn bool) (fired func() int)
	// Outages are states in which the database does not work, by name: stopped, read-only, full, pool exhausted. Each
	// lasts until end is called, which may be called more than once.
	Outages map[string]func(ctx context.Context) (end func(), fired func() int, err error)
	// Budget is the transaction budget under which outages are met: longer than the database takes to say, or to show by its
	// end, that it does not work, because what takes longer than the budget is charged to the message. 0 means 1 s.
	Budget time.Duration
}

// RunTx checks the transaction clauses over a broker and a store, each in a subtest of its own. Clauses that kill
// processes start this test binary again: call [TxChild] first in TestMain, else they are not run.
func RunTx[T any](t *testing.T, h Harness, s StoreHarness[T]) {
	t.Helper()
	for _, c := range txClauses[T]() {
		t.Run(c.ID, func(t *testing.T) { judge(t, examineTx(t, h, s, c)) })
	}
}

// ExamineTx checks the transaction clauses with these ids, all where there is none, like [RunTx], but leaves the judgement
// to the caller.
func ExamineTx[T any](t *testing.T, h Harness, s StoreHarness[T], ids ...string) Report {
	t.Helper()
	return collectTx(h, s, ids, func(c txClause[T]) Result { return examineTx(t, h, s, c) })
}

// CheckTx checks the transaction clauses in real time, outside of any test. It is to [RunTx] what [Check] is to [Run].
func CheckTx[T any](ctx context.Context, h Harness, s StoreHarness[T]) Report {
	return collectTx(h, s, nil, func(c txClause[T]) Result {
		if err := ctx.Err(); err != nil {
			return Result{ID: c.ID, Name: c.Name, Status: Failed, Reason: "not started: " + err.Error()}
		}
		return timed(func() Result { return runTxClause(ctx, h, s, c, false) })
	})
}

// TxClauseIDs lists the ids of the transaction clauses, in the order in which they run, those that kill processes
// included.
func TxClauseIDs() []string {
	var ids []string
	for _, c := range txClauses[struct{}]() {
		ids = append(ids, c.ID)
	}
	return ids
}

// txClause is a clause about middleware, store and driver together.
type txClause[T any] struct {
	Clause
	// processes: it starts child processes, so it runs in real time.
	processes bool
	// realTime: it is not run in a bubble although it starts no process.
	realTime bool
	// store names the hooks of the StoreHarness that it needs.
	store []string
	check func(ctx context.Context, e *txEnv[T]) error
}

// txClauses lists the transaction clauses in the order of their ids.
func txClauses[T any]() []txClause[T] {
	all := slices.Concat(
		crashClauses[T](), identityClauses[T](), failureClauses[T](), outputClauses[T](), pathClauses[T](),
		shutdownClauses[T](), outageClauses[T](), modeClauses[T](), interopClauses[T](),
		batchClauses[T](), duplicateClauses[T](), contentionClauses[T](), swallowClauses[T](), blockedClauses[T](), orderKeyClauses[T](),
		upgradeClauses[T](),
	)
	slices.SortStableFunc(all, func(a, b txClause[T]) int { return strings.Compare(a.ID, b.ID) })
	return all
}

func collectTx[T any](h Harness, s StoreHarness[T], ids []string, one func(txClause[T]) Result) Report {
	rep := Report{Harness: h.Name + " × " + s.Name}
	start := time.Now()
	for _, c := range txClauses[T]() {
		if len(ids) == 0 || slices.Contains(ids, c.ID) {
			rep.Results = append(rep.Results, one(c))
		}
	}
	rep.Duration = time.Since(start)
	return rep
}

func examineTx[T any](t *testing.T, h Harness, s StoreHarness[T], c txClause[T]) Result {
	t.Helper()
	return timed(func() (res Result) {
		if !h.Bubble || c.processes || c.realTime {
			return runTxClause(t.Context(), h, s, c, false)
		}
		synctest.Test(t, func(t *testing.T) { res = runTxClause(t.Context(), h, s, c, true) })
		return res
	})
}

func timed(f func() Result) Result {
	start := time.Now()
	res := f()
	res.Duration = time.Since(start)
	return res
}

// runTxClause runs one clause on a broker and a database of its own.
func runTxClause[T any](ctx context.Context, h Harness, s StoreHarness[T], c txClause[T], bubbled bool) Result {
	res := Result{ID: c.ID, Name: c.Name}
	missing, err := s.missing(c)
	if missing == "" && err == nil {
		res.Notes, missing, err = checkTx(ctx, h, s, c, bubbled)
	}
	res.Status, res.Reason = verdict(missing, err, s.Waive[c.ID])
	return res
}

// checkTx makes the environment, runs the clause and cleans up.
func checkTx[T any](
	ctx context.Context, h Harness, s StoreHarness[T], c txClause[T], bubbled bool,
) (notes []string, missing string, err error) {
	used, err := h.begin(bubbled)
	if err != nil {
		return nil, "", err
	}
	dir, err := os.MkdirTemp("", "penstock")
	if err != nil {
		return nil, "", fmt.Errorf("making a directory for the database: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	e := newEnv(used, c.ID)
	c.Check = func(ctx context.Context, e *Env) error {
		tx, err := newTxEnv(ctx, e, s, dir)
		if err != nil {
			return err
		}
		return c.check(ctx, tx)
	}
	missing, err = lacks(ctx, e, s, dir, c.Clause)
	if err == nil && missing == "" {
		err = e.guarded(ctx, c.Clause)
	}
	return e.noted(), missing, err
}

// lacks names the capability, of the driver or of the store, or the hooks that the clause lacks; empty: it can run.
func lacks[T any](ctx context.Context, e *Env, s StoreHarness[T], dir string, c Clause) (string, error) {
	if c.Capability != capabilityLanes {
		return e.missing(ctx, c)
	}
	db, err := s.Open(ctx, dir)
	if err != nil {
		return "", fmt.Errorf("opening the database: %w", err)
	}
	missing, err := lanesLack(ctx, db.Store)
	return missing, errors.Join(err, db.Close())
}

// endings are the ways in which a handler ends a transaction.
func (s StoreHarness[T]) endings() []Ending {
	return append([]Ending{EndCommit, EndRollback, EndText}, s.Endings...)
}

// check refuses a harness that lacks what is required, and waivers of clauses that do not exist.
func (s StoreHarness[T]) check() error {
	if s.Open == nil || s.Apply == nil || s.Name == "" {
		return errors.New("the store harness lacks Name, Open or Apply: they are required")
	}
	for id := range s.Waive {
		if !slices.Contains(TxClauseIDs(), id) && !slices.Contains(StoreClauseIDs(), id) {
			return fmt.Errorf("store harness %q waives %s: there is no such clause", s.Name, id)
		}
	}
	return nil
}

// lacksHooks names those of the hooks that are not there; empty: all are.
func (s StoreHarness[T]) lacksHooks(wanted []string) string {
	there := map[string]bool{
		"End": s.End != nil, "OpenFaulty": s.OpenFaulty != nil, "Errors": len(s.Errors) > 0, "Read": s.Read != nil,
		"Violate": s.Violate != nil, "Empty": s.Empty != nil, "Kill": s.Kill != nil, "Newer": s.Newer != nil, "Limited": s.Limited != nil,
	}
	var hooks []string
	for _, name := range wanted {
		if !there[name] {
			hooks = append(hooks, name)
		}
	}
	if len(hooks) == 0 {
		return ""
	}
	return "the store harness has no hook " + strings.Join(hooks, ", ")
}

// missing names the hooks that the clause lacks; empty: it can run.
func (s StoreHarness[T]) missing(c txClause[T]) (string, error) {
	if err := s.check(); err != nil {
		return "", err
	}
	hooks := s.lacksHooks(c.store)
	switch {
	case hooks != "":
		return hooks, nil
	case c.processes && runtime.GOOS == "windows":
		return "there is no SIGKILL on this system", nil
	case c.processes && !childReady():
		return "TestMain does not call TxChild, so no child process can be started", nil
	default:
		return "", nil
	}
}
