package receipts

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Statement is SQL text for PostgreSQL with the values of $1, $2 …: []byte, string, int, int64, [][]byte, []string and
// []int64, which stand for an array each.
type Statement struct {
	SQL  string
	Args []any
}

// PostgresSteps are the statements of one transaction of the store, and what their answers mean. They send nothing: they are
// for stores that speak to PostgreSQL through another client than database/sql, as pgxstore does, and share the tables with
// [Postgres]. The order is that of [Tx]. One goroutine at a time may use it, [PostgresSteps.Session] any.
type PostgresSteps struct {
	q     *pgQueries
	nonce Nonce
	guard string // the nonce as the transaction's setting keeps it
	opts  TxOptions

	fresh     freshClaims
	positions int
	// changed is what pgChanged has to be at the end. recount: a handler had the transaction before a claim, and may have
	// undone it with a savepoint, so that the receipts have to be counted.
	changed       int64
	lent, recount bool

	pid, started atomic.Int64
}

// Steps makes the statements of a new transaction.
func (s *Postgres) Steps(opts TxOptions) *PostgresSteps { return newSteps(s.q, NewNonce(), opts) }

func newSteps(q *pgQueries, nonce Nonce, opts TxOptions) *PostgresSteps {
	return &PostgresSteps{q: q, nonce: nonce, guard: nonce.String(), opts: opts}
}

// Nonce names the transaction.
func (p *PostgresSteps) Nonce() Nonce { return p.nonce }

// pgGrace is how much later than the client the server ends a transaction that stands still.
const pgGrace = time.Second

// Bounds is sent right after BEGIN, at READ COMMITTED: it names the transaction, and bounds it by the budget. Its row is of no
// interest.
func (p *PostgresSteps) Bounds() Statement {
	statement, idle := "0", "0"
	if b := p.opts.Budget; b > 0 {
		statement, idle = millis(b), millis(b+pgGrace)
	}
	return Statement{p.q.bounds, []any{p.guard, statement, idle}}
}

// millis gives a duration as the server's timeouts want it: at least 1.
func millis(d time.Duration) string {
	const most = 1<<31 - 1
	return strconv.FormatInt(min(max(1, d.Milliseconds()), most), 10)
}

// Lend is told that a handler gets the transaction.
func (p *PostgresSteps) Lend() { p.lent = true }

// PostgresClaims are the statements of one call of Claim: first all of Inserts, each of which gives one row, for Inserted;
// then, where Looks gives any, those, each row of which is for Found. Results is what they add up to.
type PostgresClaims struct {
	p       *PostgresSteps
	claims  []Claim
	order   []int
	runs    []claimsRun
	results []ClaimResult
	earlier earlier
}

// claimsRun are claims of one scope and state, by their place in the order.
type claimsRun struct {
	from, to int
	looked   bool
}

// Claim checks claims and orders them. wait is the longest time that one waits for another transaction, 0 for ever.
func (p *PostgresSteps) Claim(claims []Claim, wait time.Duration) (*PostgresClaims, []Statement, error) {
	order, err := claimOrder(claims)
	if err != nil {
		return nil, nil, err
	}
	c := &PostgresClaims{
		p: p, claims: claims, order: order, results: make([]ClaimResult, len(claims)), earlier: earlier{fresh: p.fresh},
	}
	for from := 0; from < len(order); {
		to := from + claimRun(claims, order[from:])
		c.runs = append(c.runs, claimsRun{from: from, to: to})
		from = to
	}
	timeout := "0"
	if wait > 0 {
		timeout = millis(wait)
	}
	inserts := make([]Statement, len(c.runs))
	for i, run := range c.runs {
		inserts[i] = c.insert(run, timeout)
	}
	return c, inserts, nil
}

func (c *PostgresClaims) insert(run claimsRun, timeout string) Statement {
	rows := c.order[run.from:run.to]
	fingerprints, at := make([][]byte, len(rows)), make([]int64, len(rows))
	for i, row := range rows {
		fingerprints[i], at[i] = blob(c.claims[row].Fingerprint), c.claims[row].At.UnixMicro()
	}
	first := &c.claims[rows[0]]
	return Statement{c.p.q.claim, []any{
		timeout, []byte(first.Scope), c.p.nonce[:], int64(first.State), c.keys(rows), fingerprints, at, c.p.guard,
	}}
}

func (c *PostgresClaims) keys(rows []int) [][]byte {
	keys := make([][]byte, len(rows))
	for i, row := range rows {
		keys[i] = c.claims[row].Key
	}
	return keys
}

