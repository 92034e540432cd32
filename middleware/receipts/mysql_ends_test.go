package receipts_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/penstock-mq/penstock/contracttest/wire"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// TestMySQLSwallowedErrors has a handler, after a neighbour, ignore what ended its transaction and write on.
func TestMySQLSwallowedErrors(t *testing.T) {
	t.Parallel()
	db := newMyDB(t, param("innodb_lock_wait_timeout", "1"))
	tests := []struct {
		name string
		do   func(t *testing.T, tx *sql.Tx)
		torn bool // what was written before stays, with receipts that prove nothing
		fine bool // the error was the statement's alone
	}{
		{"a deadlock's victim", db.loseDeadlock, false, false},
		{"a lock that was not to be had", db.waitInVain, false, true},
		{"DDL", func(t *testing.T, tx *sql.Tx) { handled(t, tx, "CREATE TABLE IF NOT EXISTS made (n INT)") }, true, false},
		{"COMMIT as text", func(t *testing.T, tx *sql.Tx) { handled(t, tx, "COMMIT") }, true, false},
		{"COMMIT AND CHAIN", func(t *testing.T, tx *sql.Tx) { handled(t, tx, "COMMIT AND CHAIN") }, true, false},
		{"ROLLBACK as text", func(t *testing.T, tx *sql.Tx) { handled(t, tx, "ROLLBACK") }, false, false},
		{"START TRANSACTION", func(t *testing.T, tx *sql.Tx) { handled(t, tx, "START TRANSACTION") }, true, false},
		{"autocommit on", func(t *testing.T, tx *sql.Tx) { handled(t, tx, "SET autocommit = 1") }, true, false},
		{"LOCK TABLES", func(t *testing.T, tx *sql.Tx) {
			handled(t, tx, "LOCK TABLES counters WRITE")
			handled(t, tx, "UNLOCK TABLES")
		}, true, false},
		{"Commit", func(t *testing.T, tx *sql.Tx) { must(t, tx.Commit()) }, true, false},
		{"Rollback", func(t *testing.T, tx *sql.Tx) { must(t, tx.Rollback()) }, false, false},
		{"a duplicate key", func(t *testing.T, tx *sql.Tx) {
			handled(t, tx, "INSERT INTO counters VALUES ('twice', 0) ON DUPLICATE KEY UPDATE value = 0")
			if _, err := tx.ExecContext(t.Context(), "INSERT INTO counters VALUES ('twice', 0)"); err == nil {
				t.Error("a duplicate key is taken")
			}
		}, false, true},
		{"its own savepoint", func(t *testing.T, tx *sql.Tx) {
			handled(t, tx, "SAVEPOINT mine")
			handled(t, tx, "ROLLBACK TO SAVEPOINT mine")
		}, false, true},
	}
	for _, test := range tests {
		for _, parts := range []bool{false, true} {
			name := fmt.Sprintf("%s, in parts %t", test.name, parts)
			t.Run(name, func(t *testing.T) {
				neighbour, careless := name+" neighbour", name+" careless"
				err := db.careless(t, neighbour, careless, parts, test.do)
				if test.fine {
					must(t, err)
					db.both(t, receipts.ClaimHeld, neighbour, careless)
					if db.effect(t, careless) != 2 || db.effect(t, neighbour) != 1 {
						t.Error("the effects are not all there")
					}
					return
				}
				wantErr(t, err, receipts.ErrTxEnded)
				want := receipts.ClaimFresh
				if test.torn {
					want = receipts.ClaimTorn
				}
				db.both(t, want, neighbour, careless)
				if n := db.effect(t, neighbour); test.torn != (n == 1) {
					t.Errorf("the neighbour's effect is there %d times, its receipt is torn: %t", n, test.torn)
				}
			})
		}
	}
}

