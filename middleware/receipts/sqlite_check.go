package receipts

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	// checkTimeout bounds Check where the caller's context has no deadline.
	checkTimeout = 10 * time.Second

	// sqliteMinVersion has STRICT tables and RETURNING. Source: https://www.sqlite.org/stricttables.html
	sqliteMinVersion = "3.37.0"

	syncOff    = 0
	syncNormal = 1

	remedyTxlock = "open the handle with _txlock=immediate in the DSN (file:app.db?_txlock=immediate)"
	remedySync   = "set synchronous to FULL in the DSN (modernc: _pragma=synchronous(FULL); mattn: _synchronous=FULL)"
)

// Check verifies that the handle is a SQLite database whose errors show result codes, that a commit on it is durable, that
// its pool suits it, that its transactions begin as writers, and that the tables are there. It warns where nothing keeps a
// handler from committing. It takes the write lock for a moment and writes nothing; where another process holds the lock it
// tries again until ctx ends, 10 seconds at most where ctx has no deadline.
func (s *SQLite) Check(ctx context.Context) (Info, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, checkTimeout)
		defer cancel()
	}
	info := Info{Dialect: "sqlite", Lanes: 1, Parts: true, Pool: s.db.Stats().MaxOpenConnections}
	err := s.check(ctx, &info)
	if err != nil {
		return Info{}, fmt.Errorf("receipts: checking the SQLite handle: %w", err)
	}
	return info, nil
}

func (s *SQLite) check(ctx context.Context, info *Info) error {
	var guarded bool
	err := s.read(ctx, func(conn *sql.Conn) error {
		if err := s.checkVersion(ctx, conn); err != nil {
			return err
		}
		memory, err := s.checkFile(ctx, conn, info)
		if err != nil {
			return err
		}
		return s.checkDurable(ctx, conn, memory, info)
	})
	if err != nil {
		return err
	}
	if err := s.insist(ctx, func() (err error) { guarded, err = s.checkWriter(ctx, info.Pool); return err }); err != nil {
		return err
	}
	if !guarded {
		info.Warnings = append(info.Warnings, s.unguardedWarning())
	}
	return s.insist(ctx, func() error {
		err := s.read(ctx, func(conn *sql.Conn) (err error) {
			if info.Schema, err = s.schemaVersion(ctx, conn); err != nil {
				return err
			}
			return s.tablesThere(ctx, conn)
		})
		if err != nil {
			return err
		}
		return s.prepare(ctx)
	})
}

// checkVersion asks a question that only SQLite answers.
func (s *SQLite) checkVersion(ctx context.Context, conn *sql.Conn) error {
	var version string
	if err := conn.QueryRowContext(ctx, "SELECT sqlite_version()").Scan(&version); err != nil {
		if _, sqlite := s.primaryCode(err); sqlite || s.Classify(err) != ClassOther || ctx.Err() != nil {
			return err
		}
		return fmt.Errorf("it does not answer as a SQLite database: give NewSQLite a *sql.DB with a SQLite driver: %w", err)
	}
	if older(version, sqliteMinVersion) {
		return fmt.Errorf("SQLite %s is too old: %s or newer is needed", version, sqliteMinVersion)
	}
	return nil
}

// older compares dotted numbers.
func older(version, than string) bool {
	var a, b [3]int
	_, _ = fmt.Sscanf(version, "%d.%d.%d", &a[0], &a[1], &a[2])
	_, _ = fmt.Sscanf(than, "%d.%d.%d", &b[0], &b[1], &b[2])
	for i := range a {
		if a[i] != b[i] {
			return a[i] < b[i]
		}
	}
	return false
}

// checkFile tells whether the database lives in memory, which only a pool of one connection can share.
func (s *SQLite) checkFile(ctx context.Context, conn *sql.Conn, info *Info) (memory bool, err error) {
	var file string
	err = conn.QueryRowContext(ctx, "SELECT coalesce(file, '') FROM pragma_database_list WHERE name = 'main'").Scan(&file)
	if err != nil {
		return false, fmt.Errorf("reading the database's file name: %w", err)
	}
	if file != "" {
		return false, nil
	}
	if info.Pool != 1 {
		return true, errors.New("the database lives in memory and the pool may open more than one connection, each of which " +
			"would see a database of its own: call db.SetMaxOpenConns(1), or use a file")
	}
	info.Warnings = append(info.Warnings, "The database lives in memory: receipts and effects are lost when its connection "+
		"closes, and a redelivery after that is applied again. Use a file.")
	return true, nil
}

// checkDurable refuses settings under which a nil from COMMIT does not mean that the transaction survives a power cut.
func (s *SQLite) checkDurable(ctx context.Context, conn *sql.Conn, memory bool, info *Info) error {
	var objects, sync, busy int
	var journal string
	// Some builds set synchronous only when they first see that the file is in WAL mode, hence the read before.
	for _, q := range []struct {
		query string
		into  any
	}{
		{"SELECT count(*) FROM sqlite_schema", &objects},
		{"PRAGMA journal_mode", &journal},
		{"PRAGMA synchronous", &sync},
		{"PRAGMA busy_timeout", &busy},
	} {
		if err := conn.QueryRowContext(ctx, q.query).Scan(q.into); err != nil {
			return fmt.Errorf("%s: %w", q.query, err)
		}
	}
	journal = strings.ToLower(journal)
	if journal == "off" {
		return errors.New("journal_mode is OFF, so that a transaction cannot be rolled back: use WAL or DELETE")
	}
	if memory {
		return nil
	}
	var unsafe string
	switch {
	case sync == syncOff:
		unsafe = "synchronous is OFF, so that a committed transaction may be lost in a power cut: " + remedySync
	case sync == syncNormal && journal == "wal":
		unsafe = "synchronous is NORMAL in WAL mode, so that a committed transaction may be lost in a power cut: " + remedySync
	case journal == "memory":
		unsafe = "journal_mode is MEMORY, so that a process that dies inside a commit damages the file: use WAL or DELETE"
	}
	if unsafe != "" && !s.allowUnsafe {
		return errors.New(unsafe)
	}
	if unsafe != "" {
		info.Warnings = append(info.Warnings, "SQLite: "+unsafe+".")
	}
	if journal != "wal" && unsafe == "" {
		info.Warnings = append(info.Warnings, "journal_mode is "+strings.ToUpper(journal)+", so that one open reader stops every commit: "+
			"use WAL in the DSN (modernc: _pragma=journal_mode(WAL); mattn: _journal_mode=WAL).")
	}
	if busy == 0 {
		info.Warnings = append(info.Warnings, "busy_timeout is 0, so that every meeting with another writer is an error at once: "+
			"set it in the DSN (modernc: _pragma=busy_timeout(5000); mattn: _busy_timeout=5000).")
	}
	return nil
}

