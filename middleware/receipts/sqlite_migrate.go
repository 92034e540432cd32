package receipts

import (
	"context"
	"database/sql"
	"fmt"
)

// SQLiteMigrations gives the migrations in order, for printing or for the user's own tool; running them, each in a
// transaction, does what [SQLite.Migrate] does. prefix is SQLiteOptions.TablePrefix; an error means that it is not valid.
func SQLiteMigrations(prefix string) ([]Migration, error) {
	prefix, err := sqlitePrefix(prefix)
	if err != nil {
		return nil, err
	}
	return migrationsOf("sqlite", prefix)
}

// Migrate brings the tables to this version, all steps in one transaction, waiting for the write lock until ctx ends, so
// that several processes may call it at once. On newer tables that this version can run on it does nothing.
func (s *SQLite) Migrate(ctx context.Context) error {
	migrations, err := SQLiteMigrations(s.prefix)
	if err != nil {
		return err
	}
	err = s.insist(ctx, func() error {
		return s.write(ctx, true, func(ctx context.Context, conn *sql.Conn) error {
			return s.migrate(ctx, conn, migrations)
		})
	})
	if err != nil {
		return fmt.Errorf("receipts: migrating: %w", err)
	}
	return nil
}

// Resolve looks for the marker while it holds the write lock: a session that may still be inside its COMMIT holds that
// lock, so the answer is final. It waits for the lock until ctx ends.
func (s *SQLite) Resolve(ctx context.Context, nonce Nonce) (committed bool, err error) {
	var markers int
	err = s.insist(ctx, func() error {
		return s.write(ctx, false, func(ctx context.Context, conn *sql.Conn) error {
			return conn.QueryRowContext(ctx, s.q.resolve, nonce[:]).Scan(&markers)
		})
	})
	if err != nil {
		return false, fmt.Errorf("receipts: resolving transaction %s: %w", nonce, err)
	}
	return markers == 1, nil
}
