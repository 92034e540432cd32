package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/stage"
)

// goodBook holds what must be there after three transfers between four accounts, and their receipts.
func goodBook(t *testing.T) (*sql.DB, expectation) {
	t.Helper()
	clean, err := transfers(3, 4, 4)
	require.NoError(t, err)
	db, err := openBook(t.Context(), servers.Postgres(t).URL(), 4)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, db.Close()) })
	ours := book{between: func(int) {}}
	inTx(t, db, func(tx *sql.Tx) error {
		for _, in := range clean {
			if err := ours.apply(t.Context(), tx, message.NewMessage(in.id, in.payload)); err != nil {
				return err
			}
			if _, err := tx.ExecContext(t.Context(), `INSERT INTO penstock_receipts (scope, identity_key, fingerprint, nonce, state, created_at)
				VALUES ('a', convert_to($1, 'UTF8'), 'b', decode(repeat('00', 16), 'hex'), 1, 0)`, in.id); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(t.Context(), `INSERT INTO penstock_markers (nonce, claims, created_at) VALUES (decode(repeat('00', 16), 'hex'), 3, 0)`)
		return err
	})
	return db, expect(clean, 4)
}

func inTx(t *testing.T, db *sql.DB, work func(*sql.Tx) error) {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer tx.Rollback()
	require.NoError(t, work(tx))
	require.NoError(t, tx.Commit())
}

// Each way in which the database can be wrong is seen, by the complaint that is meant for it.
func TestTheVerdictSeesEveryFault(t *testing.T) {
	const first = `WHERE id = (SELECT min(id) FROM transfers)`
	tests := map[string]struct {
		fault string // SQL
		want  []string
	}{
		"none": {},
		"recorded twice": {
			fault: `INSERT INTO transfers SELECT * FROM transfers ` + first,
			want:  []string{"1 transfers were applied more than once", "3 receipts for 4 applied transfers"},
		},
		"lost": {
			fault: `UPDATE accounts a SET balance = balance + t.cents FROM transfers t ` + strings.ReplaceAll(first, "id =", "t.id =") + ` AND a.id = t.debit;
				UPDATE accounts a SET balance = balance - t.cents FROM transfers t ` + strings.ReplaceAll(first, "id =", "t.id =") + ` AND a.id = t.credit;
				DELETE FROM transfers ` + first,
			want: []string{
				"2 accounts have another balance than their transfers come to", "1 transfers are lost",
				"3 receipts for 2 applied transfers",
			},
		},
		"half a transfer": {
			fault: `UPDATE accounts SET balance = balance - 150 WHERE id = 1`,
			want: []string{
				"the accounts hold 39998.50 instead of 40000.00", "1 accounts have another balance than their transfers come to",
			},
		},
		"not what was sent": {
			fault: `UPDATE transfers SET cents = cents + 1 ` + first,
			want:  []string{"1 transfers are not what was sent"},
		},
		"an account is gone": {
			fault: `ALTER TABLE transfers DROP CONSTRAINT transfers_debit_fkey, DROP CONSTRAINT transfers_credit_fkey;
				UPDATE accounts SET balance = balance + (SELECT balance FROM accounts WHERE id = 1) WHERE id = 2;
				DELETE FROM accounts WHERE id = 1`,
			want: []string{"2 accounts have another balance than their transfers come to"},
		},
		"a receipt is missing": {
			fault: `DELETE FROM penstock_receipts WHERE identity_key = (SELECT identity_key FROM penstock_receipts LIMIT 1)`,
			want:  []string{"2 receipts for 3 applied transfers"},
		},
		"torn": {
			fault: `DELETE FROM penstock_markers`,
			want:  []string{"0 receipts for 3 applied transfers", "3 receipts are torn"},
		},
		"diverted": {
			fault: `INSERT INTO penstock_dead_letters (scope, identity_key, fingerprint, kind, reason, consumer, handler, topic, uuid, metadata, payload, created_at)
				VALUES ('a', 'b', 'c', 'failed', '', '', '', '', '', '', '', 0)`,
			want: []string{"1 messages were diverted"},
		},
	}
	db, want := goodBook(t)
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			defer tx.Rollback()
			_, err = tx.ExecContext(t.Context(), test.fault)
			require.NoError(t, err)
			result, err := inspect(t.Context(), tx, want)
			require.NoError(t, err)
			assert.Equal(t, test.want, result.complaints())

			var out bytes.Buffer
			err = result.print(&out)
			if test.want == nil {
				require.NoError(t, err)
				assert.Contains(t, out.String(), "KEPT")
				return
			}
			require.ErrorIs(t, err, errVerdict)
			assert.Contains(t, out.String(), "BROKEN")
		})
	}
}

