// Package clients is one handler, written with each of the clients that docs/database-clients.md speaks of. The page shows
// parts of these files; the tests here run every one of them. It is a module of its own, so that Penstock's does not depend
// on the clients.
package clients

import (
	"context"
	"database/sql"
	"encoding/json"

	"github.com/ThreeDotsLabs/watermill/message"
)

// After this one, go mod tidy takes out of go.mod what only the generator needs. The code in sqlc is made with sqlc generate.
//
//go:generate go run -mod=mod entgo.io/ent/cmd/ent generate ./ent/schema

// handler is what idempotency.Middleware.Handle takes.
type handler func(ctx context.Context, tx *sql.Tx, msg *message.Message) error

// charge is the payload of a message, and with its identity a row of the table charges.
type charge struct {
	ID      string `json:"-" db:"id"`
	Account string `json:"account" db:"account"`
	Cents   int64  `json:"cents" db:"cents"`
}

// read gives what a message asks for.
func read(msg *message.Message) (charge, error) {
	c := charge{ID: msg.UUID}
	return c, json.Unmarshal(msg.Payload, &c)
}
