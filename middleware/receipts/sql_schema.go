package receipts

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// migrationFiles holds the numbered migrations, a folder for each dialect. They name tables by the default prefix.
//
//go:embed migrations/*/*.sql
var migrationFiles embed.FS

// Migration is one step of a schema, as a file of SQL that records its version itself.
type Migration struct {
	// Version counts from 1.
	Version int
	// Name is the file's name, "0001_receipts.sql" say.
	Name string
	// SQL is the text, several statements, to be run in one transaction.
	SQL string
}

// schemaQueries are the questions about the tables themselves, in a dialect's words.
type schemaQueries struct {
	// hasSchema counts the tables that record the version: 0 or 1.
	hasSchema string
	// versions gives the latest version and from which version of the code on it can be used.
	versions string
	// missing gives the name of a table that is not there, or no row.
	missing string
	// remedy says how the tables come up to date: "call Migrate, or run the files of SQLiteMigrations".
	remedy string
	// own is the version of this code.
	own int
}

// errSchemaEmpty: the table that records the version has no row.
var errSchemaEmpty = errors.New("no version is recorded")

// migrationsOf gives the migrations of a dialect in order.
func migrationsOf(dialect, prefix string) ([]Migration, error) {
	folder := "migrations/" + dialect
	entries, err := migrationFiles.ReadDir(folder) // sorted
	if err != nil {
		return nil, fmt.Errorf("receipts: listing migrations: %w", err)
	}
	migrations := make([]Migration, 0, len(entries))
	for i, entry := range entries {
		name := entry.Name()
		text, err := migrationFiles.ReadFile(folder + "/" + name)
		if err != nil {
			return nil, fmt.Errorf("receipts: reading a migration: %w", err)
		}
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

// schemaVersion reads the version of the tables. Missing or older ones are ErrSchemaMissing together with the version
// found, ones that this code cannot run on are ErrSchemaNewer.
func (h *sqlHandle) schemaVersion(ctx context.Context, conn *sql.Conn) (version int, err error) {
	q := &h.schema
	var there int
	if err := conn.QueryRowContext(ctx, q.hasSchema).Scan(&there); err != nil {
		return 0, fmt.Errorf("looking for the tables: %w", err)
	}
	if there == 0 {
		return 0, fmt.Errorf("%w: there is no table %sschema: %s", ErrSchemaMissing, h.prefix, q.remedy)
	}
	var compatible int
	err = conn.QueryRowContext(ctx, q.versions).Scan(&version, &compatible)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return 0, fmt.Errorf("%w: table %sschema is empty: restore it, or drop the tables and call Migrate", errSchemaEmpty, h.prefix)
	case err != nil:
		return 0, fmt.Errorf("reading the schema's version: %w", err)
	case version < q.own:
		return version, fmt.Errorf("%w: the schema has version %d, this code needs %d: %s", ErrSchemaMissing, version, q.own, q.remedy)
	case compatible > q.own:
		return version, fmt.Errorf("%w: the schema has version %d, which code from version %d on can use; this code has version %d: upgrade it",
			ErrSchemaNewer, version, compatible, q.own)
	}
	return version, nil
}

// tablesThere looks for the tables of a schema whose version is recorded. A lost one is not made anew: with it are lost the
// receipts that would have recognised what comes again.
func (h *sqlHandle) tablesThere(ctx context.Context, conn *sql.Conn) error {
	var missing string
	switch err := conn.QueryRowContext(ctx, h.schema.missing).Scan(&missing); {
	case errors.Is(err, sql.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("looking for the tables: %w", err)
	}
	return fmt.Errorf("%w: table %s is gone, though %sschema says that it was made: restore it from a backup, or, if what was "+
		"processed may be processed again, drop all tables that begin with %s and call Migrate", ErrSchemaMissing, missing, h.prefix, h.prefix)
}

// migrate brings the tables to this version on a connection that nobody else migrates on at the same time. On newer tables
// that this version can run on it does nothing.
func (h *sqlHandle) migrate(ctx context.Context, conn *sql.Conn, migrations []Migration) error {
	version, err := h.schemaVersion(ctx, conn)
	switch {
	case err == nil:
		return h.tablesThere(ctx, conn)
	case !errors.Is(err, ErrSchemaMissing):
		return err
	}
	for _, m := range migrations[min(version, len(migrations)):] {
		if _, err := conn.ExecContext(ctx, m.SQL); err != nil {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
	}
	return nil
}
