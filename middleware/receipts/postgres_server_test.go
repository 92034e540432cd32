package receipts_test

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// privatePg is a server that a test may do with what it likes.
func privatePg(t testing.TB, settings map[string]string) *backends.Server {
	t.Helper()
	return servers.TestServer(t, backends.Postgres, backends.ServerOptions{Settings: settings})
}

func TestPostgresCheck(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		info, err := db.store.Check(t.Context())
		must(t, err)
		if info.Dialect != "postgres" || info.Lanes != pgPool-1 || info.Parts || info.Pool != pgPool || info.Schema != 2 ||
			info.ClaimWait != 100*time.Millisecond || len(info.Warnings) != 0 {
			t.Errorf("info: %+v", info)
		}
		info, err = openPg(t, db.at, db.client, pgOptions{pool: 3}).store.Check(t.Context())
		must(t, err)
		if info.Lanes != 2 || info.Pool != 3 {
			t.Errorf("info with a pool of 3: %+v", info)
		}
	})
}

// TestPostgresCheckRefuses what cannot work, and says what to change.
func TestPostgresCheckRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prepare string
		opts    pgOptions
		want    string
	}{
		"pool of one":        {opts: pgOptions{pool: 1}, want: "SetMaxOpenConns"},
		"read-only":          {opts: pgOptions{url: parameter("default_transaction_read_only", "on")}, want: "default_transaction_read_only"},
		"unsafe sync":        {opts: pgOptions{url: parameter("synchronous_commit", "off")}, want: "synchronous_commit"},
		"no tables":          {prepare: `DROP TABLE penstock_schema`, want: "call Migrate"},
		"a table lost":       {prepare: `DROP TABLE penstock_markers`, want: "penstock_markers is gone"},
		"older schema":       {prepare: `DELETE FROM penstock_schema WHERE version > 1`, want: "has version 1"},
		"too new a schema":   {prepare: `INSERT INTO penstock_schema VALUES (9, 9, 0)`, want: "upgrade it"},
		"empty schema":       {prepare: `DELETE FROM penstock_schema`, want: "is empty"},
		"elsewhere, by path": {opts: pgOptions{url: parameter("search_path", "pg_catalog")}, want: "no table penstock_schema"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newPgDB(t, servers.Postgres(t), "pgx", pgOptions{})
			if c.prepare != "" {
				mustExec(t, db.look, c.prepare)
			}
			for _, client := range pgClients() {
				_, err := openPg(t, db.at, client, c.opts).store.Check(t.Context())
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%s: error %v: want one about %q", client, err, c.want)
				}
			}
		})
	}
}

func TestPostgresCheckAcceptsANewerSchemaAndUnsafeSync(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		mustExec(t, db.look, `INSERT INTO penstock_schema VALUES (3, 2, 0)`)
		info, err := openPg(t, db.at, db.client, pgOptions{url: parameter("synchronous_commit", "off"), unsafe: true}).store.Check(t.Context())
		must(t, err)
		if info.Schema != 3 || len(info.Warnings) != 1 || !strings.Contains(info.Warnings[0], "synchronous_commit") {
			t.Errorf("info: %+v", info)
		}
		must(t, db.store.Migrate(t.Context()))
	})
}

func TestPostgresCheckRefusesAnotherDatabase(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("sqlite", "file:"+t.TempDir()+"/app.db")
	must(t, err)
	defer func() { must(t, db.Close()) }()
	s, err := receipts.NewPostgres(db, receipts.PostgresOptions{})
	must(t, err)
	if _, err = s.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "PostgreSQL driver") {
		t.Error(err)
	}
	if _, err := receipts.NewPostgres(nil, receipts.PostgresOptions{}); err == nil {
		t.Error("a nil handle is accepted")
	}
	if _, err := receipts.NewPostgres(db, receipts.PostgresOptions{TablePrefix: "a;b"}); err == nil {
		t.Error("a strange prefix is accepted")
	}
	if _, err := receipts.PostgresMigrations("a b"); err == nil {
		t.Error("a strange prefix is accepted for migrations")
	}
}

