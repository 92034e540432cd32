package backends

import (
	"fmt"
	"slices"
	"strings"
)

// Kind is a kind of server.
type Kind string

// The kinds of servers.
const (
	// Postgres is PostgreSQL.
	Postgres Kind = "postgres"
	// MySQL is a server of the MySQL family, in practice MariaDB: that is what is started here.
	MySQL Kind = "mysql"
	// MySQL8 is a MySQL 8 of Oracle's. None is ever started: it has to be named by its variable.
	MySQL8 Kind = "mysql8"
	// PgBouncer is PgBouncer in transaction mode, in front of the server of kind [Postgres].
	PgBouncer Kind = "pgbouncer"
)

// requireVariable lists kinds that are an error where they are missing, or is "all": every kind but MySQL8.
const requireVariable = "PENSTOCK_REQUIRE"

// localVariable, set to "no", leaves servers at the usual local ports alone.
const localVariable = "PENSTOCK_LOCAL"

// kinds lists all kinds.
func kinds() []Kind { return []Kind{Postgres, MySQL, MySQL8, PgBouncer} }

// Variable is the environment variable that holds the address of a server of this kind, as a URL:
// postgres://user:password@host:port/database or mysql://user:password@host:port/. The user has to be allowed to make
// databases.
func (k Kind) Variable() string { return "PENSTOCK_" + strings.ToUpper(string(k)) + "_URL" }

// String gives the product's name.
func (k Kind) String() string {
	switch k {
	case Postgres:
		return "PostgreSQL"
	case MySQL:
		return "MariaDB"
	case MySQL8:
		return "MySQL 8"
	case PgBouncer:
		return "PgBouncer"
	default:
		return string(k)
	}
}

// protocol is the kind whose protocol it speaks.
func (k Kind) protocol() Kind {
	switch k {
	case PgBouncer:
		return Postgres
	case MySQL8:
		return MySQL
	case Postgres, MySQL:
	}
	return k
}

// install is the one command that installs it.
func (k Kind) install() string {
	switch k {
	case Postgres:
		return "apt-get install postgresql"
	case MySQL:
		return "apt-get install mariadb-server-core mariadb-client-core"
	case PgBouncer:
		return "apt-get install pgbouncer"
	case MySQL8:
	}
	return ""
}

// Missing is the error where there is no server of a kind and none can be started.
type Missing struct { //nolint:errname // it reads better where it is used: a server is Missing
	Kind Kind
	// Tried says what was looked for and why it is not there.
	Tried []string
}

// Error names what was tried and the command that installs the server.
func (m *Missing) Error() string {
	text := fmt.Sprintf("%s for tests is missing: %s", m.Kind, strings.Join(m.Tried, "; "))
	if command := m.Kind.install(); command != "" {
		text += "; to install it on Debian or Ubuntu: " + command
	}
	return text
}

// required reads the kinds that must not be missing.
func required(list string) ([]Kind, error) {
	var must []Kind
	for _, word := range strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' }) {
		switch {
		case word == "all":
			must = append(must, Postgres, MySQL, PgBouncer)
		case slices.Contains(kinds(), Kind(word)):
			must = append(must, Kind(word))
		default:
			return nil, fmt.Errorf("%s: %q is not a kind of server; known are %q and all", requireVariable, word, kinds())
		}
	}
	return must, nil
}
