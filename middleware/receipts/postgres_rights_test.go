package receipts_test

import (
	"crypto/rand"
	"database/sql"
	"fmt"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// Check names a right that the role lacks on a table, whichever it is, and asks for none that the store does not use.
func TestPostgresCheckNamesAMissingRight(t *testing.T) {
	t.Parallel()
	db := newPgDB(t, servers.Postgres(t), "pgx", pgOptions{})
	role := "penstock_test_" + strings.ToLower(rand.Text()[:12])
	do := func(format string, args ...any) {
		t.Helper()
		_, err := db.look.ExecContext(t.Context(), fmt.Sprintf(format, args...))
		must(t, err)
	}
	do(`CREATE ROLE %s`, role)
	t.Cleanup(func() {
		for _, query := range []string{"DROP OWNED BY " + role, "DROP ROLE " + role} {
			if _, err := db.look.Exec(query); err != nil {
				t.Error(err)
			}
		}
	})
	lesser, err := sql.Open("pgx", db.at.URL()+"&role="+role)
	must(t, err)
	t.Cleanup(func() { must(t, lesser.Close()) })
	store, err := receipts.NewPostgres(lesser, receipts.PostgresOptions{})
	must(t, err)
	do(`GRANT SELECT ON penstock_schema TO %s`, role)
	rights := map[string]string{
		"receipts": "SELECT, INSERT, DELETE", "markers": "SELECT, INSERT", "outputs": "SELECT, INSERT, UPDATE",
		"dead_letters": "SELECT, INSERT", "parked": "SELECT, INSERT, DELETE",
	}
	for table, list := range rights {
		do(`GRANT %s ON penstock_%s TO %s`, list, table, role)
	}
	if _, err := store.Check(t.Context()); err != nil {
		t.Fatalf("with all rights: %v", err)
	}
	for table, list := range rights {
		for _, right := range strings.Split(list, ", ") {
			do(`REVOKE %s ON penstock_%s FROM %s`, right, table, role)
			want := fmt.Sprintf("GRANT %s ON penstock_%s TO that role", list, table)
			if _, err := store.Check(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("without %s on %s: %v", right, table, err)
			}
			do(`GRANT %s ON penstock_%s TO %s`, right, table, role)
		}
	}
}