// Inserted reads the row of insert number n.
func (c *PostgresClaims) Inserted(n int, scan func(dest ...any) error) error {
	var inserted int
	var own bool
	var met, changed, pid, started int64
	var timeout string
	if err := scan(&inserted, &own, &met, &changed, &pid, &started, &timeout); err != nil {
		return err
	}
	if !own {
		return ErrTxEnded
	}
	p, run := c.p, &c.runs[n]
	p.pid.Store(pid)
	p.started.Store(started)
	if len(p.fresh) == 0 && n == 0 && !p.lent {
		p.changed = changed
	} else {
		p.changed += met // claims that met a concurrent one
	}
	p.recount = p.recount || p.lent
	rows := c.order[run.from:run.to]
	if inserted == len(rows) {
		for _, row := range rows {
			c.results[row].Status = ClaimFresh
		}
		return nil
	}
	run.looked = true
	return nil
}

// Looks gives a statement for each run of claims that were not all fresh, with the number it has for Found.
func (c *PostgresClaims) Looks() map[int]Statement {
	var looks map[int]Statement
	for n, run := range c.runs {
		if !run.looked {
			continue
		}
		if looks == nil {
			looks = map[int]Statement{}
		}
		rows := c.order[run.from:run.to]
		looks[n] = Statement{c.p.q.held, []any{c.keys(rows), []byte(c.claims[rows[0]].Scope)}}
	}
	return looks
}

// Found reads one row of look number n.
func (c *PostgresClaims) Found(n int, scan func(dest ...any) error) error {
	row, receipt, whole, err := scanHeld(scan)
	if err != nil {
		return err
	}
	i := c.order[c.runs[n].from:c.runs[n].to][row]
	c.results[i] = heldResult(c.p.nonce, &c.earlier, &c.claims[i], receipt, whole)
	return nil
}

// Results gives the answers in the order of the claims.
func (c *PostgresClaims) Results() ([]ClaimResult, error) {
	for i := range c.results {
		if c.results[i].Status == 0 {
			// It was there when it was to be inserted, and was pruned before it could be read.
			return nil, &classedError{class: ClassContention, what: "a receipt went away", err: fmt.Errorf("identity key %q", c.claims[i].Key)}
		}
	}
	c.p.fresh.remember(c.claims, c.order, c.results)
	return c.results, nil
}

// Unclaim gives up claims: statements, each of which says by its number of rows, for Unclaimed, how many receipts it deleted.
func (p *PostgresSteps) Unclaim(claims []Claim) []Statement {
	var statements []Statement
	for rest := claims; len(rest) > 0; {
		n := scopeRun(rest)
		keys := make([][]byte, n)
		for i := range n {
			keys[i] = rest[i].Key
		}
		statements = append(statements, Statement{p.q.unclaim, []any{keys, []byte(rest[0].Scope), p.nonce[:], p.guard}})
		rest = rest[n:]
	}
	p.fresh.forget(claims)
	return statements
}

// Unclaimed is told how many rows a statement of Unclaim deleted.
func (p *PostgresSteps) Unclaimed(rows int64) { p.changed += rows }

// Outputs gives outputs their nonce and position, and the statement that stores them.
func (p *PostgresSteps) Outputs(outputs []Output) ([]Output, Statement, error) {
	stored := slices.Clone(outputs)
	positions, via := make([]int64, len(stored)), make([]int64, len(stored))
	at := make([]int64, len(stored))
	var columns [6][][]byte
	for i := range stored {
		o := &stored[i]
		o.Nonce, o.Position, o.Sent = p.nonce, p.positions+i, false
		metadata, err := encodeMetadata(o.Metadata)
		if err != nil {
			return nil, Statement{}, err
		}
		for c, value := range [...][]byte{[]byte(o.Scope), o.Key, []byte(o.Topic), []byte(o.UUID), metadata, o.Payload} {
			columns[c] = append(columns[c], blob(value))
		}
		positions[i], at[i], via[i] = int64(o.Position), o.At.UnixMicro(), int64(boolInt(o.ViaRouter))
	}
	p.positions += len(stored)
	return stored, Statement{p.q.outputs, []any{
		p.nonce[:], positions, columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], at, via, p.guard,
	}}, nil
}

