package receipts

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
)

// SQLiteOptions configures the store on SQLite; the zero value is right for modernc.org/sqlite and
// github.com/mattn/go-sqlite3.
type SQLiteOptions struct {
	// TablePrefix starts the name of every table and index: letters, digits and underscores, at most 48. "" means
	// "penstock_".
	TablePrefix string

	// ErrorCode gives SQLite's result code, extended or primary, of exactly this error, not of what it wraps. nil: the
	// shapes of the errors of modernc, mattn and ncruces are known. Check refuses a handle whose errors show no code.
	ErrorCode func(err error) (code int, ok bool)

	// AllowUnsafeSync lets Check accept settings under which a committed transaction may be lost when the machine goes
	// down (synchronous OFF, or NORMAL in WAL mode) or the file may be damaged (journal_mode MEMORY), with a warning.
	AllowUnsafeSync bool

	// LeaveCommitHook leaves SQLite's commit hook to the application. A connection has one. While a transaction of the store
	// is open the store keeps it, so that only the store commits, and an application's own is lost, with mattn until the
	// connection is closed. Without it a handler that ends its transaction is found, but what it committed stays. Check warns.
	LeaveCommitHook bool
}

// SQLite is the [Store] on SQLite, for any *sql.DB with a SQLite driver whose transactions begin as writers (in the DSN:
// _txlock=immediate). It is safe for concurrent use. SQLite has one writer: more than one transaction at a time only waits.
//
// While a transaction is open, the store holds the commit hook of its connection and refuses every COMMIT but its own, so
// that what a handler commits, or writes after an error that rolled back, is rolled back by SQLite instead. The handler gets
// SQLITE_CONSTRAINT_COMMITHOOK, which is ClassEnded, and the store says ErrTxEnded. That needs a driver whose connections
// show the hook, as those of modernc, mattn and ncruces do; Check warns where it does not work. One store is enough for a
// handle, however many middlewares use it: with mattn, two take the hook from each other.
type SQLite struct {
	sqlHandle

	codeOf      func(error) (int, bool)
	allowUnsafe bool
	leaveHook   bool
	q           sqliteQueries

	prepared atomic.Pointer[sqlitePrepared]
	hooks    commitHooks
}

var _ Store[*sql.Tx] = (*SQLite)(nil)

// NewSQLite makes a store of a handle, which stays the caller's. It does no I/O: see Check. An error means that an option
// cannot work. Data source names that Check accepts, for a file:
//
//	modernc.org/sqlite          file:app.db?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)
//	github.com/mattn/go-sqlite3 file:app.db?_txlock=immediate&_busy_timeout=5000&_journal_mode=WAL&_synchronous=FULL
func NewSQLite(db *sql.DB, opts SQLiteOptions) (*SQLite, error) {
	if db == nil {
		return nil, errors.New("receipts: NewSQLite was given a nil *sql.DB: open one with a SQLite driver")
	}
	prefix, err := sqlitePrefix(opts.TablePrefix)
	if err != nil {
		return nil, err
	}
	codeOf := opts.ErrorCode
	if codeOf == nil {
		codeOf = codeByShape
	}
	migrations, err := migrationsOf("sqlite", prefix)
	if err != nil {
		return nil, err
	}
	s := &SQLite{
		codeOf: codeOf, allowUnsafe: opts.AllowUnsafeSync, leaveHook: opts.LeaveCommitHook, q: newSQLiteQueries(prefix),
	}
	s.sqlHandle = sqlHandle{
		budgets: &budgets{},
		db:      db, prefix: prefix, lists: newListQueries(prefix, "NULL"), schema: newSQLiteSchema(prefix, len(migrations)), classify: s.Classify,
	}
	return s, nil
}

// sqlitePrefix validates a table prefix, which is pasted into SQL text.
func sqlitePrefix(prefix string) (string, error) {
	prefix, err := tablePrefix(prefix)
	if err != nil {
		return "", err
	}
	if strings.HasPrefix(strings.ToLower(prefix), "sqlite_") {
		return "", fmt.Errorf("receipts: table prefix %q: SQLite keeps names starting with sqlite_ to itself", prefix)
	}
	return prefix, nil
}

// write runs f in a short transaction of the store itself, begun as a writer whatever the DSN says, and ends it as keep
// says. f may run more than once, even after a COMMIT whose answer was lost, so doing it twice must be the same. f gets a
// context that is not cancelled: SQLite ends a transaction whose statement is interrupted.
func (s *SQLite) write(ctx context.Context, keep bool, f func(ctx context.Context, conn *sql.Conn) error) error {
	return s.again(func() error { return s.writeOnce(ctx, keep, f) })
}

func (s *SQLite) writeOnce(ctx context.Context, keep bool, f func(ctx context.Context, conn *sql.Conn) error) error {
	conn, err := s.conn(ctx)
	if err != nil {
		return err
	}
	detached := context.WithoutCancel(ctx)
	stop, err := await(ctx, func(ctx context.Context) error {
		_, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE")
		return err
	}, func() { s.release(detached, conn, nil) })
	if err != nil {
		return lockWaitError(err)
	}
	defer stop()
	end := "ROLLBACK"
	if err = f(detached, conn); err == nil && keep {
		end = "COMMIT"
	}
	if _, endErr := conn.ExecContext(detached, end); endErr != nil {
		s.release(detached, conn, endErr)
		if err == nil {
			err = fmt.Errorf("%s: %w", end, endErr)
		}
		return err
	}
	_ = conn.Close()
	return err
}

// lockWaitError gives a deadline the meaning it has here; a cancelled caller has none.
func lockWaitError(err error) error {
	if err == context.DeadlineExceeded { //nolint:errorlint // as it comes from await, not from a driver
		return &classedError{class: ClassContention, what: "waiting for SQLite's write lock", err: err}
	}
	return err
}

// release gives a connection back in a clean state, or closes it for good. ended is the error with which the statement
// that ended its transaction failed; nil means there may be one open, or none.
func (s *SQLite) release(ctx context.Context, conn *sql.Conn, ended error) {
	if errors.Is(ended, driver.ErrBadConn) || !s.clean(ctx, conn) {
		discard(conn)
	}
	_ = conn.Close()
}

// clean makes sure that no transaction is open on a connection. SQLite answers a ROLLBACK outside a transaction with
// SQLITE_ERROR, which is as good as success here.
func (s *SQLite) clean(ctx context.Context, conn *sql.Conn) bool {
	_, err := conn.ExecContext(ctx, "ROLLBACK")
	if err == nil {
		return true
	}
	code, ok := s.primaryCode(err)
	return ok && code == sqliteError
}
