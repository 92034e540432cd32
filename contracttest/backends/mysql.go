package backends

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
)

// mariadbProgram is a private MariaDB. root gets in by the socket alone, which is in a folder that only the server can
// enter; the user of the tests is made by a file that is read at every start.
func mariadbProgram(install, mariadbd string) program {
	return program{
		stop: syscall.SIGTERM, quit: syscall.SIGKILL,
		make: func(ctx context.Context, c *child, at Database) error {
			_, err := c.write("init.sql", fmt.Sprintf(
				"CREATE USER IF NOT EXISTS '%[1]s'@'127.0.0.1' IDENTIFIED BY '%[2]s';\n"+
					"GRANT ALL PRIVILEGES ON *.* TO '%[1]s'@'127.0.0.1' WITH GRANT OPTION;\n", at.User, at.Password))
			if err != nil {
				return err
			}
			return runTool(ctx, c.dir, []string{
				install, "--no-defaults", "--datadir=" + filepath.Join(c.dir, "data"), "--skip-test-db", "--skip-name-resolve",
				"--auth-root-authentication-method=socket",
			})
		},
		command: func(c *child, at Database) []string {
			_, port, _ := strings.Cut(at.Address, ":")
			return []string{
				mariadbd, "--no-defaults", "--datadir=" + filepath.Join(c.dir, "data"),
				"--bind-address=127.0.0.1", "--port=" + port, "--skip-name-resolve",
				"--socket=" + filepath.Join(c.dir, "s"), "--pid-file=" + filepath.Join(c.dir, "pid"),
				"--init-file=" + filepath.Join(c.dir, "init.sql"), "--tmpdir=" + c.dir,
				"--innodb-flush-log-at-trx-commit=1", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=32M",
				"--max-connections=300", "--character-set-server=utf8mb4",
			}
		},
	}
}
