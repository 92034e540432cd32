package receipts

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"reflect"
	"strings"
)

// The SQLSTATEs that the store decides by. Source: https://www.postgresql.org/docs/15/errcodes-appendix.html
const (
	pgDivisionByZero    = "22012"
	pgUniqueViolation   = "23505"
	pgCheckViolation    = "23514"
	pgNoTransaction     = "25P01"
	pgFailedTransaction = "25P02"
	pgReadOnly          = "25006"
	pgIdleTimeout       = "25P03"
	pgTxTimeout         = "25P04"
	pgNoSavepoint       = "3B001"
	pgSerialization     = "40001"
	pgUnknownStatement  = "40003"
	pgDeadlock          = "40P01"
	pgPrivilege         = "42501"
	pgLockTimeout       = "55P03"
	pgQueryCanceled     = "57014"
	pgNotSupported      = "0A000"
	pgDataCorrupted     = "XX001"
	pgIndexCorrupted    = "XX002"
)

// sqlState gives the SQLSTATE of the first error in err's chain that has one. pgx and lib/pq have the same method for it.
func sqlState(err error) (code string, ok bool) {
	walkErrors(err, func(e error) bool {
		var s interface{ SQLState() string }
		if s, ok = e.(interface{ SQLState() string }); ok {
			code = s.SQLState()
			ok = len(code) == 5
		}
		return !ok
	})
	return code, ok
}

// pgClass gives the class of a SQLSTATE.
func pgClass(code string) Class {
	switch code {
	case pgSerialization, pgDeadlock, pgLockTimeout:
		return ClassContention
	case pgReadOnly, pgDataCorrupted, pgIndexCorrupted, "57P01", "57P02", "57P03", "57P05", "3D000":
		return ClassOutage
	}
	switch code[:2] {
	case "08", "28", "53", "58": // connection, login, resources, the system below
		return ClassOutage
	default:
		return ClassOther
	}
}

// pgEnded tells whether a statement of the store failed because the transaction is not open any more, or because an earlier
// error in it was ignored.
func pgEnded(code string) bool {
	return code == pgNoTransaction || code == pgFailedTransaction || code == pgNoSavepoint
}

// Classify tells by SQLSTATE whose failure an error is: 40001, 40P01 and 55P03 are contention; the classes 08, 28, 53, 58, a
// server that shuts down or is read-only, corruption, and a connection that was refused or lost are an outage; everything else
// is not the database's availability. A connection that was closed because a statement's context ended is that context's
// doing. Errors of the network count only where the database's client says so: a handler may have other connections. Of several
// wrapped errors the first that says something counts. It does no I/O and is safe for concurrent use.
func (s *Postgres) Classify(err error) Class {
	class, client := ClassOther, false
	walkErrors(err, func(e error) bool {
		var decided bool
		class, decided = classifyPg(e, &client)
		return !decided
	})
	return class
}

// classifyPg looks at one error of a chain. client is true from the first error of a PostgreSQL client, or of the store, on.
func classifyPg(err error, client *bool) (class Class, decided bool) {
	switch e := err.(type) { //nolint:errorlint // walkErrors takes the chain apart
	case *classedError:
		return e.class, true
	case *storeError:
		*client = true
		return ClassOther, false
	case interface{ SQLState() string }:
		if code := e.SQLState(); len(code) == 5 {
			class = pgClass(code)
			return class, true
		}
	}
	of := pgClientType(err)
	*client = *client || of != ""
	switch {
	case of == "connLockError" && errors.Unwrap(err) != nil: // pgx: the connection is closed; without a cause it is only busy
		return ClassOutage, true
	case err == driver.ErrBadConn, err == sql.ErrConnDone: //nolint:errorlint // as above
		return ClassOutage, true
	case !*client:
		return ClassOther, false
	case err == context.DeadlineExceeded, err == context.Canceled: //nolint:errorlint // as above
		return ClassOther, true
	case err == io.EOF, err == io.ErrUnexpectedEOF, err == net.ErrClosed: //nolint:errorlint // as above
		return ClassOutage, true
	}
	if _, network := err.(net.Error); network { //nolint:errorlint // as above
		// The end of a context may be below it.
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			return ClassOther, true
		}
		return ClassOutage, true
	}
	return ClassOther, false
}

// pgClientType gives the name of an error's type, where that is one of a PostgreSQL client's.
func pgClientType(err error) string {
	t := reflect.TypeOf(err)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if strings.Contains(t.PkgPath(), "/pgx/") || strings.HasSuffix(t.PkgPath(), "/lib/pq") {
		return t.Name()
	}
	return ""
}

// notCommitted tells whether an error of COMMIT proves that nothing was committed: the server said so. A FATAL one may come
// after the commit, so only what PostgreSQL raises before it counts. What pgx says of an error, that it is safe to retry, is not
// true for COMMIT: a session that is ended while its COMMIT waits for a standby gives "conn closed", and has committed.
func (s *Postgres) notCommitted(err error) bool {
	code, ok := sqlState(err)
	if !ok {
		return false // pgx says of a COMMIT whose answer was cut off that it is safe to try again
	}
	switch code {
	case pgUnknownStatement, pgIdleTimeout, pgTxTimeout:
		return false
	case pgLockTimeout, pgQueryCanceled:
		return true
	}
	switch code[:2] {
	case "0A", "21", "22", "23", "25", "2D", "39", "40", "42", "44", "P0":
		return true
	default:
		return false
	}
}

func (s *Postgres) hasEnded(err error) bool {
	code, ok := sqlState(err)
	return ok && pgEnded(code)
}
