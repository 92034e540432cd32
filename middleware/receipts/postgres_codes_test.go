package receipts_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func anyPostgres(t testing.TB) *receipts.Postgres {
	t.Helper()
	db, err := sql.Open("pgx", "postgres://nobody@127.0.0.1:1/none")
	must(t, err)
	t.Cleanup(func() { must(t, db.Close()) })
	s, err := receipts.NewPostgres(db, receipts.PostgresOptions{})
	must(t, err)
	return s
}

func TestPostgresClassifyCodes(t *testing.T) {
	t.Parallel()
	s := anyPostgres(t)
	for code, want := range map[string]receipts.Class{
		"40001": receipts.ClassContention, "40P01": receipts.ClassContention, "55P03": receipts.ClassContention,
		"08006": receipts.ClassOutage, "08P01": receipts.ClassOutage, "53100": receipts.ClassOutage, "53300": receipts.ClassOutage,
		"57P01": receipts.ClassOutage, "57P02": receipts.ClassOutage, "57P03": receipts.ClassOutage, "58030": receipts.ClassOutage,
		"25006": receipts.ClassOutage, "28P01": receipts.ClassOutage, "3D000": receipts.ClassOutage, "XX001": receipts.ClassOutage,
		"23505": receipts.ClassOther, "25P02": receipts.ClassOther, "57014": receipts.ClassOther, "42501": receipts.ClassOther,
		"40003": receipts.ClassOther, "25P03": receipts.ClassOther, "22012": receipts.ClassOther, "XX000": receipts.ClassOther, "": receipts.ClassOther,
	} {
		for _, err := range []error{&pgconn.PgError{Code: code}, &pq.Error{Code: pqerror.Code(code)}} {
			if got := s.Classify(fmt.Errorf("handler: %w", errors.Join(errors.New("more"), err))); got != want {
				t.Errorf("%T %s: %d, want %d", err, code, got, want)
			}
		}
	}
}

// clientError has the type of one of pgx's own, which wrap what the network says.
func clientError(cause error) error { return pgconn.NewParseConfigError("", "", cause) }

func TestPostgresClassifyConnections(t *testing.T) {
	t.Parallel()
	s := anyPostgres(t)
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	for name, c := range map[string]struct {
		err  error
		want receipts.Class
	}{
		"nothing":                              {nil, receipts.ClassOther},
		"a bad connection":                     {driver.ErrBadConn, receipts.ClassOutage},
		"a closed connection":                  {sql.ErrConnDone, receipts.ClassOutage},
		"network, said by the client":          {clientError(refused), receipts.ClassOutage},
		"end of file, said by the client":      {clientError(io.ErrUnexpectedEOF), receipts.ClassOutage},
		"a context, said by the client":        {clientError(context.DeadlineExceeded), receipts.ClassOther},
		"a cancelled one":                      {clientError(context.Canceled), receipts.ClassOther},
		"network of the handler's own":         {&url.Error{Op: "Get", URL: "http://elsewhere", Err: refused}, receipts.ClassOther},
		"end of a file that the handler reads": {fmt.Errorf("decoding: %w", io.ErrUnexpectedEOF), receipts.ClassOther},
		"a context of the handler's own":       {context.DeadlineExceeded, receipts.ClassOther},
		"a member's queued statement":          {&receipts.MemberError{Member: 1, Err: &pgconn.PgError{Code: "40P01"}}, receipts.ClassContention},
	} {
		if got := s.Classify(c.err); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

// TestPostgresClassifyUnreachable: nobody listens there.
func TestPostgresClassifyUnreachable(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	address := listener.Addr().String()
	must(t, listener.Close())
	for _, client := range pgClients() {
		h := openPg(t, servers.Postgres(t).At(address), client, pgOptions{})
		_, err := processedBy(t, h)
		if got := h.store.Classify(err); got != receipts.ClassOutage {
			t.Errorf("%s: %d: %v", client, got, err)
		}
		_, err = h.store.Stats(t.Context())
		if got := h.store.Classify(err); got != receipts.ClassOutage {
			t.Errorf("%s, counting: %d: %v", client, got, err)
		}
	}
}

func processedBy(t testing.TB, h *pgHandle) (tx pgTx, err error) {
	t.Helper()
	if tx, err = h.begin(t.Context(), receipts.TxOptions{Budget: time.Minute}); err == nil {
		_, err = tx.Claim(t.Context(), claimList("a"))
	}
	return tx, err
}

// TestPostgresClassifyWhatHandlersMeet makes the server say it.
func TestPostgresClassifyWhatHandlersMeet(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		mustExec(t, db.look, `INSERT INTO counters VALUES ('locked', 1)`)
		blocker, err := db.look.BeginTx(t.Context(), nil)
		must(t, err)
		defer func() { _ = blocker.Rollback() }()
		_, err = blocker.ExecContext(t.Context(), `UPDATE counters SET value = 2`)
		must(t, err)
		for statement, want := range map[string]receipts.Class{
			`SET LOCAL lock_timeout = 10; UPDATE counters SET value = 3`:           receipts.ClassContention,
			`SELECT * FROM counters FOR UPDATE NOWAIT`:                             receipts.ClassContention,
			`SET TRANSACTION READ ONLY; INSERT INTO counters VALUES ('new', 1)`:    receipts.ClassOutage,
			`INSERT INTO counters VALUES ('locked', NULL)`:                         receipts.ClassOther,
			`SET LOCAL statement_timeout = 10; SELECT pg_sleep(60)`:                receipts.ClassOther,
			`DO $$ BEGIN RAISE 'disk' USING ERRCODE = 'disk_full'; END $$`:         receipts.ClassOutage,
			`DO $$ BEGIN RAISE '' USING ERRCODE = 'serialization_failure'; END $$`: receipts.ClassContention,
		} {
			tx := db.tx(t)
			err := tx.exec(t.Context(), statement)
			if err == nil {
				t.Fatalf("%s: no error", statement)
			}
			if got := db.store.Classify(err); got != want {
				t.Errorf("%s: %d, want %d: %v", statement, got, want, err)
			}
			must(t, tx.Rollback(t.Context()))
		}
	})
}

// TestPostgresDeadlock: one of two handlers that lock each other's rows is told so.
func TestPostgresDeadlock(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		first, second := db.claimed(t, "1"), db.claimed(t, "2")
		add(t, first, "a")
		add(t, second, "b")
		met := make(chan error, 2)
		go func() { met <- first.exec(context.Background(), pgAdd, "b") }()
		go func() { met <- second.exec(context.Background(), pgAdd, "a") }()
		err := <-met
		if err == nil {
			must(t, first.Rollback(t.Context())) // in case it is the one that waits
			err = <-met
		} else {
			defer func() {
				if err := <-met; err != nil {
					t.Log("the other one:", err)
				}
			}()
		}
		db.wantClass(t, err, receipts.ClassContention)
		must(t, first.Rollback(t.Context()))
		must(t, second.Rollback(t.Context()))
	})
}
