package backends

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"syscall"
)

// pgbouncerProgram is a private PgBouncer in transaction mode. It takes the sessions of the server in turns, so that a
// client that counts on session state is found out.
func pgbouncerProgram(pgbouncer string, upstream Database) program {
	return program{
		as: upstream, stop: syscall.SIGINT, quit: syscall.SIGKILL,
		make: func(_ context.Context, c *child, at Database) error {
			host, port, err := net.SplitHostPort(upstream.Address)
			if err != nil {
				return fmt.Errorf("reading the address of PostgreSQL: %w", err)
			}
			users, err := c.write("users", quotedPair(at.User, at.Password))
			if err != nil {
				return err
			}
			_, own, _ := strings.Cut(at.Address, ":")
			_, err = c.write("ini", fmt.Sprintf(`[databases]
* = host=%s port=%s user=%s password=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = scram-sha-256
auth_file = %s
pool_mode = transaction
server_round_robin = 1
max_client_conn = 500
default_pool_size = 16
server_tls_sslmode = prefer
ignore_startup_parameters = extra_float_digits
`, host, port, quotedWord(upstream.User), quotedWord(upstream.Password), own, users))
			return err
		},
		command: func(c *child, _ Database) []string { return []string{pgbouncer, filepath.Join(c.dir, "ini")} },
	}
}

func quotedPair(a, b string) string {
	quote := func(s string) string { return `"` + strings.ReplaceAll(s, `"`, `""`) + `"` }
	return quote(a) + " " + quote(b) + "\n"
}

func quotedWord(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
