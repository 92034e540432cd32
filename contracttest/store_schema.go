package contracttest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// schemaClauses are about Check and Migrate.
func schemaClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S01", Name: "migrating again",
				Text: "Migrate brings the tables to this version, several processes at once; again, it changes nothing. Check says " +
					"what is missing, and describes a handle that is ready",
			},
			check: migratedAgain[T],
		},
		{
			Clause: Clause{ID: "S01/empty", Name: "the first migration, by several at once", Hooks: []string{"Empty"}},
			check:  migratedFirst[T],
		},
	}
}

// migratedAgain migrates tables that are in use.
func migratedAgain[T any](ctx context.Context, e *storeEnv[T]) error {
	if err := describes(e.info); err != nil {
		return err
	}
	nonce, err := e.commits(ctx, e.a, []string{"kept"}, nil)
	if err != nil {
		return err
	}
	if err := migrateAll(ctx, e.a, e.b); err != nil {
		return err
	}
	info, err := e.b.Check(ctx)
	if err != nil {
		return fmt.Errorf("Check: %w", err)
	}
	if info.Schema != e.info.Schema {
		return fmt.Errorf("Check finds schema %d, and found %d before", info.Schema, e.info.Schema)
	}
	return e.provenHeld(ctx, nonce, "kept")
}

// describes wants what Check found to make sense.
func describes(i receipts.Info) error {
	if i.Dialect == "" || i.Lanes < 1 || i.Schema < 1 || i.ClaimWait < 0 || i.Pool < 0 {
		return fmt.Errorf("Check describes the handle as %+v", i)
	}
	return nil
}

// migrateAll migrates through all handles at once.
func migrateAll[T any](ctx context.Context, stores ...receipts.Store[T]) error {
	errs := make(chan error, len(stores))
	for _, s := range stores {
		go func() { errs <- s.Migrate(ctx) }()
	}
	var all []error
	for range stores {
		if err := <-errs; err != nil {
			all = append(all, fmt.Errorf("Migrate: %w", err))
		}
	}
	return errors.Join(all...)
}

// migratedFirst has several processes find no tables, and make them.
func migratedFirst[T any](ctx context.Context, e *storeEnv[T]) error {
	dir := filepath.Join(e.dir, "empty")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	const processes = 4
	stores := make([]receipts.Store[T], processes)
	for i := range stores {
		db, err := e.s.Empty(ctx, dir)
		if err != nil {
			return fmt.Errorf("the hook Empty: %w", err)
		}
		e.atEnd(db.Close)
		stores[i] = e.wrapped(db.Store)
	}
	if _, err := stores[0].Check(ctx); !errors.Is(err, receipts.ErrSchemaMissing) {
		return fmt.Errorf("without tables Check gave %v, want %q", err, receipts.ErrSchemaMissing) //nolint:errorlint // it is not that one
	}
	if err := migrateAll(ctx, stores...); err != nil {
		return err
	}
	for _, s := range stores {
		info, err := s.Check(ctx)
		if err != nil {
			return fmt.Errorf("Check after Migrate: %w", err)
		}
		if err := describes(info); err != nil {
			return err
		}
	}
	nonce, err := e.commits(ctx, stores[0], []string{"first"}, nil)
	if err != nil {
		return err
	}
	e.b = stores[1]
	return e.provenHeld(ctx, nonce, "first")
}
