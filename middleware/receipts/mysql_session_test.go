package receipts_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// TestMySQLLeavesSessionsAsTheyWere ends transactions in every way, and looks at the variables of all connections.
func TestMySQLLeavesSessionsAsTheyWere(t *testing.T) {
	t.Parallel()
	db := newMyDB(t, param("innodb_lock_wait_timeout", "7"), param("max_statement_time", "33"), param("tx_isolation", "'SERIALIZABLE'"))
	db.onMariaDB(t)
	before := db.sessionVariables(t)
	if !slices.Contains(before, "innodb_lock_wait_timeout=7") || !slices.Contains(before, "autocommit=1") {
		t.Fatalf("the session is set up with %q", before)
	}
	ends := map[string]func(tx receipts.Tx[*sql.Tx]){
		"commit":   func(tx receipts.Tx[*sql.Tx]) { must(t, tx.Commit(t.Context())) },
		"rollback": func(tx receipts.Tx[*sql.Tx]) { must(t, tx.Rollback(t.Context())) },
		"handler commits": func(tx receipts.Tx[*sql.Tx]) {
			must(t, tx.Raw().Commit())
			wantErr(t, tx.Commit(t.Context()), receipts.ErrTxEnded)
		},
		"handler turns autocommit on": func(tx receipts.Tx[*sql.Tx]) {
			handled(t, tx.Raw(), "SET autocommit = 1")
			wantErr(t, tx.Commit(t.Context()), receipts.ErrTxEnded)
		},
		"handler's DDL": func(tx receipts.Tx[*sql.Tx]) {
			handled(t, tx.Raw(), "CREATE TABLE IF NOT EXISTS made (n INT)")
			wantErr(t, tx.Commit(t.Context()), receipts.ErrTxEnded)
		},
		"claim that waits": func(tx receipts.Tx[*sql.Tx]) {
			other := db.begin(t)
			claimed(t, other, claim("held"))
			_, err := tx.Claim(t.Context(), []receipts.Claim{claim("held")})
			wantClass(t, db.store, err, receipts.ClassContention)
			must(t, tx.Rollback(t.Context()))
			must(t, other.Rollback(t.Context()))
		},
		"parts": func(tx receipts.Tx[*sql.Tx]) {
			must(t, tx.Part(t.Context()))
			db.add(t, tx.Raw(), "parts")
			must(t, tx.Keep(t.Context()))
			must(t, tx.Part(t.Context()))
			must(t, tx.Undo(t.Context()))
			must(t, tx.Commit(t.Context()))
		},
	}
	for name, end := range ends {
		tx := db.begin(t, receipts.TxOptions{Budget: 20 * time.Second, ClaimWait: 50 * time.Millisecond})
		claimed(t, tx, claim(name))
		end(tx)
		if after := db.sessionVariables(t); !slices.Equal(after, before) {
			t.Errorf("%s: the sessions have\n%q, and had\n%q", name, after, before)
		}
	}
}

// TestMySQLIsReadCommitted looks at a transaction from outside.
func TestMySQLIsReadCommitted(t *testing.T) {
	t.Parallel()
	db := newMyDB(t, param("tx_isolation", "'SERIALIZABLE'"))
	db.onMariaDB(t)
	tx := db.begin(t)
	claimed(t, tx, claim("k"))
	var level string
	must(t, db.QueryRowContext(t.Context(), `SELECT trx_isolation_level FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = ?`,
		sessionOf(t, tx.Raw())).Scan(&level))
	if level != "READ COMMITTED" {
		t.Errorf("the transaction is %s", level)
	}
}

// TestMySQLUnderOtherSettings does a bit of everything under settings of a DSN that change what statements mean or answer.
func TestMySQLUnderOtherSettings(t *testing.T) {
	t.Parallel()
	at := servers.MySQL(t)
	settings := map[string]func(*mysql.Config){
		"none":               func(*mysql.Config) {},
		"interpolated":       func(c *mysql.Config) { c.InterpolateParams = true },
		"found rows":         func(c *mysql.Config) { c.ClientFoundRows = true },
		"many statements":    func(c *mysql.Config) { c.MultiStatements = true },
		"autocommit is off":  param("autocommit", "0"),
		"ANSI":               param("sql_mode", "'ANSI,STRICT_ALL_TABLES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT'"),
		"Latin":              func(c *mysql.Config) { must(t, c.Apply(mysql.Charset("latin1", "latin1_swedish_ci"))) },
		"times as times":     func(c *mysql.Config) { c.ParseTime = true },
		"statement is safe":  param("sql_safe_updates", "1"),
		"binary collation":   func(c *mysql.Config) { c.Collation = "utf8mb4_bin" },
		"rejects read-only":  func(c *mysql.Config) { c.RejectReadOnly = true },
		"no liveness checks": func(c *mysql.Config) { c.CheckConnLiveness = false },
	}
	i := 0
	for name, change := range settings {
		i++
		t.Run(name, func(t *testing.T) {
			db := openMy(t, at, change)
			s, err := receipts.NewMySQL(db.DB, receipts.MySQLOptions{TablePrefix: fmt.Sprintf("Set%d_", i)})
			must(t, err)
			db.store = s
			must(t, s.Migrate(t.Context()))
			must(t, s.Migrate(t.Context()))
			info, err := s.Check(t.Context())
			must(t, err)
			if len(info.Warnings) > 0 {
				t.Errorf("warnings: %q", info.Warnings)
			}
			everything(t, db)
		})
	}
}

