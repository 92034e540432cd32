package clients

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/uptrace/bun"
)

// bunCharge is the model.
type bunCharge struct {
	bun.BaseModel `bun:"table:charges"`

	ID      string `bun:",pk"`
	Account string
	Cents   int64
}

func withBun(base *bun.DB) handler {
	return func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		c, err := read(msg)
		if err != nil {
			return err
		}
		row := bunCharge{ID: c.ID, Account: c.Account, Cents: c.Cents}
		_, err = base.NewInsert().Conn(tx).Model(&row).Exec(ctx)
		return err
	}
}