// careless runs the transaction of two messages, the second of which does something and writes again.
func (db *myDB) careless(t *testing.T, neighbour, careless string, parts bool, do func(t *testing.T, tx *sql.Tx)) error {
	t.Helper()
	tx := db.begin(t)
	claimed(t, tx, claim(neighbour), claim(careless))
	if parts {
		must(t, tx.Part(t.Context()))
	}
	db.add(t, tx.Raw(), neighbour)
	if parts {
		must(t, tx.Keep(t.Context()))
		must(t, tx.Part(t.Context()))
	}
	raw := tx.Raw()
	db.add(t, raw, careless)
	do(t, raw)
	_, _ = raw.ExecContext(t.Context(), `INSERT INTO counters VALUES (?, 1) ON DUPLICATE KEY UPDATE value = value + 1`, careless)
	if parts {
		if err := tx.Keep(t.Context()); err != nil {
			must(t, tx.Rollback(t.Context()))
			return err
		}
	}
	return tx.Commit(t.Context())
}

func (db *myDB) both(t *testing.T, want receipts.ClaimStatus, keys ...string) {
	t.Helper()
	for _, key := range keys {
		if got := db.status(t, key); got != want {
			t.Errorf("%q: status %d, want %d", key, got, want)
		}
	}
}

// loseDeadlock makes the transaction the victim of a deadlock: the other one has changed more.
func (db *myDB) loseDeadlock(t *testing.T, tx *sql.Tx) {
	other, err := db.BeginTx(t.Context(), nil)
	must(t, err)
	defer func() { _ = other.Rollback() }()
	handled(t, tx, "INSERT INTO counters VALUES ('deadlock a', 0) ON DUPLICATE KEY UPDATE value = 0")
	for i := range 300 {
		handled(t, other, "INSERT INTO counters VALUES (?, 1) ON DUPLICATE KEY UPDATE value = 1", fmt.Sprint("heavy ", i))
	}
	handled(t, other, "INSERT INTO counters VALUES ('deadlock b', 0) ON DUPLICATE KEY UPDATE value = 0")
	waits := make(chan error, 1)
	go func() {
		_, err := other.ExecContext(context.Background(), "UPDATE counters SET value = 0 WHERE name = 'deadlock a'")
		waits <- err
	}()
	_, err = tx.ExecContext(t.Context(), "UPDATE counters SET value = 0 WHERE name = 'deadlock b'")
	wantClass(t, db.store, err, receipts.ClassContention)
	must(t, <-waits)
}

func (db *myDB) waitInVain(t *testing.T, tx *sql.Tx) {
	other, err := db.BeginTx(t.Context(), nil)
	must(t, err)
	defer func() { _ = other.Rollback() }()
	handled(t, other, "INSERT INTO counters VALUES ('locked', 0) ON DUPLICATE KEY UPDATE value = 0")
	_, err = tx.ExecContext(t.Context(), "INSERT INTO counters VALUES ('locked', 0)")
	wantClass(t, db.store, err, receipts.ClassContention)
}

// TestMySQLRowsLeftOpen has a handler return with rows that it has not read.
func TestMySQLRowsLeftOpen(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	for _, parts := range []bool{false, true} {
		key := fmt.Sprint("k ", parts)
		tx := db.begin(t)
		claimed(t, tx, claim(key))
		if parts {
			must(t, tx.Part(t.Context()))
		}
		db.add(t, tx.Raw(), key)
		rows, err := tx.Raw().QueryContext(t.Context(), "SELECT seq FROM seq_1_to_100000")
		must(t, err)
		if !rows.Next() {
			t.Fatal(rows.Err())
		}
		if parts {
			err = tx.Keep(t.Context())
		} else {
			err = tx.Commit(t.Context())
		}
		if err == nil {
			t.Error("the store has taken a connection with open rows")
		}
		_ = rows.Close()
		_ = tx.Rollback(t.Context())
		if got := db.status(t, key); got != receipts.ClaimFresh || db.effect(t, key) != 0 {
			t.Errorf("parts %t: status %d, effect %d: %v", parts, got, db.effect(t, key), err)
		}
	}
}

