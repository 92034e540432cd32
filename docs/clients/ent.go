package clients

import (
	"context"
	"database/sql"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/docs/clients/ent"
)

// entTx is an ent driver inside a transaction that somebody else ends.
type entTx struct{ entsql.Conn }

func (entTx) Dialect() string                          { return dialect.SQLite } // or Postgres, or MySQL
func (d entTx) Tx(context.Context) (dialect.Tx, error) { return dialect.NopTx(d), nil }
func (entTx) Close() error                             { return nil }

func withEnt(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	c, err := read(msg)
	if err != nil {
		return err
	}
	client := ent.NewClient(ent.Driver(entTx{entsql.Conn{ExecQuerier: tx}}))
	return client.Charge.Create().SetID(c.ID).SetAccount(c.Account).SetCents(c.Cents).Exec(ctx)
}
