package receipts

import (
	"context"
	"database/sql"
	"errors"
	"strings"
)

// pgFlow sends the steps of one transaction over database/sql.
type pgFlow struct {
	t     *sqlTx
	s     *Postgres
	steps *PostgresSteps
	opts  TxOptions
}

func (s *Postgres) flow(t *sqlTx, opts TxOptions) sqlFlow {
	return &pgFlow{t: t, s: s, steps: newSteps(s.q, t.nonce, opts), opts: opts}
}

// ready has nothing to do: BEGIN says all.
func (f *pgFlow) ready(context.Context) error { return nil }

// open sends values where the client prepares by itself, because to plan this statement takes longer than to answer it; else text
// without values: with them lib/pq needs two round trips.
func (f *pgFlow) open(ctx context.Context) error {
	bounds := f.steps.Bounds()
	if f.s.prepares {
		_, err := f.t.tx.ExecContext(ctx, bounds.SQL, bounds.text()...)
		return err
	}
	var pairs []string
	for i, name := range [...]string{"$1", "$2", "$3"} {
		value, _ := bounds.Args[i].(string) // hexadecimal or a number
		pairs = append(pairs, name, "'"+value+"'")
	}
	_, err := f.t.tx.ExecContext(ctx, strings.NewReplacer(pairs...).Replace(bounds.SQL))
	return err
}

// claim waits for others no longer than ClaimWait and ctx's deadline say, which the server ends. Only a ctx that is cancelled,
// or a server that does not answer, cuts the statement off, and the connection with it.
func (f *pgFlow) claim(ctx context.Context, claims []Claim) ([]ClaimResult, error) {
	call, inserts, err := f.steps.Claim(claims, lockWait(ctx, f.opts.ClaimWait))
	if err != nil {
		return nil, err
	}
	late, stop := lateContext(ctx)
	defer stop()
	for n, insert := range inserts {
		row := f.t.tx.QueryRowContext(late, insert.SQL, insert.text()...)
		if err := call.Inserted(n, row.Scan); err != nil {
			return nil, f.waited(ctx, err)
		}
	}
	for n, look := range call.Looks() {
		rows, err := f.t.tx.QueryContext(late, look.SQL, look.text()...)
		err = eachRow(rows, err, func(scan scanFunc) error { return call.Found(n, scan) })
		if err != nil {
			return nil, f.waited(ctx, err)
		}
	}
	return call.Results()
}

// waited says what it means that a claim was cut off. By the server, or by whoever cancelled it, it waited for others: it does
// nothing else for long. A server that says nothing until the deadline, although the wait for others was to end before, does
// not work.
func (f *pgFlow) waited(ctx context.Context, err error) error {
	code, answered := sqlState(err)
	switch {
	case f.t.isExpired(), answered && code != pgQueryCanceled, ctx.Err() == nil && !answered:
		return err
	case !answered && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &classedError{class: ClassOutage, what: "waiting for the server's answer to a claim", err: err}
	default:
		return &classedError{class: ClassContention, what: "waiting for other transactions", err: err}
	}
}

// lateContext is ctx with a later deadline, for a statement that the server ends before.
func lateContext(ctx context.Context) (late context.Context, stop func()) {
	if ctx.Done() == nil {
		return ctx, func() {}
	}
	var cancel context.CancelFunc
	if deadline, bounded := ctx.Deadline(); bounded {
		late, cancel = context.WithDeadline(context.WithoutCancel(ctx), deadline.Add(lateGrace))
	} else {
		late, cancel = context.WithCancel(context.WithoutCancel(ctx))
	}
	unwatch := context.AfterFunc(ctx, func() {
		if ctx.Err() == context.Canceled {
			cancel()
		}
	})
	return late, func() { unwatch(); cancel() }
}

func (f *pgFlow) unclaim(ctx context.Context, claims []Claim) error {
	for _, s := range f.steps.Unclaim(claims) {
		result, err := f.exec(ctx, s)
		if err != nil {
			return err
		}
		n, err := result.RowsAffected()
		if err != nil {
			return err
		}
		f.steps.Unclaimed(n)
	}
	return nil
}

func (f *pgFlow) lend() error {
	f.steps.Lend()
	return nil
}

func (f *pgFlow) keep() (statements []string, next bool) {
	return []string{"RELEASE SAVEPOINT " + f.t.s.part}, false
}

func (f *pgFlow) undo() (statements []string, next bool) {
	return []string{"ROLLBACK TO SAVEPOINT " + f.t.s.part, "RELEASE SAVEPOINT " + f.t.s.part}, false
}

func (f *pgFlow) addOutputs(ctx context.Context, outputs []Output) error {
	_, statement, err := f.steps.Outputs(outputs)
	if err != nil {
		return err
	}
	return f.all(ctx, statement, len(outputs))
}

func (f *pgFlow) divert(ctx context.Context, letters []DeadLetter) error {
	statement, err := f.steps.Divert(letters)
	if err != nil {
		return err
	}
	_, err = f.exec(ctx, statement)
	return err
}

// all runs a statement that inserts n rows, unless the transaction is another one.
func (f *pgFlow) all(ctx context.Context, s Statement, n int) error {
	result, err := f.exec(ctx, s)
	if err != nil {
		return err
	}
	if rows, err := result.RowsAffected(); err != nil || int(rows) == n {
		return err
	}
	return ErrTxEnded
}

func (f *pgFlow) seal(ctx context.Context) error {
	statement, needed := f.steps.Seal()
	if !needed {
		return nil
	}
	_, err := f.exec(ctx, statement)
	return f.steps.SealError(err)
}

func (f *pgFlow) exec(ctx context.Context, s Statement) (sql.Result, error) {
	return f.t.tx.ExecContext(ctx, s.SQL, s.text()...)
}

// clean has nothing to do: the settings were the transaction's.
func (f *pgFlow) clean(context.Context) error { return nil }

func (f *pgFlow) session() session {
	pid, started, _ := f.steps.Session()
	return session{id: pid, started: started}
}