// TestMySQLBudgetFreesLocks ends the budget while a handler's statement runs.
func TestMySQLBudgetFreesLocks(t *testing.T) {
	t.Parallel()
	db := newMyDB(t, func(c *mysql.Config) { c.InterpolateParams = true })
	tx := db.begin(t, receipts.TxOptions{Budget: 300 * time.Millisecond})
	claimed(t, tx, claim("k"))
	raw := tx.Raw()
	session := sessionOf(t, raw)
	db.add(t, raw, "k")
	start := time.Now()
	stuck := make(chan error, 1)
	go func() {
		_, err := raw.ExecContext(context.Background(), "UPDATE counters SET value = sleep(60) WHERE name = 'k'")
		stuck <- err
	}()
	other := db.begin(t)
	claimed(t, other, claim("k")) // waits for as long as it takes
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("the claim was free after %v", took)
	}
	if err := <-stuck; err == nil {
		t.Error("the handler's statement has not noticed")
	}
	wantErr(t, tx.Commit(t.Context()), receipts.ErrBudgetEnded)
	must(t, other.Commit(t.Context()))
	_ = session
	db.wantStats(t, 1, 0, 0)
	if n := db.effect(t, "k"); n != 0 {
		t.Errorf("effect %d", n)
	}
}

// TestMySQLServerEndsBudget looks whether the server ends what a client that stands still does not.
func TestMySQLServerEndsBudget(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	db.onMariaDB(t)
	tx := db.begin(t, receipts.TxOptions{Budget: time.Second})
	claimed(t, tx, claim("k"))
	raw := tx.Raw()
	db.add(t, raw, "k")
	session := sessionOf(t, raw)
	var statement float64
	must(t, raw.QueryRowContext(t.Context(), "SELECT @@max_statement_time").Scan(&statement))
	if statement != 1 {
		t.Errorf("a statement may take %v s", statement)
	}
	receipts.StandStill(tx)
	db.wantGone(t, session)
	if got := db.status(t, "k"); got != receipts.ClaimFresh {
		t.Errorf("status %d", got)
	}
	wantClass(t, db.store, tx.Commit(t.Context()), receipts.ClassOutage)
	db.wantStats(t, 0, 0, 0)
}

// throughProxy gives a handle whose connections can be disturbed.
func (db *myDB) throughProxy(t *testing.T) (*myDB, *wire.Proxy) {
	t.Helper()
	p := wire.Test(t, wire.Options{Upstream: db.at.Address, Protocol: wire.MySQL})
	through := openMy(t, db.at.At(p.Address()))
	_, err := through.store.Check(t.Context())
	must(t, err)
	return through, p
}

// TestMySQLUnknownCommit loses the COMMIT, or its answer, in every way, and asks.
func TestMySQLUnknownCommit(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	tests := []struct {
		name      string
		rule      wire.Rule
		committed bool
	}{
		{"cut before it arrives", wire.Rule{Match: wire.Commit, When: wire.Before, Do: wire.Reset}, false},
		{"cut before its answer", wire.Rule{Match: wire.Committed, When: wire.Before, Do: wire.Reset}, true},
		{"swallowed", wire.Rule{Match: wire.Commit, When: wire.Before, Do: wire.Swallow}, false},
		{"its answer swallowed", wire.Rule{Match: wire.Committed, When: wire.Before, Do: wire.Swallow}, true},
		{"closed in order before it arrives", wire.Rule{Match: wire.Commit, When: wire.Before, Do: wire.Finish}, false},
	}
	for _, test := range tests {
		for _, who := range []string{"the same process", "another process"} {
			t.Run(test.name+", asked by "+who, func(t *testing.T) {
				through, p := db.throughProxy(t)
				key := test.name + who
				tx := through.begin(t)
				claimed(t, tx, claim(key))
				db.add(t, tx.Raw(), key)
				session := sessionOf(t, tx.Raw())
				lost := p.On(test.rule)
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				defer cancel()
				wantErr(t, tx.Commit(ctx), receipts.ErrCommitUnknown)
				<-lost.Fired()
				asked := through.store
				if who != "the same process" {
					asked = db.store
					undecided(t, db, tx.Nonce(), test.rule.Do == wire.Swallow && !test.committed)
					_, _ = db.ExecContext(t.Context(), fmt.Sprintf("KILL %d", session)) // it may be gone
				}
				committed, err := asked.Resolve(t.Context(), tx.Nonce())
				must(t, err)
				if committed != test.committed {
					t.Errorf("Resolve says %t", committed)
				}
				p.Cut()
				want := receipts.ClaimFresh
				if test.committed {
					want = receipts.ClaimHeld
				}
				db.both(t, want, key)
				if n := db.effect(t, key); (n == 1) != test.committed {
					t.Errorf("effect %d", n)
				}
			})
		}
	}
}

