package receipts_test

import (
	"database/sql"
	"errors"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

const makeReadOnly = `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database()); END $$`

// TestReadOnlySessionIsNotUsedAgain has a session that began while the server took no writes. It stays as it is when the server
// takes them again, so the pool must not keep it.
func TestReadOnlySessionIsNotUsedAgain(t *testing.T) {
	t.Parallel()
	db := newPgDB(t, servers.Postgres(t), "pgx", pgOptions{}) // lib/pq asks for READ WRITE in every BEGIN
	conn, err := db.look.Conn(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = conn.ExecContext(t.Context(), makeReadOnly)
	must(t, err)
	standby, err := sql.Open("pgx", db.at.URL())
	must(t, err)
	t.Cleanup(func() { must(t, standby.Close()) })
	standby.SetMaxOpenConns(2)
	standby.SetMaxIdleConns(2)
	store, err := receipts.NewPostgres(standby, receipts.PostgresOptions{})
	must(t, err)
	begin := func() receipts.Tx[*sql.Tx] {
		tx, err := store.Begin(t.Context(), receipts.TxOptions{})
		must(t, err)
		return tx
	}
	claims := []receipts.Claim{{Scope: "s", Key: []byte("k"), State: receipts.StateDone, At: noon}}
	for range 2 {
		tx := begin()
		_, err := tx.Claim(t.Context(), claims)
		if class := store.Classify(err); class != receipts.ClassOutage {
			t.Errorf("a claim in a read-only session is of class %d: %v", class, err)
		}
		must(t, tx.Rollback(t.Context()))
	}
	if err := store.Park(t.Context(), []receipts.Parked{{Scope: "s", OrderKey: "o", UUID: "u", At: noon}}); err == nil {
		t.Error("a read-only session has parked a message")
	}
	_, err = conn.ExecContext(t.Context(), `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET default_transaction_read_only', current_database()); END $$`)
	must(t, err)
	for range 3 {
		tx := begin()
		_, claimErr := tx.Claim(t.Context(), claims)
		must(t, errors.Join(claimErr, tx.Rollback(t.Context())))
	}
	must(t, store.Park(t.Context(), []receipts.Parked{{Scope: "s", OrderKey: "o", UUID: "u", At: noon}}))
}
