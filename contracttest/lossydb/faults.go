// Package lossydb wraps a database/sql driver so that tests can script its failures: a COMMIT whose answer is lost, one
// that never arrives, statements and transactions that fail, a database that is gone. Everything else passes through, with
// the inner driver's own interfaces, so that it behaves as it does without the wrapper.
//
// Every fault counts how often it fired: a test that does not look at [Fault.Fired] may have tested nothing.
package lossydb

import (
	"context"
	"database/sql/driver"
	"errors"
	"strings"
	"sync"
	"time"
)

// ErrNoCode is a failure without a result code and without database/sql's sign of a dead connection, as a driver over a
// network gives when its peer is gone.
var ErrNoCode = errors.New("lossydb: connection reset by peer")

// Op is a place where faults are put.
type Op uint8

// The places.
const (
	// OpConnect opens a connection.
	OpConnect Op = iota + 1
	// OpBegin begins a transaction through database/sql, not as text.
	OpBegin
	// OpStatement executes or queries, or prepares, text.
	OpStatement
	// OpCommit commits through database/sql, not as text.
	OpCommit
)

// Fault is one scripted fault. It is safe for concurrent use.
type Fault struct {
	op    Op
	match string
	err   error
	delay time.Duration
	// after: the operation is forwarded first.
	after bool
	// kill: the connection is dead afterwards.
	kill bool
	// leave: the transaction stays open.
	leave bool

	mu    sync.Mutex
	left  int // below 0: without end
	fired int
}

// Fired tells how often the fault fired.
func (f *Fault) Fired() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fired
}

// Stop ends the fault. It may be called twice.
func (f *Fault) Stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left = 0
}

// fire takes one shot, if there is one left.
func (f *Fault) fire(op Op, query string) bool {
	if f.op != op || op == OpStatement && !strings.Contains(query, f.match) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left == 0 {
		return false
	}
	if f.left > 0 {
		f.left--
	}
	f.fired++
	return true
}

// LoseCommitAnswer forwards the next n COMMITs, and then reports err although they may have succeeded; the connection is
// dead afterwards. A nil err is driver.ErrBadConn. n below 1 means without end, until Stop.
func (c *Connector) LoseCommitAnswer(n int, err error) *Fault {
	return c.add(&Fault{op: OpCommit, err: err, after: true, kill: true}, n)
}

// DropCommit rolls the next n transactions back instead of committing them and reports err, as when the connection is cut
// before COMMIT arrives; the connection is dead afterwards. err and n are as with LoseCommitAnswer.
func (c *Connector) DropCommit(n int, err error) *Fault {
	return c.add(&Fault{op: OpCommit, err: err, kill: true}, n)
}

// RefuseCommit answers the next n COMMITs with err without forwarding them, and leaves the connection alive and the
// transaction on it open, as SQLite itself does when it is busy. err and n are as with LoseCommitAnswer.
func (c *Connector) RefuseCommit(n int, err error) *Fault {
	return c.add(&Fault{op: OpCommit, err: err, leave: true}, n)
}

// FailConnect fails the next n attempts to open a connection. err and n are as with LoseCommitAnswer.
func (c *Connector) FailConnect(n int, err error) *Fault {
	return c.add(&Fault{op: OpConnect, err: err}, n)
}

// FailBegin fails the next n transactions at their beginning, before anything is forwarded. The connection is dead
// afterwards where err is, or is nil for, driver.ErrBadConn. n is as with LoseCommitAnswer.
func (c *Connector) FailBegin(n int, err error) *Fault {
	return c.add(&Fault{op: OpBegin, err: err, kill: dead(err)}, n)
}

// FailStatement fails the next n statements whose text contains match, before anything is forwarded; "" matches all. A
// prepared statement fails when it is executed. err, n and the connection are as with FailBegin.
func (c *Connector) FailStatement(match string, n int, err error) *Fault {
	return c.add(&Fault{op: OpStatement, match: match, err: err, kill: dead(err)}, n)
}

// Delay holds the next n operations of a kind for d before they are forwarded, statements where their text contains match.
// A context that ends meanwhile ends the delay, and its error is returned. n is as with LoseCommitAnswer.
func (c *Connector) Delay(op Op, match string, d time.Duration, n int) *Fault {
	f := &Fault{op: op, match: match, delay: d}
	f.left = shots(n)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.delays = append(c.delays, f)
	return f
}

// Outage takes the database away: connecting, beginning, statements and COMMIT, which rolls back, fail with err until Back
// is called; a nil err is driver.ErrBadConn. Connections that met it are dead. The fault counts every refusal.
func (c *Connector) Outage(err error) *Fault {
	f := &Fault{err: orBadConn(err), kill: true, left: -1}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outage = f
	return f
}

// Back ends an outage.
func (c *Connector) Back() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outage = nil
}

func (c *Connector) add(f *Fault, n int) *Fault {
	f.err = orBadConn(f.err)
	f.left = shots(n)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults = append(c.faults, f)
	return f
}

// meet waits out delays and gives the fault that the operation meets, nil for none.
func (c *Connector) meet(ctx context.Context, op Op, query string) (*Fault, error) {
	c.mu.Lock()
	delays, faults, outage := c.delays, c.faults, c.outage
	c.mu.Unlock()
	for _, f := range delays {
		if !f.fire(op, query) {
			continue
		}
		timer := time.NewTimer(f.delay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
	if outage != nil {
		outage.mu.Lock()
		outage.fired++
		outage.mu.Unlock()
		return outage, nil
	}
	for _, f := range faults {
		if f.fire(op, query) {
			return f, nil
		}
	}
	return nil, nil //nolint:nilnil // no fault is the usual answer
}

func shots(n int) int {
	if n < 1 {
		return -1
	}
	return n
}

func orBadConn(err error) error {
	if err == nil {
		return driver.ErrBadConn
	}
	return err
}

func dead(err error) bool { return err == nil || errors.Is(err, driver.ErrBadConn) }