// undecided asks about a transaction whose session is still open, which cannot be decided before that has ended.
func undecided(t *testing.T, db *myDB, nonce receipts.Nonce, open bool) {
	t.Helper()
	if !open {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if committed, err := db.store.Resolve(ctx, nonce); err == nil {
		t.Errorf("while the old session is open Resolve says %t", committed)
	}
}

// TestMySQLLateCommit lets a COMMIT arrive after somebody has found that it did not.
func TestMySQLLateCommit(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	tx := db.begin(t)
	claimed(t, tx, claim("k"))
	// Another process asks before the marker is written, as if the answer of BEGIN had been the last that was heard.
	if committed, err := db.again(t).store.Resolve(t.Context(), tx.Nonce()); err != nil || committed {
		t.Fatalf("Resolve: %t, %v", committed, err)
	}
	db.add(t, tx.Raw(), "k")
	if err := tx.Commit(t.Context()); err == nil || errors.Is(err, receipts.ErrCommitUnknown) {
		t.Errorf("a COMMIT behind a fence: %v", err)
	}
	db.both(t, receipts.ClaimFresh, "k")
	db.wantStats(t, 0, 0, 0)
}

// TestMySQLSilence has the network swallow everything at each step: every call returns by its context.
func TestMySQLSilence(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	steps := map[string]func(ctx context.Context, s *receipts.MySQL, tx receipts.Tx[*sql.Tx]) error{
		"Begin": func(ctx context.Context, s *receipts.MySQL, _ receipts.Tx[*sql.Tx]) error {
			_, err := s.Begin(ctx, receipts.TxOptions{})
			return err
		},
		"Claim": func(ctx context.Context, _ *receipts.MySQL, tx receipts.Tx[*sql.Tx]) error {
			_, err := tx.Claim(ctx, []receipts.Claim{claim("silence")})
			return err
		},
		"Commit":   func(ctx context.Context, _ *receipts.MySQL, tx receipts.Tx[*sql.Tx]) error { return tx.Commit(ctx) },
		"Rollback": func(ctx context.Context, _ *receipts.MySQL, tx receipts.Tx[*sql.Tx]) error { return tx.Rollback(ctx) },
		"Stats": func(ctx context.Context, s *receipts.MySQL, _ receipts.Tx[*sql.Tx]) error {
			_, err := s.Stats(ctx)
			return err
		},
		"Check": func(ctx context.Context, s *receipts.MySQL, _ receipts.Tx[*sql.Tx]) error {
			_, err := s.Check(ctx)
			return err
		},
	}
	for name, step := range steps {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			through, p := db.throughProxy(t)
			tx := through.begin(t)
			claimed(t, tx, claim(name))
			p.Stall()
			defer p.Cut()
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			start := time.Now()
			if err := step(ctx, through.store, tx); err == nil {
				t.Error("it got an answer")
			}
			if took := time.Since(start); took > 8*time.Second {
				t.Errorf("it returned after %v", took)
			}
		})
	}
}

// TestMySQLRefusesConnections has a server that does not let the client's handshake come to its end. The client has an error
// without a code for that, which the store has not met before.
func TestMySQLRefusesConnections(t *testing.T) {
	t.Parallel()
	through, p := newMyDB(t).throughProxy(t)
	back := p.Refuse()
	p.Cut()
	for range 3 {
		_, err := through.store.Begin(t.Context(), receipts.TxOptions{})
		if class := through.store.Classify(err); class != receipts.ClassOutage {
			t.Errorf("class %d: %v", class, err)
		}
	}
	back()
	through.begin(t)
}
