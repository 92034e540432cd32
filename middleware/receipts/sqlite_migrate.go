package receipts

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// sqliteFiles holds the numbered migrations. They name tables by the default prefix.
//
//go:embed migrations/sqlite/*.sql
var sqliteFiles embed.FS

// Migration is one step of a schema, as a file of SQL that records its version itself.
type Migration struct {
	// Version counts from 1.
	Version int
	// Name is the file's name, "0001_receipts.sql" say.
	Name string
	// SQL is the text, several statements, to be run in one transaction.
	SQL string
}

// SQLiteMigrations gives the migrations in order, for printing or for the user's own tool; running them, each in a
// transaction, does what [SQLite.Migrate] does. prefix is SQLiteOptions.TablePrefix; an error means that it is not valid.
func SQLiteMigrations(prefix string) ([]Migration, error) {
	prefix, err := sqlitePrefix(prefix)
	if err != nil {
		return nil, err
	}
	names, err := fs.Glob(sqliteFiles, "migrations/sqlite/*.sql") // sorted
	if err != nil {
		return nil, fmt.Errorf("receipts: listing migrations: %w", err)
	}
	migrations := make([]Migration, 0, len(names))
	for i, path := range names {
		text, err := sqliteFiles.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("receipts: reading a migration: %w", err)
		}
		name := path[strings.LastIndexByte(path, '/')+1:]
		version, err := strconv.Atoi(name[:4])
		if err != nil || version != i+1 {
			return nil, fmt.Errorf("receipts: migration %s is not number %d", name, i+1)
		}
		migrations = append(migrations, Migration{
			Version: version, Name: name, SQL: strings.ReplaceAll(string(text), defaultPrefix, prefix),
		})
	}
	return migrations, nil
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
			version, err := s.schemaVersion(ctx, conn, len(migrations))
			switch {
			case err == nil:
				return s.tablesThere(ctx, conn)
			case !errors.Is(err, ErrSchemaMissing):
				return err
			}
			for _, m := range migrations[min(version, len(migrations)):] {
				if _, err := conn.ExecContext(ctx, m.SQL); err != nil {
					return fmt.Errorf("%s: %w", m.Name, err)
				}
			}
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("receipts: migrating: %w", err)
	}
	return nil
}

// schemaVersion reads the version of the tables. Missing or older ones are ErrSchemaMissing together with the version
// found, ones that this code cannot run on are ErrSchemaNewer.
func (s *SQLite) schemaVersion(ctx context.Context, conn *sql.Conn, own int) (version int, err error) {
	var there int
	if err := conn.QueryRowContext(ctx, s.q.hasSchema).Scan(&there); err != nil {
		return 0, fmt.Errorf("looking for the tables: %w", err)
	}
	if there == 0 {
		return 0, fmt.Errorf("%w: there is no table %sschema: call Migrate, or run the files of SQLiteMigrations",
			ErrSchemaMissing, s.prefix)
	}
	var compatible int
	err = conn.QueryRowContext(ctx, s.q.versions).Scan(&version, &compatible)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return 0, fmt.Errorf("table %sschema is empty: restore it, or drop the tables and call Migrate", s.prefix)
	case err != nil:
		return 0, fmt.Errorf("reading the schema's version: %w", err)
	case version < own:
		return version, fmt.Errorf("%w: the schema has version %d, this code needs %d: call Migrate, or run the files of SQLiteMigrations",
			ErrSchemaMissing, version, own)
	case compatible > own:
		return version, fmt.Errorf("%w: the schema has version %d, which code from version %d on can use; this code has version %d: upgrade it",
			ErrSchemaNewer, version, compatible, own)
	}
	return version, nil
}

// tablesThere looks for the tables of a schema whose version is recorded. A lost one is not made anew: with it are lost the
// receipts that would have recognised what comes again.
func (s *SQLite) tablesThere(ctx context.Context, conn *sql.Conn) error {
	var missing string
	switch err := conn.QueryRowContext(ctx, s.q.tables).Scan(&missing); {
	case errors.Is(err, sql.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("looking for the tables: %w", err)
	}
	return fmt.Errorf("%w: table %s is gone, though %sschema says that it was made: restore it from a backup, or, if what was "+
		"processed may be processed again, drop all tables that begin with %s and call Migrate", ErrSchemaMissing, missing, s.prefix, s.prefix)
}

// insist calls f again while another connection holds the lock, until ctx ends. Then the lock is what it reports, not the
// context alone.
func (s *SQLite) insist(ctx context.Context, f func() error) error {
	var contention error
	for {
		err := f()
		if err != nil && ctx.Err() != nil && contention != nil {
			return fmt.Errorf("%w: %w", ctx.Err(), contention)
		}
		if err == nil || s.Classify(err) != ClassContention || ctx.Err() != nil {
			return err
		}
		contention = err
		timer := time.NewTimer(5*time.Millisecond + rand.N(20*time.Millisecond))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
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
