package clients

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"
	"gorm.io/gorm"
)

// gormCharge is the model.
type gormCharge struct {
	ID      string `gorm:"primaryKey"`
	Account string
	Cents   int64
}

// TableName names the table.
func (gormCharge) TableName() string { return "charges" }

// inTx is a GORM handle whose statements run in tx.
func inTx(ctx context.Context, base *gorm.DB, tx *sql.Tx) *gorm.DB {
	db := base.Session(&gorm.Session{NewDB: true, Context: ctx}) // a context makes it a copy: base is not changed
	db.Statement.ConnPool = tx
	return db
}

func withGORM(base *gorm.DB) handler {
	return func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		c, err := read(msg)
		if err != nil {
			return err
		}
		return inTx(ctx, base, tx).Create(&gormCharge{ID: c.ID, Account: c.Account, Cents: c.Cents}).Error
	}
}
