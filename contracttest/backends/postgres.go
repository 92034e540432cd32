package backends

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// postgresProgram is a private PostgreSQL.
func postgresProgram(initdb, postgres string) program {
	return program{
		stop: syscall.SIGINT, quit: syscall.SIGQUIT, // "fast" and "immediate" shutdown
		make: func(ctx context.Context, c *child, at Database) error {
			password, err := c.write("password", at.Password+"\n")
			if err != nil {
				return err
			}
			return errors.Join(runTool(ctx, c.dir, []string{
				initdb, "-D", filepath.Join(c.dir, "data"), "-U", at.User, "--pwfile", password, "-A", "scram-sha-256",
				"-E", "UTF8", "--locale", "C", "--no-sync", "--no-instructions",
				"--wal-segsize", "4", // MiB; small, for servers with a small disk
			}), os.Remove(password))
		},
		command: func(c *child, at Database) []string {
			_, port, _ := strings.Cut(at.Address, ":")
			argv := []string{postgres, "-D", filepath.Join(c.dir, "data")}
			for _, setting := range []string{
				"listen_addresses=127.0.0.1", "port=" + port, "unix_socket_directories=",
				"fsync=on", "synchronous_commit=on", "full_page_writes=on",
				"max_connections=300", "shared_buffers=64MB", "logging_collector=off", "max_wal_size=" + walSize(c),
				"log_line_prefix=%m [%p] ", "lc_messages=C",
			} {
				argv = append(argv, "-c", setting)
			}
			return argv
		},
	}
}

// walSize bounds the log that PostgreSQL keeps: a small disk has room for little.
func walSize(c *child) string {
	if !c.mounted {
		return "1GB"
	}
	return "32MB"
}
