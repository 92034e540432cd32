package pgxstore_test

import (
	"errors"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// TestReadOnlySessionIsNotUsedAgain has a session that began while the server took no writes. It stays as it is when the server
// takes them again, so the pool must not keep it.
func TestReadOnlySessionIsNotUsedAgain(t *testing.T) {
	db := newDatabase(t)
	conn, err := db.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	set := func(how string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I `+how+`', current_database()); END $$`)
		must(t, err)
	}
	set("SET default_transaction_read_only = on")
	standby := open(t, db.at)
	claim := func() error {
		tx, err := standby.store.Begin(t.Context(), receipts.TxOptions{})
		must(t, err)
		_, err = tx.Claim(t.Context(), []receipts.Claim{{Scope: "s", Key: []byte("k"), State: receipts.StateDone, At: noon}})
		return errors.Join(err, tx.Rollback(t.Context()))
	}
	for range 2 {
		err := claim()
		if class := standby.store.Classify(err); class != receipts.ClassOutage {
			t.Errorf("a claim in a read-only session is of class %d: %v", class, err)
		}
	}
	set("RESET default_transaction_read_only")
	for range 3 {
		must(t, claim())
	}
}
