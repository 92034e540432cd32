package contracttest_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// postgresServer is a database on PostgreSQL. In it each folder has a schema of its own. Behind PgBouncer in transaction mode,
// where no session can be told of a schema, each folder has a database beside it.
type postgresServer struct {
	url     string
	bounced bool
	ready   sync.Map // databases that are there
}

// dropRole drops a role that limited has made, with its rights, when nobody uses it any more.
func (p *postgresServer) dropRole(role string) error {
	return p.execute(context.Background(), p.url, "DROP OWNED BY "+role+"; DROP ROLE "+role)
}

// postgresConns are the most connections of one handle.
const postgresConns = 5

// schema gives the address of a folder's schema, and its name, which is not there before it is made. A statement waits half a
// second for what another one has locked: that makes waiting contention, where it would last until the transaction's budget
// ends.
func (p *postgresServer) schema(ctx context.Context, dir string) (at, name string, err error) {
	sum := sha256.Sum256([]byte(dir))
	name = "s" + hex.EncodeToString(sum[:8])
	if p.bounced {
		at, err = p.database(ctx, name)
		return at, "public", err
	}
	at, err = withParams(p.url, "search_path", name, "lock_timeout", "500")
	return at, name, err
}

// database gives the address of a database, which is made where it is not there.
func (p *postgresServer) database(ctx context.Context, suffix string) (string, error) {
	u, err := url.Parse(p.url)
	if err != nil {
		return "", errors.New("the database's URL cannot be used")
	}
	name := strings.TrimPrefix(u.Path, "/") + "_" + suffix
	u.Path = "/" + name
	if _, there := p.ready.LoadOrStore(name, true); there {
		return u.String(), nil
	}
	err = p.execute(ctx, p.url, "CREATE DATABASE "+name)
	if there := new(pgconn.PgError); errors.As(err, &there) && there.Code == "42P04" {
		return u.String(), nil
	}
	if err == nil {
		err = p.execute(ctx, p.url, "ALTER DATABASE "+name+" SET lock_timeout = '500ms'")
	}
	return u.String(), err
}

// empty gives the address of a folder's schema, which is made.
func (p *postgresServer) empty(ctx context.Context, dir string) (string, error) {
	at, schema, err := p.schema(ctx, dir)
	if err != nil {
		return "", err
	}
	return at, p.execute(ctx, at, makeSchema(schema))
}

// makeSchema makes a schema where it is not there. Two at a time would fail in spite of IF NOT EXISTS.
func makeSchema(name string) string {
	return "SELECT pg_advisory_xact_lock(1); CREATE SCHEMA IF NOT EXISTS " + name
}

// tables gives the address of a folder's schema with the tables of the store, whichever it is, and those for effects. They are
// made where they are not there: then a file in the folder says so to other processes. All of that takes one connection,
// because it is done for every clause.
func (p *postgresServer) tables(ctx context.Context, dir string) (string, error) {
	at, schema, err := p.schema(ctx, dir)
	if err != nil {
		return "", err
	}
	mark := filepath.Join(dir, "tables")
	if _, err := os.Stat(mark); err == nil {
		return at, nil
	}
	db, err := sql.Open("pgx", at)
	if err != nil {
		return "", err
	}
	defer func() { _ = db.Close() }()
	db.SetMaxOpenConns(1)
	if _, err := db.ExecContext(ctx, makeSchema(schema)); err != nil {
		return "", err
	}
	store, err := receipts.NewPostgres(db, receipts.PostgresOptions{})
	if err == nil {
		err = store.Migrate(ctx)
	}
	if err == nil {
		_, err = db.ExecContext(ctx, `SELECT pg_advisory_xact_lock(2);
			CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, n BIGINT NOT NULL);
			CREATE TABLE IF NOT EXISTS large (t TEXT);
			ALTER TABLE large ALTER t SET STORAGE EXTERNAL`) // not compressed
	}
	if err != nil {
		return "", err
	}
	return at, os.WriteFile(mark, nil, 0o600)
}

// newer makes of the tables what a later version may.
func (p *postgresServer) newer(ctx context.Context, dir string) error {
	at, _, err := p.schema(ctx, dir)
	if err != nil {
		return err
	}
	return p.execute(ctx, at, "SET LOCAL lock_timeout = 0;"+nextVersion) // it waits for those who use them
}

