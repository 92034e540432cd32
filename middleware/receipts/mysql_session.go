package receipts

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"reflect"
	"sync"
	"time"
)

// mysqlKnown is what the store has to know of its server.
type mysqlKnown struct {
	version string
	mariadb bool
}

// server asks the server what it is, once.
func (s *MySQL) server(ctx context.Context, conn *sql.Conn) (*mysqlKnown, error) {
	if known := s.known.Load(); known != nil {
		return known, nil
	}
	known := &mysqlKnown{}
	err := conn.QueryRowContext(ctx, "SELECT version(), version() LIKE '%mariadb%'").Scan(&known.version, &known.mariadb)
	if err != nil {
		return nil, err
	}
	s.known.Store(known)
	return known, nil
}

// settings gives the statements that make a session ready for a transaction with this budget, and put back what it was. What it
// was is kept in variables of the session, so that each is one round trip. The isolation is the next transaction's only, because
// it is set without the word SESSION.
func (k *mysqlKnown) settings(budget time.Duration) (set, restore string) {
	isolation := "transaction_isolation"
	if k.mariadb {
		isolation = "tx_isolation" // the only name before 11.1
	}
	set = "SET @penstock_autocommit = @@autocommit, autocommit = 0, @@" + isolation + " = 'READ-COMMITTED'"
	restore = "SET autocommit = @penstock_autocommit"
	if budget <= 0 {
		return set, restore
	}
	idle := seconds(budget) + 1 // the client is first
	if !k.mariadb {
		set += fmt.Sprintf(", @penstock_wait = @@wait_timeout, wait_timeout = least(@@wait_timeout, %d)", idle)
		return set, restore + ", wait_timeout = @penstock_wait"
	}
	set += fmt.Sprintf(", @penstock_idle = @@idle_transaction_timeout, idle_transaction_timeout = %d"+
		", @penstock_statement = @@max_statement_time"+
		", max_statement_time = if(@@max_statement_time > 0 AND @@max_statement_time < %[2]f, @@max_statement_time, %[2]f)",
		idle, max(budget.Seconds(), 0.001))
	return set, restore + ", idle_transaction_timeout = @penstock_idle, max_statement_time = @penstock_statement"
}

// seconds rounds up, to 1 at least.
func seconds(d time.Duration) int64 { return max(1, int64(math.Ceil(d.Seconds()))) }

// waiting runs a statement that waits for a lock no longer than a time; 0 is as long as the session does. Servers count the
// waiting for locks in whole seconds. MariaDB can be told how long the statement may take instead; where that was not enough, it
// is asked once more, not to wait at all, which tells a lock from a slow machine.
func (s *MySQL) waiting(k *mysqlKnown, limit time.Duration, statement string, exec func(statement string) error) error {
	if limit <= 0 {
		return exec(statement)
	}
	if k.mariadb {
		err := exec(fmt.Sprintf("SET STATEMENT max_statement_time = %f FOR %s", max(limit.Seconds(), 0.001), statement))
		if s.number(err) == mariadbStatementTime {
			err = exec("SET STATEMENT innodb_lock_wait_timeout = 0 FOR " + statement)
		}
		return err
	}
	err := exec(fmt.Sprintf("SET @penstock_lock = @@innodb_lock_wait_timeout, innodb_lock_wait_timeout = %d", seconds(limit)))
	if err == nil {
		err = exec(statement)
	}
	if err == nil {
		err = exec("SET innodb_lock_wait_timeout = @penstock_lock")
	}
	return err
}

// mysqlSessions remembers the server's number of each connection's session.
type mysqlSessions struct {
	mu sync.Mutex
	on map[any]int64
}

// sessionOf gives the server's number of a connection's session. It asks once for each connection; those of connections that
// were closed are forgotten from time to time, together with the others.
func (s *MySQL) sessionOf(ctx context.Context, conn *sql.Conn) (id int64, err error) {
	var on any
	err = conn.Raw(func(driverConn any) error {
		if t := reflect.TypeOf(driverConn); t != nil && t.Comparable() {
			on = driverConn
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	if id, ok := s.sessions.get(on); ok {
		return id, nil
	}
	if err := conn.QueryRowContext(ctx, "SELECT connection_id()").Scan(&id); err != nil {
		return 0, err
	}
	s.sessions.add(on, id, s.db.Stats().OpenConnections)
	return id, nil
}

func (m *mysqlSessions) get(on any) (id int64, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	id, ok = m.on[on]
	return id, ok
}

func (m *mysqlSessions) add(on any, id int64, open int) {
	if on == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.on == nil || len(m.on) > 8+2*open {
		m.on = map[any]int64{}
	}
	m.on[on] = id
}