// Divert gives the statement that stores dead letters, in one order for all transactions, so that two do not wait for each
// other.
func (p *PostgresSteps) Divert(letters []DeadLetter) (Statement, error) {
	letters = slices.Clone(letters)
	slices.SortStableFunc(letters, func(a, b DeadLetter) int {
		return cmp.Or(strings.Compare(a.Scope, b.Scope), bytes.Compare(a.Key, b.Key), bytes.Compare(a.Fingerprint, b.Fingerprint))
	})
	kinds, reasons, at := make([]string, len(letters)), make([]string, len(letters)), make([]int64, len(letters))
	var columns [9][][]byte
	for i := range letters {
		l := &letters[i]
		metadata, err := encodeMetadata(l.Metadata)
		if err != nil {
			return Statement{}, err
		}
		for c, value := range [...][]byte{
			[]byte(l.Scope), l.Key, l.Fingerprint, []byte(l.Consumer), []byte(l.Handler), []byte(l.Topic), []byte(l.UUID), metadata, l.Payload,
		} {
			columns[c] = append(columns[c], blob(value))
		}
		kinds[i], reasons[i], at[i] = string(l.Kind), readable(l.Reason), l.At.UnixMicro()
	}
	return Statement{p.q.divert, []any{
		columns[0], columns[1], columns[2], kinds, reasons, columns[3], columns[4], columns[5], columns[6], columns[7], columns[8], at, p.guard,
	}}, nil
}

// Seal gives the last statement before COMMIT: the marker, where there are fresh claims, else a proof that the transaction is
// the one that Bounds was sent in. Where it is not, or its receipts are not there any more, the statement fails, and so does
// what is sent behind it without waiting; SealError says what its error means.
// None is needed where nobody but the store had the transaction and it claimed nothing.
func (p *PostgresSteps) Seal() (s Statement, needed bool) {
	n := len(p.fresh)
	switch {
	case n == 0:
		return Statement{p.q.open, []any{p.guard}}, p.lent
	case !p.recount:
		return Statement{p.q.marker, []any{p.nonce[:], n, p.fresh[0].at, p.guard, p.changed}}, true
	}
	scopes, keys := make([][]byte, n), make([][]byte, n)
	for i, f := range p.fresh {
		scopes[i], keys[i] = []byte(f.scope), f.key
	}
	return Statement{p.q.markerCounting, []any{p.nonce[:], n, p.fresh[0].at, p.guard, scopes, keys}}, true
}

// SealError says what the error of the statement of Seal means.
func (p *PostgresSteps) SealError(err error) error {
	code, _ := sqlState(err)
	switch {
	case err == nil || errors.Is(err, ErrTxEnded):
		return err
	case pgEnded(code), code == pgCheckViolation, code == pgDivisionByZero:
		// Without the cause: its words are about a marker, or a division.
		return fmt.Errorf("%w: not all of its %d fresh receipts are there (SQLSTATE %s)", ErrTxEnded, len(p.fresh), code)
	case code == pgUniqueViolation:
		return fmt.Errorf("somebody asked meanwhile what became of this transaction, and was told that it did not commit: %w", err)
	default:
		return fmt.Errorf("writing the marker: %w", err)
	}
}

// Session names the server's process and the transaction it is in, as Kill needs it; ok is false before the first claim was
// answered.
func (p *PostgresSteps) Session() (pid, started int64, ok bool) {
	pid, started = p.pid.Load(), p.started.Load()
	return pid, started, pid != 0
}

// text gives the values as every client of database/sql takes them: an array as its text.
func (s Statement) text() []any {
	args := make([]any, len(s.Args))
	for i, arg := range s.Args {
		switch a := arg.(type) {
		case [][]byte:
			args[i] = byteaArray(a)
		case []string:
			args[i] = textArray(a)
		case []int64:
			args[i] = intArray(a)
		default:
			args[i] = arg
		}
	}
	return args
}

// byteaArray writes an array of bytea: {"\\x00ff","\\x"}.
func byteaArray(values [][]byte) string {
	size := 2
	for _, v := range values {
		size += 2*len(v) + 6
	}
	b := make([]byte, 0, size)
	b = append(b, '{')
	for i, v := range values {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `"\\x`...)
		b = hex.AppendEncode(b, v)
		b = append(b, '"')
	}
	return string(append(b, '}'))
}

// textArray writes an array of text.
func textArray(values []string) string {
	quote := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	var b strings.Builder
	b.WriteByte('{')
	for i, v := range values {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('"')
		_, _ = quote.WriteString(&b, v)
		b.WriteByte('"')
	}
	b.WriteByte('}')
	return b.String()
}

// intArray writes an array of numbers.
func intArray(values []int64) string {
	b := make([]byte, 0, 2+18*len(values))
	b = append(b, '{')
	for i, v := range values {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, v, 10)
	}
	return string(append(b, '}'))
}
