package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/idempotency"
)

// opening is what every account begins with, in cents.
const opening = 1_000_000

// tablesSQL makes the application's tables.
const tablesSQL = `
CREATE TABLE accounts (id int PRIMARY KEY, balance bigint NOT NULL);
CREATE TABLE transfers ( -- no unique key, on purpose: a transfer applied twice shows
	id text NOT NULL, debit int NOT NULL REFERENCES accounts, credit int NOT NULL REFERENCES accounts, cents bigint NOT NULL
)`

// transfer is the payload of a message: cents go from one account to another, which may be overdrawn.
type transfer struct {
	Debit  int32 `json:"debit"`
	Credit int32 `json:"credit"`
	Cents  int64 `json:"cents"`
}

// parse refuses what no state of the accounts could make right.
func parse(payload []byte) (transfer, error) {
	var t transfer
	if err := json.Unmarshal(payload, &t); err != nil {
		return t, fmt.Errorf("transfer: %w", err)
	}
	if t.Debit < 1 || t.Credit < 1 || t.Debit == t.Credit || t.Cents < 1 {
		return t, errors.New("transfer: it needs two accounts and an amount")
	}
	return t, nil
}

// book is the application: two handlers, either of which does. What they write through tx commits together with the receipts,
// or not at all. Nothing in them knows of duplicates, of other processes, or of death.
type book struct {
	between func(messages int) // called between debit and credit, where the demo kills
}

// apply is the handler of one message. The account with the lower number comes first, in every process, so that two of them
// that are applied at the same time do not lock each other out; lockKeys does the same for the messages of a transaction.
func (b book) apply(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	t, err := parse(msg.Payload)
	if err != nil {
		return idempotency.Permanent(err) // Validate has refused it before
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO transfers (id, debit, credit, cents) VALUES ($1, $2, $3, $4)`,
		msg.UUID, t.Debit, t.Credit, t.Cents); err != nil {
		return fmt.Errorf("record the transfer: %w", err)
	}
	halves := []struct {
		account int32
		cents   int64
	}{{t.Debit, -t.Cents}, {t.Credit, t.Cents}}
	if t.Debit > t.Credit {
		slices.Reverse(halves)
	}
	for i, half := range halves {
		if i > 0 {
			b.between(1)
		}
		if _, err := tx.ExecContext(ctx, `UPDATE accounts SET balance = balance + $2 WHERE id = $1`, half.account, half.cents); err != nil {
			return fmt.Errorf("change the balance: %w", err)
		}
	}
	return nil
}

// applyAll is the handler of many messages at once, for HandleBatch. It locks all their accounts first, in the order of their
// numbers, which rules deadlocks out; apply leaves a few, because its transactions take one message's second account before
// the next one's first. And it asks the server four things where apply asks three for each message.
func (b book) applyAll(ctx context.Context, tx *sql.Tx, msgs []*message.Message) error {
	ids := make([]string, len(msgs))
	debits, credits := make([]int32, len(msgs)), make([]int32, len(msgs))
	cents := make([]int64, len(msgs))
	for i, msg := range msgs {
		t, err := parse(msg.Payload)
		if err != nil {
			return idempotency.Permanent(err) // Validate has refused it before
		}
		ids[i], debits[i], credits[i], cents[i] = msg.UUID, t.Debit, t.Credit, t.Cents
	}
	if _, err := tx.ExecContext(ctx, `SELECT FROM accounts WHERE id = ANY($1) OR id = ANY($2) ORDER BY id FOR NO KEY UPDATE`,
		debits, credits); err != nil {
		return fmt.Errorf("lock the accounts: %w", err)
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO transfers (id, debit, credit, cents)
		SELECT * FROM unnest($1::text[], $2::int[], $3::int[], $4::bigint[])`, ids, debits, credits, cents); err != nil {
		return fmt.Errorf("record the transfers: %w", err)
	}
	const add = `UPDATE accounts a SET balance = balance %s t.cents
		FROM (SELECT id, sum(cents) AS cents FROM unnest($1::int[], $2::bigint[]) AS u (id, cents) GROUP BY id) t WHERE a.id = t.id`
	if _, err := tx.ExecContext(ctx, fmt.Sprintf(add, "-"), debits, cents); err != nil {
		return fmt.Errorf("debit the accounts: %w", err)
	}
	b.between(len(msgs))
	if _, err := tx.ExecContext(ctx, fmt.Sprintf(add, "+"), credits, cents); err != nil {
		return fmt.Errorf("credit the accounts: %w", err)
	}
	return nil
}

// lockKeys names the rows that apply locks. A transaction goes through its messages in the order of these names.
func lockKeys(msg *message.Message) []string {
	t, err := parse(msg.Payload)
	if err != nil {
		return nil
	}
	return []string{fmt.Sprintf("%06d", t.Debit), fmt.Sprintf("%06d", t.Credit)}
}
