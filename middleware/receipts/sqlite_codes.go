package receipts

import (
	"database/sql"
	"database/sql/driver"
	"errors"
	"reflect"
	"strings"
)

// The primary result codes of SQLite that the store decides by. Source: https://www.sqlite.org/rescode.html
const (
	sqliteError      = 1
	sqliteBusy       = 5
	sqliteLocked     = 6
	sqliteNoMem      = 7
	sqliteReadOnly   = 8
	sqliteIOErr      = 10
	sqliteCorrupt    = 11
	sqliteFull       = 13
	sqliteCantOpen   = 14
	sqliteProtocol   = 15
	sqliteConstraint = 19
	sqliteNotADB     = 26

	// A COMMIT that the commit hook refused.
	sqliteConstraintCommitHook = 531

	// An extended code keeps its primary code in the low byte.
	sqlitePrimaryMask = 0xff
)

// Classify tells by result code whose failure an error is: the BUSY family, LOCKED and a lock that did not come free by
// the context's deadline are contention; READONLY, FULL, IOERR, CANTOPEN, CORRUPT, NOTADB, NOMEM, a dead connection and a
// pool without a free one are an outage; a COMMIT that the store's hook refused has ended its transaction; everything else is
// not the database's availability. Of several wrapped errors the
// first that says something counts. It does no I/O and is safe for concurrent use.
func (s *SQLite) Classify(err error) Class {
	class := ClassOther
	walkErrors(err, func(e error) bool {
		class = s.classifyOne(e)
		return class == ClassOther
	})
	return class
}

func (s *SQLite) classifyOne(err error) Class {
	//nolint:errorlint // walkErrors takes the chain apart
	if c, ok := err.(*classedError); ok {
		return c.class
	}
	if err == driver.ErrBadConn || err == sql.ErrConnDone { //nolint:errorlint // as above
		return ClassOutage
	}
	code, ok := s.codeOf(err)
	if !ok {
		return ClassOther
	}
	if code == sqliteConstraintCommitHook && !s.leaveHook {
		return ClassEnded
	}
	switch code & sqlitePrimaryMask {
	case sqliteBusy, sqliteLocked, sqliteProtocol:
		return ClassContention
	case sqliteReadOnly, sqliteFull, sqliteIOErr, sqliteCantOpen, sqliteCorrupt, sqliteNotADB, sqliteNoMem:
		return ClassOutage
	default:
		return ClassOther
	}
}

// primaryCode gives the first result code in err's chain.
func (s *SQLite) primaryCode(err error) (code int, ok bool) {
	walkErrors(err, func(e error) bool {
		code, ok = s.codeOf(e)
		return !ok
	})
	return code & sqlitePrimaryMask, ok
}

// walkErrors calls f for err and everything it wraps, outermost first, until f returns false.
func walkErrors(err error, f func(error) bool) bool {
	if err == nil {
		return true
	}
	if !f(err) {
		return false
	}
	switch e := err.(type) { //nolint:errorlint // this is the walk that errors.As would do
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			if !walkErrors(inner, f) {
				return false
			}
		}
		return true
	default:
		return walkErrors(errors.Unwrap(err), f)
	}
}

// codeByShape finds the result code of one error, not of what it wraps, in the shapes of the known drivers, so that none
// of them is imported: modernc and ncruces have methods, mattn has fields. The error's type must come from a SQLite
// package: many errors have a code, and a 5 of another library is not SQLITE_BUSY.
func codeByShape(err error) (code int, ok bool) {
	v := reflect.ValueOf(err)
	t := v.Type()
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if !strings.Contains(t.PkgPath(), "sqlite") && !strings.Contains(t.PkgPath(), "sqlcipher") {
		return 0, false
	}
	for _, name := range [...]string{"ExtendedCode", "Code"} {
		if code, ok := codeFromMethod(v, name); ok {
			return code, true
		}
	}
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return 0, false
		}
		v = v.Elem()
	}
	if v.Kind() != reflect.Struct {
		return 0, false
	}
	for _, name := range [...]string{"ExtendedCode", "Code"} {
		if code, ok := integer(v.FieldByName(name)); ok && code != 0 {
			return code, true
		}
	}
	return 0, false
}

func codeFromMethod(v reflect.Value, name string) (code int, ok bool) {
	m := v.MethodByName(name)
	if !m.IsValid() || m.Type().NumIn() != 0 || m.Type().NumOut() != 1 {
		return 0, false
	}
	if v.Kind() == reflect.Pointer && v.IsNil() {
		return 0, false
	}
	return integer(m.Call(nil)[0])
}

func integer(v reflect.Value) (n int, ok bool) {
	switch {
	case !v.IsValid():
		return 0, false
	case v.CanInt():
		return int(v.Int()), true
	case v.CanUint():
		return int(v.Uint()), true //nolint:gosec // result codes fit 32 bits
	default:
		return 0, false
	}
}
