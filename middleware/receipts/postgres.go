package receipts

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"
)

// PostgresOptions configures the store on PostgreSQL; the zero value is right.
type PostgresOptions struct {
	// TablePrefix starts the name of every table and index: letters, digits and underscores, at most 48. "" means
	// "penstock_". Tables are found by the role's search_path.
	TablePrefix string

	// Savepoints puts each message of a batch into a savepoint of its own, so that one that fails is undone alone. Without it
	// what ran before a failure runs again, which is cheaper where failures are rare: a savepoint costs two round trips and a
	// transaction id for each message, and more than 64 of them in one transaction slow down everybody else's snapshots.
	Savepoints bool

	// AllowUnsafeSync lets Check accept synchronous_commit = off, under which a committed transaction may be lost when the
	// server goes down, with a warning.
	AllowUnsafeSync bool
}

// Postgres is the [Store] on PostgreSQL 13 and newer, for any *sql.DB whose driver's errors have a method SQLState() string,
// as those of github.com/jackc/pgx/v5/stdlib and github.com/lib/pq do. It is safe for concurrent use.
//
// Everything is bound to one transaction: nothing stays in a session, so that a pooler in transaction mode may stand between,
// as far as the client is set up for one. A transaction holds one connection of the pool from Begin to its end.
//
// A statement of a handler whose context ends closes the connection of its transaction, with either client: the transaction is
// lost then, with all that share it, and what follows in it is [ClassOutage].
type Postgres struct {
	sqlServer

	q           *pgQueries
	savepoints  bool
	allowUnsafe bool
	// prepares: the client prepares statements by itself, and needs one round trip for a statement with values.
	prepares bool
}

var (
	_ Store[*sql.Tx] = (*Postgres)(nil)
	_ Parker         = (*Postgres)(nil)
)

// NewPostgres makes a store of a handle, which stays the caller's. It does no I/O: see Check. An error means that an option
// cannot work.
func NewPostgres(db *sql.DB, opts PostgresOptions) (*Postgres, error) {
	if db == nil {
		return nil, errors.New("receipts: NewPostgres was given a nil *sql.DB: open one with a PostgreSQL driver")
	}
	return newPostgres(sqlHandle{db: db, budgets: &budgets{}}, opts)
}

// NewPostgresOver is NewPostgres for a store that keeps its own connections, as pgxstore does: open makes a handle over them for
// each call, and done closes that again. It has all methods of the store but Begin and Check, which such a store has of its own.
func NewPostgresOver(open func() (db *sql.DB, done func() error), opts PostgresOptions) (*Postgres, error) {
	if open == nil {
		return nil, errors.New("receipts: NewPostgresOver was given a nil func")
	}
	return newPostgres(sqlHandle{open: open}, opts)
}

func newPostgres(handle sqlHandle, opts PostgresOptions) (*Postgres, error) {
	prefix, err := tablePrefix(opts.TablePrefix)
	if err != nil {
		return nil, err
	}
	migrations, err := migrationsOf("postgres", prefix)
	if err != nil {
		return nil, err
	}
	s := &Postgres{q: newPgQueries(prefix), savepoints: opts.Savepoints, allowUnsafe: opts.AllowUnsafeSync}
	s.prepares = handle.db != nil && isPgx(handle.db.Driver())
	handle.prefix, handle.classify = prefix, s.Classify
	handle.lists, handle.schema = newListQueries(prefix, "NULL::bigint").dollars(), newPgSchema(prefix, len(migrations))
	s.sqlServer = newServer(handle, s, sql.LevelReadCommitted, "BEGIN ISOLATION LEVEL READ COMMITTED")
	return s, nil
}

// isPgx knows pgx's driver by its type, so that who uses another one does not compile it. Behind a wrapper it is not known, which
// costs time only.
func isPgx(d driver.Driver) bool {
	t := reflect.TypeOf(d)
	return t.Kind() == reflect.Pointer && strings.HasPrefix(t.Elem().PkgPath(), "github.com/jackc/pgx/")
}

// PostgresMigrations gives the migrations in order, for printing or for the user's own tool; running them, each in a
// transaction, does what [Postgres.Migrate] does. prefix is PostgresOptions.TablePrefix; an error means that it is not valid.
func PostgresMigrations(prefix string) ([]Migration, error) {
	prefix, err := tablePrefix(prefix)
	if err != nil {
		return nil, err
	}
	return migrationsOf("postgres", prefix)
}

// Migrate brings the tables to this version, all steps in one transaction, one process at a time. On newer tables that this
// version can run on it does nothing. Its role needs the right to create tables, unless there is nothing to do.
func (s *Postgres) Migrate(ctx context.Context) error {
	migrations, err := migrationsOf("postgres", s.prefix)
	if err != nil {
		return err
	}
	err = s.insist(ctx, func() error {
		return s.write(ctx, func(ctx context.Context, conn *sql.Conn) error {
			if _, err := conn.ExecContext(ctx, s.q.migrateOrder); err != nil {
				return err
			}
			return s.migrate(ctx, conn, migrations)
		})
	})
	if err != nil {
		return fmt.Errorf("receipts: migrating: %w", err)
	}
	return nil
}

