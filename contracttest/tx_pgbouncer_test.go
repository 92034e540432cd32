package contracttest_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

// bouncedClauses are those that have to do with sessions: PgBouncer in transaction mode gives each transaction any one.
func bouncedClauses() []string {
	return []string{"T01", "T04", "T05", "T07", "T12", "T15/held", "T16", "T29", "T30/kill", "T33"}
}

func TestTxPgBouncerPgx(t *testing.T) {
	t.Parallel()
	rep := contracttest.ExamineTx(t, unbubbled(), bouncedPgx(tell(t, bouncedPgxName, bouncedURL(t))), bouncedClauses()...)
	failing(t, rep, "")
	wantNotRun(t, rep)
}

func TestTxPgBouncerNative(t *testing.T) {
	t.Parallel()
	rep := contracttest.ExamineTx(t, unbubbled(), bouncedNative(tell(t, bouncedNativeName, bouncedURL(t))), bouncedClauses()...)
	failing(t, rep, "")
	wantNotRun(t, rep)
}

// Names of harnesses that child processes are asked for.
const (
	bouncedPgxName    = "pgbouncer, pgx"
	bouncedNativeName = "pgbouncer, pgxstore"
)

// bouncedPgx is postgresPgx through PgBouncer. All roles are one behind it, so that Limited only keeps from making tables.
func bouncedPgx(url string) contracttest.StoreHarness[*sql.Tx] {
	s := postgresOn(bouncedPgxName, &postgresSQL{postgresServer: postgresServer{url: url, bounced: true}, driver: "pgx"})
	s.Limited = s.Empty
	return s
}

// bouncedNative is bouncedPgx for pgxstore.
func bouncedNative(url string) contracttest.StoreHarness[*pgxstore.Tx] {
	s := nativeOn(bouncedNativeName, &postgresPool{postgresServer{url: url, bounced: true}})
	s.Limited = s.Empty
	return s
}

// bouncedURL is a database behind PgBouncer, whose folders' databases are dropped with the test. pgx must not keep statements
// prepared, because the next one may be in another session.
func bouncedURL(t *testing.T) string {
	t.Helper()
	at, err := withParams(servers.PgBouncer(t).URL(), "default_query_exec_mode", "exec")
	must(t, err)
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), at)
		must(t, err)
		defer func() { must(t, conn.Close(context.Background())) }()
		rows, err := conn.Query(context.Background(),
			`SELECT datname::text FROM pg_database WHERE starts_with(datname::text, current_database() || '_')`)
		must(t, err)
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		must(t, err)
		for _, name := range names {
			_, err := conn.Exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)")
			must(t, err)
		}
	})
	return at
}