// limited gives the address of a folder's schema for a new role that has the everyday rights.
func (p *postgresServer) limited(ctx context.Context, dir string) (at, role string, err error) {
	at, schema, err := p.schema(ctx, dir)
	if err != nil {
		return "", "", err
	}
	u, err := url.Parse(at)
	if err != nil {
		return "", "", errors.New("the database's URL cannot be used")
	}
	role = "penstock_test_" + strings.ToLower(rand.Text()[:12])
	u.User = url.UserPassword(role, rand.Text())
	password, _ := u.User.Password()
	return u.String(), role, p.execute(ctx, at, fmt.Sprintf(`CREATE ROLE %[1]s LOGIN PASSWORD '%[2]s';
		GRANT USAGE ON SCHEMA %[3]s TO %[1]s;
		GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %[3]s TO %[1]s`, role, password, schema))
}

// execute runs statements in a session of their own.
func (p *postgresServer) execute(ctx context.Context, at, statements string) error {
	conn, err := pgx.Connect(ctx, at)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, statements)
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}

// withParams adds parameters to a URL, names and values in turns.
func withParams(at string, params ...string) (string, error) {
	u, err := url.Parse(at)
	if err != nil {
		return "", errors.New("the database's URL cannot be used")
	}
	q := u.Query()
	for i := 0; i < len(params); i += 2 {
		q.Set(params[i], params[i+1])
	}
	u.RawQuery = q.Encode()
	return u.String(), nil
}

const (
	postgresApply = `INSERT INTO counters AS c (name, n) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET n = c.n + excluded.n`
	// postgresRead makes the row where there is none, so that it can be locked.
	postgresRead = `INSERT INTO counters AS c (name, n) VALUES ($1, 0) ON CONFLICT (name) DO UPDATE SET n = c.n RETURNING n`
	// postgresLarge needs room.
	postgresLarge = `INSERT INTO large VALUES (repeat('x', 1000000))`
	// postgresViolation violates a constraint.
	postgresViolation = `INSERT INTO counters (name, n) VALUES ('violated', NULL)`
)

// postgresErrors are statements that leave the transaction failed, so that it takes nothing but a rollback, or end its
// session.
func postgresErrors() map[string]string {
	raise := func(code string) string { return "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '" + code + "'; END $$" }
	return map[string]string{
		"division":      "SELECT 1/0",
		"no table":      "SELECT * FROM nowhere",
		"no savepoint":  "ROLLBACK TO SAVEPOINT nobody_made_it",
		"timeout":       "SET LOCAL statement_timeout = 1; SELECT pg_sleep(1)",
		"deadlock":      raise("40P01"),
		"serialization": raise("40001"),
		"session ended": "SELECT pg_terminate_backend(pg_backend_pid())",
	}
}

// cutOff has a statement cut off by a context of its own, after which both clients close the connection.
func cutOff(ctx context.Context, run func(ctx context.Context, statement string) error) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	return run(ctx, "SELECT pg_sleep(10)")
}

// kill ends a session from outside and waits until it is gone.
func (p *postgresServer) kill(ctx context.Context, pid int) error {
	conn, err := pgx.Connect(ctx, p.url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, `SELECT pg_terminate_backend($1)`, pid); err != nil {
		return err
	}
	for there := true; there; {
		if err := conn.QueryRow(ctx, `SELECT count(*) > 0 FROM pg_stat_activity WHERE pid = $1`, pid).Scan(&there); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// proxied puts a proxy before a folder's schema. Handles that go through it have a name of their own, by which readOnly finds
// their sessions.
func (p *postgresServer) proxied(ctx context.Context, at string) (proxied, error) {
	named, err := withParams(at, "application_name", faultyHandle)
	if err != nil {
		return proxied{}, err
	}
	return proxyPostgres(ctx, named)
}

const faultyHandle = "penstock_faulty"

// readOnly has the server begin nothing but read-only sessions, and ends those that faulty handles have; forget has the handle
// forget them. It is like a server that has become a standby: what began while it was one stays read-only.
func (p *postgresServer) readOnly(forget func()) outage {
	return func(ctx context.Context) (func(), func() int, error) {
		conn, err := pgx.Connect(ctx, p.url) // before the others, so that it can end what it begins
		if err != nil {
			return nil, nil, err
		}
		set := func(how string) error {
			_, err := conn.Exec(context.WithoutCancel(ctx),
				"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I "+how+"', current_database()); END $$")
			return err
		}
		end := sync.OnceFunc(func() {
			_ = errors.Join(set("RESET default_transaction_read_only"), conn.Close(context.WithoutCancel(ctx)))
		})
		err = set("SET default_transaction_read_only = on")
		if err == nil {
			_, err = conn.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
				WHERE datname = current_database() AND application_name = $1`, faultyHandle)
		}
		if err != nil {
			end()
			return end, nil, err
		}
		forget()
		err = p.execute(ctx, p.url, "CREATE TABLE not_made (n INT)")
		if err == nil {
			end()
			err = errors.New("a new session still writes")
		} else {
			err = nil
		}
		return end, func() int { return 1 }, err
	}
}