// Resolve ends the session of the transaction where it can be found, and writes a marker without claims in its place: a
// fence. The marker's key makes it wait for the old transaction's end, until ctx ends; once the fence is committed, a COMMIT
// that arrives late fails. The fence stays, as any marker does.
func (s *Postgres) Resolve(ctx context.Context, nonce Nonce) (committed bool, err error) {
	return s.outcome(ctx, nonce, func(ctx context.Context, conn *sql.Conn) (bool, error) {
		if err := exec(ctx, conn, Statement{s.q.fenceWait, []any{lockTimeout(ctx, 0)}}); err != nil {
			return false, err
		}
		result, err := conn.ExecContext(ctx, s.q.fence, nonce[:], time.Now().UnixMicro())
		if err != nil {
			return false, err
		}
		if n, err := result.RowsAffected(); err != nil || n == 1 {
			return false, err
		}
		var claims int
		if err := conn.QueryRowContext(ctx, s.q.fenced, nonce[:]).Scan(&claims); err != nil {
			return false, fmt.Errorf("reading the marker: %w", err)
		}
		return claims > 0, nil
	})
}

// CommitRefused tells whether an error of COMMIT proves that nothing was committed. It is for stores that send COMMIT
// themselves; any other error of it is ErrCommitUnknown.
func (s *Postgres) CommitRefused(err error) bool { return s.notCommitted(err) }

// CommitUnanswered remembers where a transaction was whose COMMIT got no answer, so that Resolve can end its session.
func (s *Postgres) CommitUnanswered(p *PostgresSteps) {
	pid, started, _ := p.Session()
	s.lost.add(p.nonce, session{id: pid, started: started})
}

// kill ends a session that is still in the transaction that it was in.
func (s *Postgres) kill(ctx context.Context, old session) error {
	return s.read(ctx, func(conn *sql.Conn) error {
		return exec(ctx, conn, Statement{s.q.kill, []any{old.id, old.started}})
	})
}

// MarkSent marks all refs. One that is marked already keeps its time; one that is not there is nil.
func (s *Postgres) MarkSent(ctx context.Context, refs []OutputRef, at time.Time) error {
	if len(refs) == 0 {
		return nil
	}
	nonces, positions := make([][]byte, len(refs)), make([]int64, len(refs))
	for i := range refs {
		nonces[i], positions[i] = refs[i].Nonce[:], int64(refs[i].Position)
	}
	err := s.write(ctx, func(ctx context.Context, conn *sql.Conn) error {
		return exec(ctx, conn, Statement{s.q.markSent, []any{at.UnixMicro(), nonces, positions}})
	})
	if err != nil {
		return fmt.Errorf("receipts: marking %d outputs as sent: %w", len(refs), err)
	}
	return nil
}

// Park stores messages of failing order keys, one transaction at a time, so that positions become visible in their order.
// Payloads are not retained.
func (s *Postgres) Park(ctx context.Context, messages []Parked) error {
	if len(messages) == 0 {
		return nil
	}
	at := make([]int64, len(messages))
	var columns [8][][]byte
	for i := range messages {
		p := &messages[i]
		metadata, err := encodeMetadata(p.Metadata)
		if err != nil {
			return fmt.Errorf("receipts: parking: %w", err)
		}
		for c, value := range [...][]byte{
			[]byte(p.Scope), []byte(p.OrderKey), p.digest(metadata), []byte(p.Handler), []byte(p.Topic), []byte(p.UUID), metadata, p.Payload,
		} {
			columns[c] = append(columns[c], blob(value))
		}
		at[i] = p.At.UnixMicro()
	}
	args := make([]any, 0, len(columns)+1)
	for _, column := range columns {
		args = append(args, column)
	}
	err := s.write(ctx, func(ctx context.Context, conn *sql.Conn) error {
		if _, err := conn.ExecContext(ctx, s.q.parkOrder); err != nil {
			return err
		}
		return exec(ctx, conn, Statement{s.q.park, append(args, at)})
	})
	if err != nil {
		return fmt.Errorf("receipts: parking %d messages: %w", len(messages), err)
	}
	return nil
}

// Unpark deletes parked messages, all in one transaction.
func (s *Postgres) Unpark(ctx context.Context, positions []int64) error {
	if len(positions) == 0 {
		return nil
	}
	err := s.write(ctx, func(ctx context.Context, conn *sql.Conn) error {
		return exec(ctx, conn, Statement{s.q.unpark, []any{positions}})
	})
	if err != nil {
		return fmt.Errorf("receipts: deleting %d parked messages: %w", len(positions), err)
	}
	return nil
}

// exec runs a statement on a connection.
func exec(ctx context.Context, conn *sql.Conn, statement Statement) error {
	_, err := conn.ExecContext(ctx, statement.SQL, statement.text()...)
	return err
}

// lockTimeout gives how long a statement may wait for a lock: wait, 0 being for ever, but not until the context's deadline,
// so that the server says it, which leaves the connection in order.
func lockTimeout(ctx context.Context, wait time.Duration) string {
	wait = lockWait(ctx, wait)
	if wait == 0 {
		return "0"
	}
	return millis(wait)
}

// lockWait is lockTimeout as a duration.
func lockWait(ctx context.Context, wait time.Duration) time.Duration {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		return wait
	}
	left := max(time.Until(deadline)*9/10, time.Millisecond)
	if wait == 0 || left < wait {
		return left
	}
	return wait
}
