package receipts_test

import (
	"errors"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

const makeReadOnly = `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database()); END $$`

// TestReadOnlySessionIsNotUsedAgain has a session that began while the server took no writes. It stays as it is when the server
// takes them again, so the pool must not keep it.
func TestReadOnlySessionIsNotUsedAgain(t *testing.T) {
	t.Parallel()
	db := newPgDB(t, "pgx") // lib/pq asks for READ WRITE in every BEGIN
	conn, err := db.Conn(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = conn.ExecContext(t.Context(), makeReadOnly)
	must(t, err)
	standby := db.again(t)
	standby.SetMaxOpenConns(2)
	standby.SetMaxIdleConns(2)
	claims := []receipts.Claim{{Scope: "s", Key: []byte("k"), State: receipts.StateDone, At: noon}}
	for range 2 {
		tx := standby.begin(t)
		_, err := tx.Claim(t.Context(), claims)
		if class := standby.store.Classify(err); class != receipts.ClassOutage {
			t.Errorf("a claim in a read-only session is of class %d: %v", class, err)
		}
		must(t, tx.Rollback(t.Context()))
	}
	if err := standby.store.Park(t.Context(), []receipts.Parked{{Scope: "s", OrderKey: "o", UUID: "u", At: noon}}); err == nil {
		t.Error("a read-only session has parked a message")
	}
	_, err = conn.ExecContext(t.Context(), `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET default_transaction_read_only', current_database()); END $$`)
	must(t, err)
	for range 3 {
		tx := standby.begin(t)
		_, claimErr := tx.Claim(t.Context(), claims)
		must(t, errors.Join(claimErr, tx.Rollback(t.Context())))
	}
	must(t, standby.store.Park(t.Context(), []receipts.Parked{{Scope: "s", OrderKey: "o", UUID: "u", At: noon}}))
}
