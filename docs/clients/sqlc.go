package clients

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/docs/clients/sqlc"
)

func withSqlc(queries *sqlc.Queries) handler {
	return func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		c, err := read(msg)
		if err != nil {
			return err
		}
		return queries.WithTx(tx).InsertCharge(ctx, sqlc.InsertChargeParams{ID: c.ID, Account: c.Account, Cents: c.Cents})
	}
}
