package receipts

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"
)

const (
	// mysqlLanes is the most transactions at a time that make sense, for handlers that wait for something else; fast ones have fewer.
	mysqlLanes = 16
	// mysqlClaimWait is the shortest time that MySQL can be told to wait for a lock, mariadbClaimWait how long a claim waits
	// on MariaDB.
	mysqlClaimWait   = time.Second
	mariadbClaimWait = 100 * time.Millisecond
)

// Check verifies that the handle is a server of the MySQL family that can be written, that its settings suit the store, that a
// commit is durable, that the pool has room for two transactions at least, and that the tables are there, on InnoDB, and the user
// may use them. It writes into them and rolls that back. It returns by ctx, after 10 seconds at most where ctx has no deadline.
func (s *MySQL) Check(ctx context.Context) (Info, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, checkTimeout)
		defer cancel()
	}
	info := Info{Dialect: "mysql", Lanes: mysqlLanes, Parts: s.savepoints, ClaimWait: mysqlClaimWait, Pool: s.db.Stats().MaxOpenConnections}
	if err := s.check(ctx, &info); err != nil {
		return Info{}, fmt.Errorf("receipts: checking the handle of a MySQL server: %w", err)
	}
	return info, nil
}

func (s *MySQL) check(ctx context.Context, info *Info) error {
	if info.Pool == 1 {
		return errors.New("the pool has one connection: a transaction holds one, and finding out what became of it needs another: " +
			"call db.SetMaxOpenConns with 2 or more, or leave it unbounded")
	}
	if info.Pool > 0 {
		info.Lanes = min(info.Lanes, info.Pool-1)
	}
	err := s.read(ctx, func(conn *sql.Conn) error {
		info.Warnings = nil
		server, err := s.server(ctx, conn)
		if err != nil {
			return s.notMySQL(ctx, err)
		}
		if server.mariadb {
			info.Dialect, info.ClaimWait = "mariadb", mariadbClaimWait
		}
		if err := s.checkSettings(ctx, conn, info); err != nil {
			return err
		}
		if info.Schema, err = s.schemaVersion(ctx, conn); err != nil {
			return err
		}
		if err := s.tablesThere(ctx, conn); err != nil {
			return err
		}
		return s.checkEngines(ctx, conn)
	})
	if err != nil {
		return err
	}
	return s.checkWrite(ctx)
}

// notMySQL says what is wrong with a handle that does not understand the first question.
func (s *MySQL) notMySQL(ctx context.Context, err error) error {
	if s.number(err) != 0 || s.Classify(err) != ClassOther || ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("it does not answer as a server of the MySQL family: give NewMySQL a *sql.DB of github.com/go-sql-driver/mysql: %w", err)
}

// checkSettings refuses settings under which the store cannot keep its promises.
func (s *MySQL) checkSettings(ctx context.Context, conn *sql.Conn, info *Info) error {
	var database sql.NullString
	var logging bool
	var format, mode string
	var flush int
	err := conn.QueryRowContext(ctx, "SELECT database(), @@log_bin, @@binlog_format, @@sql_mode, @@innodb_flush_log_at_trx_commit").
		Scan(&database, &logging, &format, &mode, &flush)
	switch {
	case err != nil:
		return fmt.Errorf("reading the server's settings: %w", err)
	case !database.Valid:
		return errors.New("no database is selected: name one in the DSN (user:password@tcp(host)/database)")
	case logging && strings.EqualFold(format, "STATEMENT"):
		return fmt.Errorf("binlog_format is STATEMENT, with which the server refuses READ COMMITTED (error %d): set binlog_format to ROW or MIXED",
			mysqlReadCommittedLog)
	case !strings.Contains(mode, "STRICT_TRANS_TABLES") && !strings.Contains(mode, "STRICT_ALL_TABLES"):
		return errors.New("sql_mode is not strict, so that the server cuts values that are too long: add STRICT_TRANS_TABLES to the " +
			"server's sql_mode, or to the session's in the DSN (?sql_mode=%27STRICT_TRANS_TABLES%27)")
	case flush != 1:
		unsafe := fmt.Sprintf("innodb_flush_log_at_trx_commit is %d, so that a committed transaction may be lost when the server goes down: "+
			"set it to 1", flush)
		if !s.allowUnsafe {
			return errors.New(unsafe)
		}
		info.Warnings = append(info.Warnings, "MySQL: "+unsafe+".")
	}
	return nil
}

// checkEngines refuses tables that have no transactions.
func (s *MySQL) checkEngines(ctx context.Context, conn *sql.Conn) error {
	return queryAll(ctx, conn, s.q.engines, nil, func(scan scanFunc) error {
		var table, engine string
		if err := scan(&table, &engine); err != nil {
			return err
		}
		if !strings.EqualFold(engine, "InnoDB") {
			return fmt.Errorf("table %s is of engine %s, which has no transactions: ALTER TABLE %s ENGINE = InnoDB", table, engine, table)
		}
		return nil
	})
}

// checkWrite runs a transaction that writes into every table, and rolls back. So it sees the user's rights, how errors are
// shown, and how the client counts a row that is there already. It also has the client say how it calls a dead connection.
func (s *MySQL) checkWrite(ctx context.Context) error {
	begun, err := s.Begin(ctx, TxOptions{})
	if err != nil {
		return err
	}
	defer func() { _ = begun.Rollback(context.WithoutCancel(ctx)) }()
	tx := begun.Raw()
	nonce := begun.Nonce()
	insert := (&mysqlText{}).raw(s.q.marker).raw(" VALUES (").bytes(nonce[:]).raw(",0,0)").raw(mysqlKeepMarker).String()
	var rows int64
	for range 2 {
		result, err := tx.ExecContext(ctx, insert)
		if err != nil {
			return fmt.Errorf("the tables cannot be written: %w", err)
		}
		if rows, err = result.RowsAffected(); err != nil {
			return err
		}
	}
	for _, query := range s.q.rights {
		if _, err := tx.ExecContext(ctx, query); err != nil {
			return fmt.Errorf("the user lacks a right, or a table is not what it was: %w", err)
		}
	}
	if _, err := tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT penstock_never"); s.number(err) != mysqlNoSavepoint {
		return fmt.Errorf("the client shows no error numbers, or a savepoint that was never set is there: it is not go-sql-driver/mysql: %v", err) //nolint:errorlint // whatever it is
	}
	s.counted.Store(countedAsChange)
	if rows == 0 {
		s.counted.Store(countedAsNone)
	}
	return s.read(ctx, func(conn *sql.Conn) error {
		return conn.Raw(func(driverConn any) error {
			s.learnGone(driverConn)
			return nil
		})
	})
}
