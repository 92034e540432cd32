package clients

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jmoiron/sqlx"
)

// withSqlx takes the application's handle for its mapper only.
func withSqlx(base *sqlx.DB) handler {
	return func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		c, err := read(msg)
		if err != nil {
			return err
		}
		query, args, err := base.BindNamed(`INSERT INTO charges (id, account, cents) VALUES (:id, :account, :cents)`, c)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, query, args...); err != nil {
			return err
		}
		var written charge
		x := &sqlx.Tx{Tx: tx, Mapper: base.Mapper} // for everything that scans
		return x.GetContext(ctx, &written, base.Rebind(`SELECT id, account, cents FROM charges WHERE id = ?`), c.ID)
	}
}
