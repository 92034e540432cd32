package receipts

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
)

// mysqlNoUserLocks is what a cluster answers that has no user-level locks.
const mysqlNoUserLocks = 1235

// MySQLMigrations gives the migrations in order, for printing or for the user's own tool; running the statements of each does
// what [MySQL.Migrate] does. They commit by themselves, and may be repeated. prefix is MySQLOptions.TablePrefix; an error means
// that it is not valid.
func MySQLMigrations(prefix string) ([]Migration, error) {
	prefix, err := tablePrefix(prefix)
	if err != nil {
		return nil, err
	}
	return migrationsOf("mysql", prefix)
}

// Migrate brings the tables to this version. Several processes may call it at once: they queue up for a user-level lock, until
// ctx ends. One that is interrupted is repeated from the first statement on. It needs the right to create tables, which the store
// itself does not.
func (s *MySQL) Migrate(ctx context.Context) error {
	migrations, err := migrationsOf("mysql", s.prefix)
	if err != nil {
		return err
	}
	err = s.insist(ctx, func() error {
		return s.read(ctx, func(conn *sql.Conn) error {
			unlock, err := s.lockSchema(ctx, conn)
			if err != nil {
				return err
			}
			defer unlock()
			return s.migrateMySQL(ctx, conn, migrations)
		})
	})
	if err != nil {
		return fmt.Errorf("receipts: migrating: %w", err)
	}
	return nil
}

// lockSchema waits for the right to migrate.
func (s *MySQL) lockSchema(ctx context.Context, conn *sql.Conn) (unlock func(), err error) {
	const name = "concat('penstock ', md5(concat(database(), '.', ?)))"
	var got sql.NullInt64
	err = conn.QueryRowContext(ctx, "SELECT get_lock("+name+", ?)", s.prefix, seconds(lockWait(ctx, checkTimeout))).Scan(&got)
	switch {
	case s.number(err) == mysqlNoUserLocks:
		return func() {}, nil // the statements can be run by several at once, too
	case err != nil:
		return nil, err
	case got.Int64 != 1:
		return nil, &classedError{class: ClassContention, what: "another process is migrating", err: errors.New("the lock did not come free")}
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		if _, err := conn.ExecContext(ctx, "DO release_lock("+name+")", s.prefix); err != nil {
			discard(conn)
		}
	}, nil
}

// migrateMySQL is migrate for a client that sends one statement at a time.
func (s *MySQL) migrateMySQL(ctx context.Context, conn *sql.Conn, migrations []Migration) error {
	version, err := s.schemaVersion(ctx, conn)
	switch {
	case err == nil:
		return s.tablesThere(ctx, conn)
	case !errors.Is(err, ErrSchemaMissing) && !errors.Is(err, errSchemaEmpty): // empty: one was interrupted
		return err
	}
	for _, m := range migrations[min(version, len(migrations)):] {
		for _, statement := range mysqlStatements(m.SQL) {
			if _, err := conn.ExecContext(ctx, statement); err != nil {
				return fmt.Errorf("%s: %w", m.Name, err)
			}
		}
	}
	_, err = conn.ExecContext(ctx, "COMMIT") // of the version's row, where the DSN turns autocommit off
	return err
}
