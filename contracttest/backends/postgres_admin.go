package backends

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
)

type postgresAdmin struct{}

// on runs statements in one session.
func (postgresAdmin) on(ctx context.Context, at Database, do func(*pgconn.PgConn) error) error {
	c, err := pgconn.Connect(ctx, at.URL())
	if err != nil {
		return err // it does not show the password
	}
	return errors.Join(do(c), c.Close(context.WithoutCancel(ctx)))
}

func (a postgresAdmin) ping(ctx context.Context, at Database) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	err = a.on(ctx, at, func(c *pgconn.PgConn) error {
		version = c.ParameterStatus("server_version")
		_, err := c.Exec(ctx, "SELECT 1").ReadAll()
		return err
	})
	return version, err
}

func (a postgresAdmin) create(ctx context.Context, at Database, name string) error {
	return a.on(ctx, at, func(c *pgconn.PgConn) error {
		_, err := c.Exec(ctx, fmt.Sprintf(`CREATE DATABASE "%s" TEMPLATE template0 ENCODING 'UTF8'`, name)).ReadAll()
		return err
	})
}

func (a postgresAdmin) drop(ctx context.Context, at Database, name string) error {
	return a.on(ctx, at, func(c *pgconn.PgConn) error {
		_, err := c.Exec(ctx, fmt.Sprintf(`DROP DATABASE IF EXISTS "%s" WITH (FORCE)`, name)).ReadAll()
		return err
	})
}