// checkWriter begins as Begin does and looks whether that took the write lock, first from inside, which no other process
// can disturb, then, where the pool has room, with a second connection, which must get SQLITE_BUSY.
func (s *SQLite) checkWriter(ctx context.Context, pool int) (guarded bool, err error) {
	var begun *sqliteTx
	err = s.again(func() (err error) {
		begun, err = s.begin(ctx, TxOptions{})
		return err
	})
	if err != nil {
		return false, err
	}
	defer func() { _ = begun.Rollback(context.WithoutCancel(ctx)) }()
	// SQLite refuses a checkpoint with SQLITE_LOCKED on a connection that is inside a transaction of the database, and
	// BEGIN without IMMEDIATE has not entered one yet. Source: https://www.sqlite.org/c3ref/wal_checkpoint_v2.html
	_, err = begun.tx.ExecContext(begun.ctx, "PRAGMA main.wal_checkpoint(PASSIVE)")
	if err == nil {
		return false, errors.New("its transactions do not begin as writers: a handler that reads before it writes would be refused " +
			"whatever busy_timeout says: " + remedyTxlock)
	}
	code, ok := s.primaryCode(err)
	if !ok {
		return false, fmt.Errorf("its driver's errors show no result code: set SQLiteOptions.ErrorCode: %w", err)
	}
	if code != sqliteLocked {
		return false, fmt.Errorf("looking whether the transaction is a writer: %w", err)
	}
	if err := s.checkWritable(ctx, begun.tx); err != nil {
		return false, err
	}
	if pool != 1 {
		if err := s.checkSecondWriter(ctx); err != nil {
			return false, err
		}
	}
	return begun.checkHook()
}

// checkHook tries to commit behind the store's back: the hook has to turn that into a rollback. Where it does not, nothing
// is committed that was not there before.
func (t *sqliteTx) checkHook() (guarded bool, err error) {
	if t.hook == nil {
		return false, nil
	}
	_, err = t.tx.ExecContext(t.ctx, "COMMIT")
	if errors.Is(err, driver.ErrBadConn) {
		return false, err
	}
	return err != nil && t.hook.refused(), nil
}

func (s *SQLite) unguardedWarning() string {
	why := "Its driver's connections do not show SQLite's commit hook"
	if s.leaveHook {
		why = "SQLiteOptions.LeaveCommitHook is set"
	}
	return why + ", so that a handler that commits or rolls back its transaction, or ignores an error that did, is found but not " +
		"prevented: what it wrote may stay, and its batch is diverted."
}

// checkWritable writes a value that is there already, to be rolled back: on a read-only file BEGIN IMMEDIATE succeeds.
func (s *SQLite) checkWritable(ctx context.Context, tx *sql.Tx) error {
	detached := context.WithoutCancel(ctx)
	var version int
	if err := tx.QueryRowContext(detached, "PRAGMA main.user_version").Scan(&version); err != nil {
		return fmt.Errorf("PRAGMA user_version: %w", err)
	}
	if _, err := tx.ExecContext(detached, fmt.Sprintf("PRAGMA main.user_version = %d", version)); err != nil {
		return fmt.Errorf("the database cannot be written: %w", err)
	}
	return nil
}

// checkSecondWriter expects to be refused while a transaction of the store is open.
func (s *SQLite) checkSecondWriter(ctx context.Context) error {
	return s.read(ctx, func(conn *sql.Conn) error {
		detached := context.WithoutCancel(ctx)
		var busy int
		if err := conn.QueryRowContext(detached, "PRAGMA busy_timeout").Scan(&busy); err != nil {
			return fmt.Errorf("PRAGMA busy_timeout: %w", err)
		}
		// Without it the answer would take as long as busy_timeout says.
		if _, err := conn.ExecContext(detached, "PRAGMA busy_timeout = 0"); err != nil {
			return fmt.Errorf("PRAGMA busy_timeout: %w", err)
		}
		_, err := conn.ExecContext(detached, "BEGIN IMMEDIATE")
		clean := s.clean(detached, conn)
		if _, restoreErr := conn.ExecContext(detached, fmt.Sprintf("PRAGMA busy_timeout = %d", busy)); restoreErr != nil || !clean {
			discard(conn)
		}
		if err == nil {
			return errors.New("a second transaction could begin as a writer beside the first: " + remedyTxlock +
				", and use one database file for all connections")
		}
		if code, ok := s.primaryCode(err); !ok || code != sqliteBusy && code != sqliteLocked {
			return fmt.Errorf("beginning a second transaction: %w", err)
		}
		return nil
	})
}