// everything claims, stores, marks, parks and asks, with bytes that mean something to somebody.
func everything(t *testing.T, db *myDB) {
	t.Helper()
	const key = "k'\\\"\x00\xff%_"
	tx := db.begin(t)
	for want, c := range map[receipts.ClaimStatus]receipts.Claim{receipts.ClaimFresh: claim(key)} {
		if got := claimed(t, tx, c)[0].Status; got != want {
			t.Fatalf("status %d, want %d", got, want)
		}
	}
	output := receipts.Output{Scope: "billing", Key: []byte(key), Topic: key, UUID: key, Payload: []byte(key), Metadata: map[string]string{key: key}, At: noon}
	stored, err := tx.AddOutputs(t.Context(), []receipts.Output{output, output})
	must(t, err)
	must(t, tx.Divert(t.Context(), []receipts.DeadLetter{{Scope: "billing", Key: []byte(key), Kind: receipts.KindTorn, Reason: "é' \\", Payload: []byte(key), At: noon}}))
	must(t, tx.Commit(t.Context()))
	if got := db.status(t, key); got != receipts.ClaimHeld {
		t.Errorf("status %d after the commit", got)
	}
	must(t, db.store.MarkSent(t.Context(), []receipts.OutputRef{stored[1].OutputRef}, noon))
	unsent, err := db.store.Unsent(t.Context(), receipts.UnsentQuery{Limit: 5, Prefix: "bill"})
	must(t, err)
	if len(unsent) != 1 || unsent[0].Position != 0 || unsent[0].Topic != key || unsent[0].Metadata[key] != key {
		t.Errorf("unsent: %+v", unsent)
	}
	letters, err := db.store.DeadLetters(t.Context(), 5)
	must(t, err)
	if len(letters) != 1 || letters[0].Reason != "é' \\" || string(letters[0].Payload) != key {
		t.Errorf("dead letters: %+v", letters)
	}
	parked := receipts.Parked{Scope: "billing", OrderKey: key, UUID: key, Payload: []byte(key), At: noon}
	must(t, db.store.Park(t.Context(), []receipts.Parked{parked, parked}))
	list, err := db.store.Parked(t.Context(), "billing", key, 0, 5)
	must(t, err)
	if len(list) != 1 || list[0].UUID != key {
		t.Errorf("parked: %+v", list)
	}
	must(t, db.store.Unpark(t.Context(), []int64{list[0].Position}))
	for nonce, want := range map[receipts.Nonce]bool{tx.Nonce(): true, receipts.NewNonce(): false} {
		if committed, err := db.store.Resolve(t.Context(), nonce); err != nil || committed != want {
			t.Errorf("Resolve: %t, %v; want %t", committed, err, want)
		}
	}
	db.wantStats(t, 1, 0, 0)
}

// TestMySQLLargeRows has rows that do not fit into one statement's text.
func TestMySQLLargeRows(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	tx := db.begin(t)
	claimed(t, tx, claim("k"))
	sizes := []int{0, 10, 300_000, 1, 100_000, 100_000, 100_000, 3 << 20, 5}
	var outputs []receipts.Output
	for i, size := range sizes {
		outputs = append(outputs, receipts.Output{Scope: "billing", Key: []byte("k"), Topic: "t", UUID: itoa(i), Payload: make([]byte, size), At: noon})
	}
	for range 700 {
		outputs = append(outputs, receipts.Output{Scope: "billing", Key: []byte("k"), Topic: "t", At: noon})
	}
	_, err := tx.AddOutputs(t.Context(), outputs)
	must(t, err)
	must(t, tx.Commit(t.Context()))
	got, err := db.store.Outputs(t.Context(), "billing", []byte("k"))
	must(t, err)
	if len(got) != len(outputs) {
		t.Fatalf("%d outputs, want %d", len(got), len(outputs))
	}
	for i, o := range got {
		if o.Position != i || len(o.Payload) != len(outputs[i].Payload) || o.UUID != outputs[i].UUID {
			t.Fatalf("output number %d is number %d, of %d bytes", i, o.Position, len(o.Payload))
		}
	}
}

// handled executes a handler's statement.
func handled(t testing.TB, tx *sql.Tx, statement string, args ...any) {
	t.Helper()
	_, err := tx.ExecContext(context.Background(), statement, args...)
	must(t, err)
}

func wantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

func wantClass(t testing.TB, s interface {
	Classify(err error) receipts.Class
}, err error, want receipts.Class,
) {
	t.Helper()
	if err == nil || s.Classify(err) != want {
		t.Fatalf("class %d of %v, want %d", s.Classify(err), err, want)
	}
}
