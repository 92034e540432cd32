package backends

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/go-sql-driver/mysql"
)

type mysqlAdmin struct{}

// on runs statements in one session.
func (mysqlAdmin) on(ctx context.Context, at Database, do func(*sql.Conn) error) error {
	config, err := mysql.ParseDSN(at.DSN())
	if err != nil {
		return errors.New("the address cannot be used")
	}
	config.Logger = &mysql.NopLogger{} // a server that is not ready yet is no news
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return errors.New("the address cannot be used")
	}
	db := sql.OpenDB(connector)
	c, err := db.Conn(ctx)
	if err != nil {
		return errors.Join(err, db.Close())
	}
	return errors.Join(do(c), c.Close(), db.Close())
}

func (a mysqlAdmin) ping(ctx context.Context, at Database) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	err = a.on(ctx, at, func(c *sql.Conn) error { return c.QueryRowContext(ctx, "SELECT VERSION()").Scan(&version) })
	return version, err
}

func (a mysqlAdmin) create(ctx context.Context, at Database, name string) error {
	return a.on(ctx, at, func(c *sql.Conn) error {
		_, err := c.ExecContext(ctx, fmt.Sprintf("CREATE DATABASE `%s` CHARACTER SET utf8mb4", name))
		return err
	})
}

func (a mysqlAdmin) drop(ctx context.Context, at Database, name string) error {
	return a.on(ctx, at, func(c *sql.Conn) error {
		if err := a.endSessions(ctx, c, name); err != nil {
			return err
		}
		_, err := c.ExecContext(ctx, fmt.Sprintf("DROP DATABASE IF EXISTS `%s`", name))
		return err
	})
}

// endSessions ends the sessions of a database: an open transaction in one would keep DROP DATABASE waiting.
func (mysqlAdmin) endSessions(ctx context.Context, c *sql.Conn, name string) (err error) {
	rows, err := c.QueryContext(ctx, "SELECT id FROM information_schema.processlist WHERE db = ?", name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	var ids []int64
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return err
		}
		ids = append(ids, id)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	for _, id := range ids {
		_, _ = c.ExecContext(ctx, fmt.Sprintf("KILL %d", id)) // fails where it has ended by itself
	}
	return nil
}
