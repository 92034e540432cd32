package receipts

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// MySQLOptions configures the store on MySQL and MariaDB; the zero value is right.
type MySQLOptions struct {
	// TablePrefix starts the name of every table and index: letters, digits and underscores, at most 48. "" means
	// "penstock_".
	TablePrefix string

	// Savepoints puts each message of a batch into a savepoint of its own, so that one that fails is undone alone. Without it
	// what ran before a failure runs again, which is cheaper where failures are rare: a savepoint costs two round trips for each
	// message.
	Savepoints bool

	// AllowUnsafeSync lets Check accept innodb_flush_log_at_trx_commit other than 1, under which a committed transaction may be
	// lost when the server goes down, with a warning.
	AllowUnsafeSync bool
}

// MySQL is the [Store] on the MySQL family, for a *sql.DB of github.com/go-sql-driver/mysql. It is tested on MariaDB 10.11; on
// MySQL 8 its tests run where somebody names a server. It is safe for concurrent use.
//
// Its transactions are READ COMMITTED whatever the DSN says, and run with autocommit off, so that what a handler does after the
// server has ended its transaction (a deadlock's victim, DDL, a COMMIT of its own) is not committed statement by statement. What
// that changes of a session is put back before its connection goes back to the pool; else the connection is closed. The server
// ends a transaction that is idle for longer than its budget, and MariaDB a statement, too; a session that is stuck is killed,
// which needs no privilege, because it is one's own.
//
// A network that swallows everything is noticed by the client's own timeouts: set timeout, readTimeout and writeTimeout in the
// DSN, the latter two well above the budget of a transaction.
type MySQL struct {
	sqlServer

	q           *mysqlQueries
	savepoints  bool
	allowUnsafe bool
	known       atomic.Pointer[mysqlKnown]
	sessions    mysqlSessions
	// gone is the client's error for a connection that is gone, and counted what a row counts as that an insert finds there
	// already, once Check has found out.
	gone    atomic.Pointer[error]
	counted atomic.Uint32
}

// What a row counts as that an insert finds there already.
const (
	countedUnknown  uint32 = iota
	countedAsNone          // as it should be
	countedAsChange        // where clientFoundRows is set in the DSN
)

var (
	_ Store[*sql.Tx] = (*MySQL)(nil)
	_ Parker         = (*MySQL)(nil)
)

// NewMySQL makes a store of a handle, which stays the caller's. It does no I/O: see Check. An error means that an option
// cannot work. No parameter of the DSN is needed; advisable are those against a network that swallows everything:
//
//	app:secret@tcp(db:3306)/app?timeout=5s&readTimeout=60s&writeTimeout=60s
func NewMySQL(db *sql.DB, opts MySQLOptions) (*MySQL, error) {
	if db == nil {
		return nil, errors.New("receipts: NewMySQL was given a nil *sql.DB: open one with github.com/go-sql-driver/mysql")
	}
	prefix, err := tablePrefix(opts.TablePrefix)
	if err != nil {
		return nil, err
	}
	migrations, err := migrationsOf("mysql", prefix)
	if err != nil {
		return nil, err
	}
	s := &MySQL{q: newMySQLQueries(prefix), savepoints: opts.Savepoints, allowUnsafe: opts.AllowUnsafeSync}
	s.sqlServer = newServer(sqlHandle{
		budgets: &budgets{},
		db:      db, prefix: prefix, classify: s.Classify,
		lists: newListQueries(prefix, "NULL"), schema: newMySQLSchema(prefix, len(migrations)),
	}, s, sql.LevelDefault, "START TRANSACTION")
	return s, nil
}