// TestPostgresRoleWithoutDDL runs with what Check says a role needs, and not with less.
func TestPostgresRoleWithoutDDL(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		role := "runtime_" + strings.ToLower(strings.Map(func(r rune) rune {
			if r < 'a' || r > 'z' {
				return -1
			}
			return r
		}, db.client)) + db.at.Name
		mustExec(t, db.look, fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD 'secret'`, role))
		t.Cleanup(func() { mustExec(t, db.look, fmt.Sprintf(`DROP OWNED BY %[1]s; DROP ROLE %[1]s`, role)) })
		grants := []string{
			"SELECT ON penstock_schema", "SELECT, INSERT ON penstock_dead_letters", "SELECT, INSERT ON penstock_markers",
			"SELECT, INSERT, UPDATE ON penstock_outputs", "SELECT, INSERT, DELETE ON penstock_parked", "SELECT, INSERT, DELETE ON penstock_receipts",
			"SELECT, INSERT, UPDATE ON counters",
		}
		for i, grant := range grants {
			if i > 0 && i < len(grants)-1 {
				h := openPg(t, db.at.As(role, "secret"), db.client, pgOptions{})
				_, err := h.store.Check(t.Context())
				if err == nil || !strings.Contains(err.Error(), "GRANT "+grant+" TO") {
					t.Fatalf("before GRANT %s: %v", grant, err)
				}
				h.close()
			}
			mustExec(t, db.look, fmt.Sprintf(`GRANT %s TO %s`, grant, role))
		}
		h := openPg(t, db.at.As(role, "secret"), db.client, pgOptions{})
		_, err := h.store.Check(t.Context())
		must(t, err)
		must(t, h.store.Migrate(t.Context())) // there is nothing to do
		tx := h.claimed(t, "a")
		add(t, tx, "a")
		_, err = tx.AddOutputs(t.Context(), []receipts.Output{{Topic: "out", UUID: "u", At: noon}})
		must(t, err)
		must(t, tx.Divert(t.Context(), []receipts.DeadLetter{{Scope: "billing", Kind: receipts.KindRefused, At: noon}}))
		must(t, tx.Commit(t.Context()))
		must(t, h.store.Park(t.Context(), []receipts.Parked{{Scope: "s", OrderKey: "k", UUID: "u", At: noon}}))
		lost := h.claimed(t, "b")
		if committed, err := h.store.Resolve(t.Context(), lost.Nonce()); err != nil || committed {
			t.Error(committed, err)
		}
		db.wantStats(t, 1, 0, 0)
	})
}

// TestPostgresMigrateAtOnce: several processes begin with an empty database.
func TestPostgresMigrateAtOnce(t *testing.T) {
	t.Parallel()
	at := servers.Postgres(t)
	var all sync.WaitGroup
	for i := range 9 {
		h := openPg(t, at, pgClients()[i%3], pgOptions{})
		all.Go(func() {
			if err := h.store.Migrate(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	_, err := openPg(t, at, "pgx", pgOptions{}).store.Check(t.Context())
	must(t, err)
}

func TestPostgresMigrationsByHand(t *testing.T) {
	t.Parallel()
	at := servers.Postgres(t)
	look, err := sql.Open("pgx", at.URL())
	must(t, err)
	defer func() { must(t, look.Close()) }()
	migrations, err := receipts.PostgresMigrations("mine_")
	must(t, err)
	for i, m := range migrations {
		if m.Version != i+1 {
			t.Errorf("migration %d is number %d", i+1, m.Version)
		}
		mustExec(t, look, "BEGIN;"+m.SQL+";COMMIT")
	}
	s, err := receipts.NewPostgres(look, receipts.PostgresOptions{TablePrefix: "mine_"})
	must(t, err)
	info, err := s.Check(t.Context())
	must(t, err)
	if info.Schema != len(migrations) {
		t.Errorf("info: %+v", info)
	}
}

// showAll gives the settings of a session.
func showAll(t testing.TB, conn *sql.Conn) map[string]string {
	t.Helper()
	rows, err := conn.QueryContext(t.Context(), "SHOW ALL")
	must(t, err)
	defer func() { _ = rows.Close() }()
	settings := map[string]string{}
	for rows.Next() {
		var name, value, text string
		must(t, rows.Scan(&name, &value, &text))
		settings[name] = value
	}
	must(t, rows.Err())
	return settings
}

// TestPostgresLeavesNothingInASession: a pooler hands sessions on as they are.
func TestPostgresLeavesNothingInASession(t *testing.T) {
	t.Parallel()
	for _, driver := range []string{"pgx", "postgres"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			at := servers.Postgres(t)
			db, err := sql.Open(driver, at.URL())
			must(t, err)
			defer func() { must(t, db.Close()) }()
			db.SetMaxOpenConns(1) // the one session
			s, err := receipts.NewPostgres(db, receipts.PostgresOptions{})
			must(t, err)
			must(t, s.Migrate(t.Context()))
			before := sessionState(t, db)
			for i, end := range []func(tx receipts.Tx[*sql.Tx]) error{
				func(tx receipts.Tx[*sql.Tx]) error { return tx.Commit(t.Context()) },
				func(tx receipts.Tx[*sql.Tx]) error { return tx.Rollback(t.Context()) },
				func(tx receipts.Tx[*sql.Tx]) error {
					_, err := tx.Raw().ExecContext(t.Context(), "COMMIT")
					_ = tx.Commit(t.Context())
					return err
				},
			} {
				tx, err := s.Begin(t.Context(), receipts.TxOptions{Budget: 7 * time.Second, ClaimWait: time.Second})
				must(t, err)
				_, err = tx.Claim(t.Context(), claimList("key "+itoa(i), "same"))
				must(t, err)
				must(t, end(tx))
				if after := sessionState(t, db); !maps.Equal(before, after) {
					t.Errorf("ending %d changed the session: %v, was %v", i, after, before)
				}
			}
		})
	}
}

func sessionState(t testing.TB, db *sql.DB) map[string]string {
	t.Helper()
	conn, err := db.Conn(t.Context())
	must(t, err)
	defer func() { _ = conn.Close() }()
	state := showAll(t, conn)
	var locks, prepared int
	must(t, conn.QueryRowContext(t.Context(), `SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
	AND database = (SELECT oid FROM pg_database WHERE datname = current_database())), 0`).Scan(&locks, &prepared))
	state["advisory locks"] = itoa(locks)
	return state
}

// TestPostgresThroughPgBouncer in transaction mode: two handles share fewer sessions than they have transactions.
func TestPostgresThroughPgBouncer(t *testing.T) {
	t.Parallel()
	for _, client := range pgClients() {
		t.Run(client, func(t *testing.T) {
			t.Parallel()
			modes := []string{"exec", "simple_protocol", "cache_describe"}
			if client == "lib/pq" {
				modes = []string{""}
			}
			for _, mode := range modes {
				t.Run(mode, func(t *testing.T) {
					at := servers.PgBouncer(t)
					opts := pgOptions{}
					if mode != "" {
						opts.url = parameter("default_query_exec_mode", mode)
					}
					first := openPg(t, at, client, opts)
					must(t, first.store.Migrate(t.Context()))
					second := openPg(t, at, client, opts)
					_, err := second.store.Check(t.Context())
					must(t, err)
					for i := range 10 {
						tx := []*pgHandle{first, second}[i%2].claimed(t, "key "+itoa(i), "other "+itoa(i))
						_, err := tx.AddOutputs(t.Context(), []receipts.Output{{Scope: "billing", Key: []byte("k"), Topic: "out", UUID: itoa(i), At: noon}})
						must(t, err)
						must(t, tx.Divert(t.Context(), []receipts.DeadLetter{{Scope: "s", Key: []byte(itoa(i)), Kind: receipts.KindTorn, At: noon}}))
						must(t, tx.Unclaim(t.Context(), claimList("other "+itoa(i))))
						must(t, tx.Commit(t.Context()))
						committed, err := first.store.Resolve(t.Context(), tx.Nonce())
						must(t, err)
						if !committed {
							t.Error("resolved as not committed")
						}
					}
					stats, err := first.store.Stats(t.Context())
					must(t, err)
					if stats.Done != 10 || stats.Outputs != 10 || stats.DeadLetters[receipts.KindTorn] != 10 {
						t.Errorf("stats: %+v", stats)
					}
				})
			}
		})
	}
}

// TestPostgresExecModes of pgx.
func TestPostgresExecModes(t *testing.T) {
	t.Parallel()
	db := newPgDB(t, servers.Postgres(t), "pgx", pgOptions{})
	done := 0
	for _, client := range []string{"pgx", "pgxstore"} {
		for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
			t.Run(client+" "+mode, func(t *testing.T) {
				h := openPg(t, db.at, client, pgOptions{url: parameter("default_query_exec_mode", mode)})
				_, err := h.store.Check(t.Context())
				must(t, err)
				key := client + mode
				tx := h.claimed(t, key+"a", key+"b\x00\xff", key+"c")
				add(t, tx, key)
				must(t, tx.Unclaim(t.Context(), claimList(key+"c")))
				must(t, tx.Commit(t.Context()))
				db.wantEffect(t, key, 1)
				done += 2
				tx = h.tx(t)
				want := []receipts.ClaimStatus{receipts.ClaimHeld, receipts.ClaimFresh, receipts.ClaimHeld}
				for i, r := range claimsOf(t, tx, key+"b\x00\xff", key+"d", key+"a") {
					if r.Status != want[i] {
						t.Errorf("claim %d: %+v", i, r)
					}
				}
				must(t, tx.exec(t.Context(), "ROLLBACK; BEGIN")) // sent in the simple protocol in any mode
				wantIs(t, tx.Commit(t.Context()), receipts.ErrTxEnded)
				db.wantStats(t, done, 0, 0)
			})
		}
	}
}