// A fault that did not fire proves nothing.
func TestTheVerdictWantsItsKills(t *testing.T) {
	t.Parallel()
	r := &result{planned: 3, kills: map[stage.Point]int{stage.BeforeCommit: 1, stage.AtRandom: 1}}
	assert.Equal(t, []string{"2 kills instead of 3: nothing is proved"}, r.complaints())
}

func TestInspectSaysWhatItCannotRead(t *testing.T) {
	db, want := goodBook(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := inspect(ctx, db, want)
	require.ErrorIs(t, err, context.Canceled)
	for table, what := range map[string]string{
		"penstock_receipts": "check the database", "accounts CASCADE": "check the balances", "transfers": "check the transfers",
	} {
		tx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		_, err = tx.ExecContext(t.Context(), "DROP TABLE "+table)
		require.NoError(t, err)
		_, err = inspect(t.Context(), tx, want)
		require.ErrorContains(t, err, what)
		require.NoError(t, tx.Rollback())
	}
}

// Both handlers do the same, and half of it is done when they say so.
func TestTheHandlersAgree(t *testing.T) {
	db, want := goodBook(t)
	clean, err := transfers(30, 4, 5)
	require.NoError(t, err)
	var after []map[int32]int64
	for range 2 {
		single := len(after) == 0
		tx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		halves := 0
		ours := book{between: func(n int) {
			halves += n
			var sum int64
			assert.NoError(t, tx.QueryRowContext(t.Context(), `SELECT sum(balance) FROM accounts`).Scan(&sum))
			assert.NotEqualValues(t, 4*opening, sum, "one half is done, the other is not")
		}}
		msgs := make([]*message.Message, len(clean))
		for i, in := range clean {
			msgs[i] = message.NewMessage(in.id, in.payload)
			if single {
				require.NoError(t, ours.apply(t.Context(), tx, msgs[i]))
			}
		}
		if !single {
			require.NoError(t, ours.applyAll(t.Context(), tx, msgs))
		}
		assert.Equal(t, 30, halves)
		after = append(after, balances(t, tx))
		require.NoError(t, tx.Rollback())
	}
	assert.Equal(t, after[0], after[1])
	assert.NotEqual(t, want.balances, after[0])
}

func balances(t *testing.T, tx *sql.Tx) map[int32]int64 {
	t.Helper()
	rows, err := tx.QueryContext(t.Context(), `SELECT id, balance FROM accounts`)
	require.NoError(t, err)
	defer rows.Close()
	found := map[int32]int64{}
	for rows.Next() {
		var id int32
		var balance int64
		require.NoError(t, rows.Scan(&id, &balance))
		found[id] = balance
	}
	require.NoError(t, rows.Err())
	return found
}

// A transfer from or to nowhere is refused by the database: no money vanishes.
func TestTheHandlersRefuseUnknownAccounts(t *testing.T) {
	db, _ := goodBook(t)
	ours := book{between: func(int) {}}
	for _, payload := range []string{`{"debit":1,"credit":5,"cents":1}`, `{"debit":5,"credit":1,"cents":1}`} {
		msg := message.NewMessage("m", []byte(payload))
		for _, handler := range []func(*sql.Tx) error{
			func(tx *sql.Tx) error { return ours.apply(t.Context(), tx, msg) },
			func(tx *sql.Tx) error { return ours.applyAll(t.Context(), tx, []*message.Message{msg}) },
		} {
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			require.ErrorContains(t, handler(tx), "record the transfer")
			require.NoError(t, tx.Rollback())
		}
	}
}

func TestTellSaysWhatTheKillsDid(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	(&result{}).tell(&out)
	assert.Empty(t, out.String(), "no kill did anything")
	(&result{words: stage.LastWords{Open: 7, Committed: 4}}).tell(&out)
	assert.Equal(t, "Killed inside a transaction: the work of 7 messages was gone, and was done again.\n"+
		"Killed after COMMIT: 4 messages came again, and changed nothing.\n", out.String())
}

func TestMoney(t *testing.T) {
	t.Parallel()
	for cents, want := range map[int64]string{0: "0.00", 5: "0.05", 123456: "1234.56", -5: "-0.05", -250: "-2.50"} {
		assert.Equal(t, want, money(cents))
	}
}

func TestErrorsOfTheServerAreTold(t *testing.T) {
	t.Parallel()
	err := runDemo(t.Context(), options{transfers: 1, accounts: 2, processes: 1}, "postgres://nobody@127.0.0.1:1/none?sslmode=disable", nil, nil)
	require.ErrorContains(t, err, "create the tables")
	assert.False(t, errors.Is(err, errVerdict))
}
