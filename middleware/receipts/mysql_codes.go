package receipts

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"io"
	"net"
	"reflect"
	"strings"
)

// The server's error numbers that the store decides by.
// Source: https://mariadb.com/kb/en/mariadb-error-code-reference/ and MySQL's server error reference.
const (
	mysqlReadOnlyOption   = 1290 // ER_OPTION_PREVENTS_STATEMENT: --read-only
	mysqlLockWaitTimeout  = 1205
	mysqlDeadlock         = 1213
	mysqlInTransaction    = 1568 // ER_CANT_CHANGE_TX_CHARACTERISTICS
	mysqlNoSavepoint      = 1305 // ER_SP_DOES_NOT_EXIST, also said of a savepoint
	mysqlReadCommittedLog = 1665 // ER_BINLOG_STMT_MODE_AND_ROW_ENGINE
	mysqlReadOnlyMode     = 1836
	mariadbStatementTime  = 1969 // max_statement_time is over
)

// mysqlClass tells what a number means.
func mysqlClass(number int) Class {
	switch number {
	case mysqlDeadlock, mysqlLockWaitTimeout,
		1020,       // the record has changed since last read (MariaDB's innodb_snapshot_isolation)
		1317,       // the statement was interrupted by an administrator
		1614, 1689, // deadlocks of XA and of table locks
		3058, 3572: // of user-level locks; NOWAIT
		return ClassContention
	case mysqlReadOnlyOption, mysqlReadOnlyMode, 1792, // read-only
		1021, 1114, 1026, 1030, // disk or table full, errors of storage
		1037, 1038, 1041, 1135, // out of memory or threads
		1040, 1203, 1226, 1129, // too many connections, blocked
		1045, 1698, // the login is refused: nobody's message can help it
		1047,             // not a member of the cluster yet
		1053, 1077, 1079, // shutting down
		1158, 1159, 1160, 1161, 1184, // network
		1927, // the connection was killed
		3169, // the session was killed
		4031: // the client was idle for too long
		return ClassOutage
	default:
		return ClassOther
	}
}

// Classify tells by the server's error number whose failure an error is: deadlocks and lock waits are contention; read-only,
// full, out of memory, out of connections, shutting down, killed, a refused login and a dead connection are an outage. Of
// several wrapped errors the first that says something counts. It does no I/O and is safe for concurrent use.
func (s *MySQL) Classify(err error) Class {
	class := ClassOther
	walkErrors(err, func(e error) bool {
		class = s.classifyOne(e)
		return class == ClassOther
	})
	return class
}

func (s *MySQL) classifyOne(err error) Class {
	//nolint:errorlint // walkErrors takes the chain apart
	switch e := err.(type) {
	case *classedError:
		return e.class
	case *net.OpError:
		return ClassOutage
	}
	if s.isGone(err) {
		return ClassOutage
	}
	if number, ok := mysqlNumber(err); ok {
		return mysqlClass(number)
	}
	return ClassOther
}

// isGone tells whether an error says that the connection is dead. The client's own sentinel for that has no code: the store
// learns it from the client, see learnGone.
func (s *MySQL) isGone(err error) bool {
	//nolint:errorlint // walkErrors takes the chain apart
	if err == driver.ErrBadConn || err == sql.ErrConnDone || err == io.EOF || err == io.ErrUnexpectedEOF {
		return true
	}
	gone := s.gone.Load()
	return gone != nil && reflect.TypeOf(err).Comparable() && err == *gone //nolint:errorlint // as above
}

// learnGone has the client say what it says of a connection that is gone: it does so, too, of a transaction that has ended.
func (s *MySQL) learnGone(driverConn any) {
	begin, ok := driverConn.(driver.ConnBeginTx)
	if !ok || s.gone.Load() != nil {
		return
	}
	tx, err := begin.BeginTx(context.Background(), driver.TxOptions{})
	if err != nil {
		return
	}
	if tx.Rollback() != nil {
		return
	}
	if err := tx.Rollback(); err != nil && reflect.TypeOf(err).Comparable() {
		s.gone.Store(&err)
	}
}

// number gives the first error number in err's chain.
func (s *MySQL) number(err error) (number int) {
	walkErrors(err, func(e error) bool {
		var ok bool
		number, ok = mysqlNumber(e)
		return !ok
	})
	return number
}

// mysqlNumber finds the number of one error, not of what it wraps, in the shape of go-sql-driver/mysql, without importing it: a
// struct MySQLError with a field Number.
func mysqlNumber(err error) (number int, ok bool) {
	v := reflect.ValueOf(err)
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return 0, false
		}
		v = v.Elem()
	}
	if v.Kind() != reflect.Struct || v.Type().Name() != "MySQLError" || !strings.Contains(v.Type().PkgPath(), "mysql") {
		return 0, false
	}
	return integer(v.FieldByName("Number"))
}
