package clients

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"
)

func withDatabaseSQL(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	c, err := read(msg)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO charges (id, account, cents) VALUES (?, ?, ?)`, c.ID, c.Account, c.Cents)
	return err
}
