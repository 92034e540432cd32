package receipts

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"
)

// mysqlClaim is one call of Claim.
type mysqlClaim struct {
	f       *mysqlFlow
	ctx     context.Context //nolint:containedctx // lives as long as the call
	claims  []Claim
	results []ClaimResult
	earlier earlier
}

// claim looks for receipts without locking them, inserts the others in key order, which waits for other transactions in that
// order, too, and looks again only where somebody was faster. MySQL waits whole seconds: there ClaimWait is rounded up.
func (f *mysqlFlow) claim(ctx context.Context, claims []Claim) ([]ClaimResult, error) {
	order, err := claimOrder(claims)
	if err != nil {
		return nil, err
	}
	late, stop := lateContext(ctx)
	defer stop()
	for tries := 1; ; tries++ {
		c := mysqlClaim{f: f, ctx: late, claims: claims, results: make([]ClaimResult, len(claims)), earlier: earlier{fresh: f.fresh}}
		err := c.all(order, lockWait(ctx, f.opts.ClaimWait))
		if err == nil {
			f.fresh.remember(claims, order, c.results)
			return c.results, nil
		}
		if f.s.number(err) != mysqlDeadlock || tries == mysqlDeadlocks || len(f.fresh) > 0 || f.used || f.t.raw {
			return nil, f.waited(ctx, err)
		}
		// The server has rolled back, and there was nothing yet. Where one of several that wait for the same row rolls back, the
		// others' locks grow by the gap that it leaves, and they wait for each other.
		if err := f.again(late); err != nil {
			return nil, f.waited(ctx, err)
		}
	}
}

// mysqlDeadlocks is how often the first claim of a transaction is tried that loses a deadlock.
const mysqlDeadlocks = 5

// all claims in key order, those of one scope at a time.
func (c *mysqlClaim) all(order []int, wait time.Duration) error {
	for len(order) > 0 {
		n := 1
		for n < len(order) && n < mysqlRows && c.claims[order[n]].Scope == c.claims[order[0]].Scope {
			n++
		}
		if err := c.run(order[:n], wait); err != nil {
			return err
		}
		order = order[n:]
	}
	return nil
}

// waited gives the end of a context the meaning that it has in a claim. The connection is closed with it; its session would go on
// waiting, with what it has claimed.
func (f *mysqlFlow) waited(ctx context.Context, err error) error {
	if ctx.Err() == nil || f.t.isExpired() || f.s.Classify(err) == ClassContention {
		return err
	}
	go f.t.kill()
	return &classedError{class: ClassContention, what: "waiting for another transaction", err: errors.Join(ctx.Err(), err)}
}

// run claims identities of one scope.
func (c *mysqlClaim) run(rows []int, wait time.Duration) error {
	if err := c.look(rows, false); err != nil {
		return err
	}
	wanted := slices.DeleteFunc(slices.Clone(rows), func(i int) bool { return c.results[i].Status != 0 })
	if len(wanted) == 0 {
		return nil
	}
	inserted, err := c.insert(wanted, wait)
	if err != nil {
		return err
	}
	if inserted != int64(len(wanted)) || c.f.s.counted.Load() != countedAsNone {
		return c.look(wanted, true)
	}
	for _, i := range wanted {
		c.results[i].Status = ClaimFresh
	}
	return nil
}

// look reads the receipts of claims. Where all of them have to be there, a missing one is an error.
func (c *mysqlClaim) look(rows []int, all bool) error {
	q := &mysqlText{b: make([]byte, 0, 512+80*len(rows))}
	q.raw(c.f.s.q.held).bytes([]byte(c.claims[rows[0]].Scope)).raw(" AND r.identity_key IN (").
		list(len(rows), func(i int) { q.bytes(c.claims[rows[i]].Key) }).raw(")")
	found, err := c.f.t.tx.QueryContext(c.ctx, q.String())
	err = eachRow(found, err, func(scan scanFunc) error {
		key, receipt, whole, err := scanMySQLHeld(scan)
		if err != nil {
			return err
		}
		n, there := slices.BinarySearchFunc(rows, key, func(i int, key sql.RawBytes) int { return bytes.Compare(c.claims[i].Key, key) })
		if !there {
			return fmt.Errorf("the server gave a receipt of %q, which nobody asked for", key)
		}
		i := rows[n]
		c.results[i] = heldResult(c.f.t.nonce, &c.earlier, &c.claims[i], receipt, whole)
		return nil
	})
	if err != nil || !all {
		return err
	}
	for _, i := range rows {
		if c.results[i].Status == 0 {
			return fmt.Errorf("identity key %q is neither inserted nor there", c.claims[i].Key)
		}
	}
	return nil
}

// scanMySQLHeld reads a receipt and its key.
func scanMySQLHeld(scan scanFunc) (key sql.RawBytes, r Receipt, whole bool, err error) {
	var nonce sql.RawBytes
	var at int64
	if err := scan(&key, &r.Fingerprint, &nonce, &r.State, &at, &whole); err != nil {
		return nil, Receipt{}, false, err
	}
	if copy(r.Nonce[:], nonce) != len(r.Nonce) {
		return nil, Receipt{}, false, errors.New("a stored nonce is too short")
	}
	r.Fingerprint, r.At = blob(r.Fingerprint), time.UnixMicro(at).UTC()
	return key, r, whole, nil
}

// insert inserts receipts, in the order given, and tells how many rows that made, as the client counts.
func (c *mysqlClaim) insert(rows []int, wait time.Duration) (inserted int64, err error) {
	q := &mysqlText{b: make([]byte, 0, 512+256*len(rows))}
	q.raw(c.f.s.q.claim).raw(" VALUES ").list(len(rows), func(n int) {
		claim := &c.claims[rows[n]]
		q.raw("(").bytes([]byte(claim.Scope)).raw(",").bytes(claim.Key).raw(",").bytes(claim.Fingerprint).raw(",").bytes(c.f.t.nonce[:]).
			raw(",").number(int64(claim.State)).raw(",").number(claim.At.UnixMicro()).raw(")")
	}).raw(mysqlKeepClaim)
	err = c.f.s.waiting(c.f.server, wait, q.String(), func(statement string) error {
		result, err := c.f.t.tx.ExecContext(c.ctx, statement)
		if err == nil && inserted == 0 {
			inserted, err = result.RowsAffected()
		}
		return err
	})
	return inserted, err
}
