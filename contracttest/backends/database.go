package backends

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
)

// Database is a database on a server, with what a client needs to reach it. Copy it freely.
type Database struct {
	// Kind is what the server was asked for as; the protocol of PgBouncer is that of PostgreSQL.
	Kind Kind
	// Address is host:port of a TCP port.
	Address string
	// User, Password and Name are what a client logs in with.
	User, Password, Name string
	// Version is what the server says of itself, such as "10.11.19-MariaDB".
	Version string
	// params are those of the address that was given.
	params url.Values
}

// URL is the address as a URL, as pgx and lib/pq take it: postgres:// or mysql://. It holds the password: do not log it.
func (d Database) URL() string {
	params := d.params
	if d.Kind.protocol() == Postgres && params.Get("sslmode") == "" {
		params = url.Values{"sslmode": {"disable"}}
		for name, values := range d.params {
			params[name] = values
		}
	}
	u := url.URL{
		Scheme: string(d.Kind.protocol()), User: url.UserPassword(d.User, d.Password), Host: d.Address, Path: "/" + d.Name,
		RawQuery: params.Encode(),
	}
	return u.String()
}

// DSN is the name that the database's own client for database/sql takes: that of go-sql-driver/mysql for the MySQL family,
// without parameters but those of the variable's URL, and the URL for PostgreSQL. It holds the password: do not log it.
func (d Database) DSN() string {
	if d.Kind.protocol() == Postgres {
		return d.URL()
	}
	config := mysql.NewConfig()
	config.User, config.Passwd, config.Net, config.Addr, config.DBName = d.User, d.Password, "tcp", d.Address, d.Name
	dsn := config.FormatDSN()
	if len(d.params) > 0 {
		dsn = strings.TrimSuffix(dsn, "?") + "?" + d.params.Encode()
	}
	return dsn
}

// At is the same database through another address, for instance a proxy's.
func (d Database) At(address string) Database {
	d.Address = address
	return d
}

// As is the same database for another user.
func (d Database) As(user, password string) Database {
	d.User, d.Password = user, password
	return d
}

// String names the database without its password.
func (d Database) String() string { return fmt.Sprintf("%s %s at %s", d.Kind, d.Name, d.Address) }

// admin makes and drops databases over a server's own protocol. All calls are bounded by ctx; each uses a connection of its
// own.
type admin interface {
	// ping logs in, asks one thing, and gives the server's version.
	ping(ctx context.Context, at Database) (version string, err error)
	create(ctx context.Context, at Database, name string) error
	// drop ends the sessions of the database first.
	drop(ctx context.Context, at Database, name string) error
}

func (k Kind) admin() admin {
	if k.protocol() == Postgres {
		return postgresAdmin{}
	}
	return mysqlAdmin{}
}

// Limits of time for what is asked of a server that is there.
const (
	pingTimeout  = 3 * time.Second
	adminTimeout = 30 * time.Second
)

// newDatabase makes a database with a random name on the server at the address.
func newDatabase(ctx context.Context, at Database) (Database, error) {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	name := "penstock_test_" + strings.ToLower(rand.Text()[:12])
	if err := at.Kind.admin().create(ctx, at, name); err != nil {
		return Database{}, fmt.Errorf("making a database on %s at %s: %w", at.Kind, at.Address, err)
	}
	at.Name = name
	return at, nil
}

// dropDatabase drops a database that newDatabase made on the server at the address.
func dropDatabase(ctx context.Context, at, d Database) error {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	if !strings.HasPrefix(d.Name, "penstock_test_") {
		return fmt.Errorf("refusing to drop %s: it is not a test's", d)
	}
	if err := at.Kind.admin().drop(ctx, at, d.Name); err != nil {
		return fmt.Errorf("dropping %s: %w", d, err)
	}
	return nil
}

// parseURL reads the address of a server. Its errors do not show the address, which may hold a password.
func parseURL(k Kind, raw string) (Database, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return Database{}, errors.New(k.Variable() + " is not a URL")
	}
	scheme, port, name := "mysql", "3306", ""
	if k.protocol() == Postgres {
		scheme, port, name = "postgres", "5432", "postgres"
	}
	if u.Scheme != scheme && (scheme != "postgres" || u.Scheme != "postgresql") {
		return Database{}, fmt.Errorf("%s has to begin with %s://", k.Variable(), scheme)
	}
	if u.Hostname() == "" {
		return Database{}, fmt.Errorf("%s names no host", k.Variable())
	}
	if u.Port() != "" {
		port = u.Port()
	}
	if path := strings.Trim(u.Path, "/"); path != "" {
		name = path
	}
	password, _ := u.User.Password()
	return Database{
		Kind: k, Address: net.JoinHostPort(u.Hostname(), port), User: u.User.Username(), Password: password, Name: name,
		params: u.Query(),
	}, nil
}
