package backends

import (
	"database/sql"
	"os"
	"path/filepath"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A server at the usual port counts only if it lets us in and lets us make databases.
func TestLocalServer(t *testing.T) {
	for name, c := range map[string]struct {
		kind         Kind
		client       string
		closed, open []string
	}{
		"postgres": {Postgres, "pgx", []string{"CREATE ROLE postgres LOGIN"}, []string{"ALTER ROLE postgres CREATEDB"}},
		"mysql": {
			MySQL, "mysql",
			[]string{"CREATE USER root@'127.0.0.1'"},
			[]string{"GRANT ALL ON *.* TO root@'127.0.0.1'"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			set, err := Open(Options{})
			require.NoError(t, err)
			defer func() { assert.NoError(t, set.Close()) }()
			server := set.TestServer(t, c.kind, ServerOptions{})
			if server.dir == "" {
				t.Skip("needs the installed programs, and has a container")
			}
			db, err := sql.Open(c.client, server.Admin().DSN())
			require.NoError(t, err)
			defer func() { assert.NoError(t, db.Close()) }()
			run := func(statements []string) {
				for _, statement := range statements {
					_, err := db.ExecContext(t.Context(), statement)
					require.NoError(t, err)
				}
			}
			_, ok := local(t.Context(), c.kind, server.Admin().Address)
			require.False(t, ok, "nobody gets in without a password")
			if c.kind == Postgres {
				hba := filepath.Join(server.dir, "data", "pg_hba.conf")
				old, err := os.ReadFile(hba)
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(hba, append([]byte("host all postgres 127.0.0.1/32 trust\n"), old...), 0o600))
				run([]string{"SELECT pg_reload_conf()"})
			}
			run(c.closed)
			_, ok = local(t.Context(), c.kind, server.Admin().Address)
			require.False(t, ok, "we get in, but may not make databases")
			run(c.open)
			at, ok := local(t.Context(), c.kind, server.Admin().Address)
			require.True(t, ok)
			require.NotEmpty(t, at.Version)
		})
	}
}
