package receipts

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	// pgMinVersion has pg_current_xact_id and all that the statements use, and is the oldest that was supported when this was
	// written.
	pgMinVersion = 130000
	// pgLanes is the most transactions at a time that make sense, for handlers that wait for something else; fast ones have fewer.
	pgLanes = 16
	// pgClaimWait is how long a claim waits for another transaction.
	pgClaimWait = 100 * time.Millisecond
)

// Check verifies that the handle is a PostgreSQL server that can be written, that its errors show their codes, that a commit
// is durable, that the pool has room for two transactions at least, that the tables are there and that the role may use them.
// It writes nothing. It returns by ctx, after 10 seconds at most where ctx has no deadline.
func (s *Postgres) Check(ctx context.Context) (Info, error) {
	var pool int
	if s.db != nil {
		pool = s.db.Stats().MaxOpenConnections
	}
	return s.CheckPool(ctx, pool)
}

// CheckPool is Check for a pool of the given size, 0 being unbounded.
func (s *Postgres) CheckPool(ctx context.Context, pool int) (Info, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, checkTimeout)
		defer cancel()
	}
	info := Info{Dialect: "postgres", Lanes: pgLanes, Parts: s.savepoints, ClaimWait: pgClaimWait, Pool: pool}
	if err := s.check(ctx, &info); err != nil {
		return Info{}, fmt.Errorf("receipts: checking the PostgreSQL handle: %w", err)
	}
	return info, nil
}

func (s *Postgres) check(ctx context.Context, info *Info) error {
	if info.Pool == 1 {
		return errors.New("the pool has one connection: a transaction holds one, and finding out what became of it needs another: " +
			"give it 2 or more (db.SetMaxOpenConns, or pool_max_conns of pgxpool)")
	}
	if info.Pool > 0 {
		info.Lanes = min(info.Lanes, info.Pool-1)
	}
	return s.read(ctx, func(conn *sql.Conn) (err error) {
		info.Warnings = nil
		if err := s.checkServer(ctx, conn, info); err != nil {
			return err
		}
		if err := s.checkCodes(ctx, conn); err != nil {
			return err
		}
		if info.Schema, err = s.schemaVersion(ctx, conn); err != nil {
			return err
		}
		if err := s.tablesThere(ctx, conn); err != nil {
			return err
		}
		return s.checkRights(ctx, conn)
	})
}

// checkServer reads the settings on which the promises depend.
func (s *Postgres) checkServer(ctx context.Context, conn *sql.Conn, info *Info) error {
	var version int
	var number, readOnly, sync, fsync, pages, counts string
	var standby bool
	err := conn.QueryRowContext(ctx, `SELECT current_setting('server_version_num')::integer, current_setting('server_version'),
	pg_is_in_recovery(), current_setting('default_transaction_read_only'), current_setting('synchronous_commit'), current_setting('fsync'),
	current_setting('full_page_writes'), current_setting('track_counts')`).Scan(
		&version, &number, &standby, &readOnly, &sync, &fsync, &pages, &counts)
	switch {
	case err != nil && s.Classify(err) == ClassOther && ctx.Err() == nil:
		return fmt.Errorf("it does not answer as a PostgreSQL server: give NewPostgres a *sql.DB with a PostgreSQL driver: %w", err)
	case err != nil:
		return err
	case version < pgMinVersion:
		return fmt.Errorf("PostgreSQL %s is too old: 13 or newer is needed", number)
	case standby:
		return errors.New("it is a standby, which cannot be written: connect to the primary (target_session_attrs=read-write)")
	case readOnly == "on":
		return errors.New("its transactions are read-only: default_transaction_read_only is on for the server, the database or the role")
	}
	if sync == "off" {
		const unsafe = "synchronous_commit is off, so that a committed transaction may be lost when the server goes down: " +
			"set it to on for the role (ALTER ROLE … SET synchronous_commit = on) or in the connection string"
		if !s.allowUnsafe {
			return errors.New(unsafe)
		}
		info.Warnings = append(info.Warnings, "PostgreSQL: "+unsafe+".")
	}
	if fsync == "off" || pages == "off" {
		info.Warnings = append(info.Warnings, "PostgreSQL: fsync or full_page_writes is off, so that the database may be damaged when the "+
			"machine goes down: set both to on in postgresql.conf.")
	}
	if counts == "off" {
		info.Warnings = append(info.Warnings, "PostgreSQL: track_counts is off, so that a handler that deletes its own receipt is not found "+
			"out: set it to on in postgresql.conf.")
	}
	return nil
}

// checkCodes makes an error, to see whether the client shows its code.
func (s *Postgres) checkCodes(ctx context.Context, conn *sql.Conn) error {
	_, err := conn.ExecContext(ctx, "SELECT penstock_check.that_errors_show_their_code")
	if code, ok := sqlState(err); !ok || !strings.HasPrefix(code, "42") {
		if err != nil && (s.Classify(err) != ClassOther || ctx.Err() != nil) {
			return err
		}
		return errors.New("its client's errors show no code: they need a method SQLState() string, as those of pgx (v4.13 or newer) and " +
			"lib/pq (v1.10 or newer) have")
	}
	return nil
}

// checkRights asks for what the store does with each table, in one question: a process that starts on a busy server has many
// others to ask.
func (s *Postgres) checkRights(ctx context.Context, conn *sql.Conn) error {
	var needed []string
	for table, rights := range map[string]string{
		"receipts": "SELECT, INSERT, DELETE", "markers": "SELECT, INSERT", "outputs": "SELECT, INSERT, UPDATE",
		"dead_letters": "SELECT, INSERT", "parked": "SELECT, INSERT, DELETE",
	} {
		needed = append(needed, fmt.Sprintf("('%s%s', '%s')", s.prefix, table, rights))
	}
	slices.Sort(needed)
	var name, rights string
	err := conn.QueryRowContext(ctx, `SELECT name, rights FROM (VALUES `+strings.Join(needed, ", ")+`) needed (name, rights)
WHERE EXISTS (SELECT FROM unnest(string_to_array(rights, ', ')) one WHERE NOT has_table_privilege(name, one)) ORDER BY name LIMIT 1`).Scan(&name, &rights)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("looking for the rights on the tables: %w", err)
	}
	return fmt.Errorf("its role lacks a right: GRANT %s ON %s TO that role", rights, name)
}
