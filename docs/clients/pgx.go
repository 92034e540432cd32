package clients

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

func withPgx(ctx context.Context, tx *pgxstore.Tx, msg *message.Message) error {
	c, err := read(msg)
	if err != nil {
		return err
	}
	var blocked bool
	if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM blocked WHERE account = $1)`, c.Account).Scan(&blocked); err != nil {
		return err
	}
	if !blocked {
		tx.Queue(`INSERT INTO charges (id, account, cents) VALUES ($1, $2, $3)`, c.ID, c.Account, c.Cents)
	}
	return nil
}