// Resolve kills the session of the transaction where this store knows it, and puts a marker without claims in its place: a
// fence. The marker's key makes it wait for the old transaction's end, until ctx ends; once the fence is committed, a COMMIT that
// arrives late fails. The fence stays, as any marker does.
func (s *MySQL) Resolve(ctx context.Context, nonce Nonce) (committed bool, err error) {
	return s.outcome(ctx, nonce, func(ctx context.Context, conn *sql.Conn) (bool, error) {
		server, err := s.server(ctx, conn)
		if err != nil {
			return false, err
		}
		q := (&mysqlText{}).raw(s.q.marker).raw(" VALUES (").bytes(nonce[:]).raw(",0,").number(time.Now().UnixMicro()).raw(")").raw(mysqlKeepMarker)
		waiting := func(statement string) error {
			_, err := conn.ExecContext(ctx, statement)
			return err
		}
		if err := s.waiting(server, lockWait(ctx, 0), q.String(), waiting); err != nil {
			return false, err
		}
		// The first look at the tables in this transaction, so that it sees what was committed while the insert waited.
		var claims int64
		if err := conn.QueryRowContext(ctx, (&mysqlText{}).raw(s.q.fenced).bytes(nonce[:]).String()).Scan(&claims); err != nil {
			return false, fmt.Errorf("reading the marker: %w", err)
		}
		return claims > 0, nil
	})
}

// kill ends a session. Sessions' numbers are not used again, and the connection of one that is killed is not given back: see
// mysqlFlow.session.
func (s *MySQL) kill(ctx context.Context, old session) error {
	return s.read(ctx, func(conn *sql.Conn) error {
		_, err := conn.ExecContext(ctx, fmt.Sprintf("KILL %d", old.id))
		return err
	})
}

// MarkSent marks all refs in one transaction. One that is marked already keeps its time; one that is not there is nil.
func (s *MySQL) MarkSent(ctx context.Context, refs []OutputRef, at time.Time) error {
	if len(refs) == 0 {
		return nil
	}
	sorted := slices.Clone(refs)
	slices.SortFunc(sorted, func(a, b OutputRef) int {
		return cmp.Or(bytes.Compare(a.Nonce[:], b.Nonce[:]), cmp.Compare(a.Position, b.Position))
	})
	err := s.write(ctx, func(ctx context.Context, conn *sql.Conn) error {
		for rest := sorted; len(rest) > 0; {
			n := 1
			for n < len(rest) && n < mysqlRows && rest[n].Nonce == rest[0].Nonce {
				n++
			}
			q := &mysqlText{}
			q.raw(s.q.markSent).number(at.UnixMicro()).raw(" WHERE sent_at IS NULL AND nonce = ").bytes(rest[0].Nonce[:]).
				raw(" AND position IN (").list(n, func(i int) { q.number(int64(rest[i].Position)) }).raw(")")
			if _, err := conn.ExecContext(ctx, q.String()); err != nil {
				return err
			}
			rest = rest[n:]
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("receipts: marking %d outputs as sent: %w", len(refs), err)
	}
	return nil
}

// Park stores messages of failing order keys. Their payloads are not retained. Transactions that park queue up, so that
// positions become visible in their order.
func (s *MySQL) Park(ctx context.Context, messages []Parked) error {
	if len(messages) == 0 {
		return nil
	}
	rows := make([][]any, len(messages))
	for i := range messages {
		var err error
		if rows[i], err = parkedArgs(&messages[i]); err != nil {
			return fmt.Errorf("receipts: parking %d messages: %w", len(messages), err)
		}
	}
	err := s.write(ctx, func(ctx context.Context, conn *sql.Conn) error {
		if _, err := conn.ExecContext(ctx, s.q.parkOrder); err != nil {
			return err
		}
		return mysqlInserts(s.q.park, mysqlKeepParked, rows, func(query string, args ...any) error {
			_, err := conn.ExecContext(ctx, query, args...)
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("receipts: parking %d messages: %w", len(messages), err)
	}
	return nil
}

// Unpark deletes parked messages, all in one transaction.
func (s *MySQL) Unpark(ctx context.Context, positions []int64) error {
	if len(positions) == 0 {
		return nil
	}
	sorted := slices.Sorted(slices.Values(positions))
	err := s.write(ctx, func(ctx context.Context, conn *sql.Conn) error {
		for chunk := range slices.Chunk(sorted, mysqlRows) {
			q := &mysqlText{}
			q.raw(s.q.unpark).list(len(chunk), func(i int) { q.number(chunk[i]) }).raw(")")
			if _, err := conn.ExecContext(ctx, q.String()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("receipts: deleting %d parked messages: %w", len(positions), err)
	}
	return nil
}
