package wire_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/wire"
)

// heard collects what passes.
type heard struct {
	mu  sync.Mutex
	all []wire.Message
}

func listen(p *wire.Proxy) *heard {
	h := &heard{}
	p.On(wire.Rule{Match: func(wire.Message) bool { return true }, When: wire.Before, Times: -1, Call: func(m wire.Message) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.all = append(h.all, m)
	}})
	return h
}

// forget drops what passed until now.
func (h *heard) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = nil
}

// statements lists "Kind Text" of the client's messages with these kinds, and "Kind Text < Answers" of the server's.
func (h *heard) statements(kinds ...string) (found []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range h.all {
		for _, kind := range kinds {
			switch {
			case m.Kind != kind:
			case m.From == wire.Server:
				found = append(found, strings.TrimSpace(kind+" "+m.Text)+" < "+m.Answers)
			default:
				found = append(found, kind+" "+m.Text)
			}
		}
	}
	return found
}

// The proxy says what executes, by whatever name it was prepared, and what answers what.
func TestStatementsHaveTheirText(t *testing.T) {
	forEachClient(t, wire.Options{}, func(t *testing.T, c clientCase, all *client) {
		h := listen(all.Proxy)
		query := map[wire.Protocol]string{
			wire.Postgres: "INSERT INTO a VALUES ($1)", wire.MySQL: "INSERT INTO a VALUES (?)",
		}[c.protocol]
		first, err := all.through.PrepareContext(t.Context(), query)
		require.NoError(t, err)
		defer closed(t, first)
		second, err := all.through.PrepareContext(t.Context(), "DELETE FROM a WHERE n = 5")
		require.NoError(t, err)
		defer closed(t, second)
		h.forget()
		for _, n := range []int{1, 2} {
			_, err = first.ExecContext(t.Context(), n)
			require.NoError(t, err)
			_, err = second.ExecContext(t.Context())
			require.NoError(t, err)
		}
		_, err = all.through.ExecContext(t.Context(), "INSERT INTO nowhere VALUES (1)")
		require.Error(t, err)
		if c.protocol == wire.MySQL {
			assert.Equal(t, []string{
				"STMT_EXECUTE " + query, "STMT_EXECUTE DELETE FROM a WHERE n = 5",
				"STMT_EXECUTE " + query, "STMT_EXECUTE DELETE FROM a WHERE n = 5", "QUERY INSERT INTO nowhere VALUES (1)",
			}, h.statements("STMT_EXECUTE", "QUERY"))
			assert.Equal(t, []string{
				"OK < " + query, "OK < DELETE FROM a WHERE n = 5",
				"OK < " + query, "OK < DELETE FROM a WHERE n = 5", "ERR 1146 < INSERT INTO nowhere VALUES (1)",
			}, h.statements("OK", "ERR"))
			return
		}
		assert.Equal(t, []string{
			"Execute " + query, "Execute DELETE FROM a WHERE n = 5",
			"Execute " + query, "Execute DELETE FROM a WHERE n = 5",
		}, h.statements("Execute"))
		answers := h.statements("CommandComplete", "ErrorResponse")
		require.Len(t, answers, 5)
		assert.Equal(t, []string{
			"CommandComplete INSERT 0 1 < " + query, "CommandComplete DELETE 0 < DELETE FROM a WHERE n = 5",
			"CommandComplete INSERT 0 1 < " + query, "CommandComplete DELETE 0 < DELETE FROM a WHERE n = 5",
		}, answers[:4])
		assert.Contains(t, answers[4], "ErrorResponse 42P01 < ")
	})
}

// A pipelined batch: effects and COMMIT leave in one packet, and the answer of the COMMIT alone is lost.
func TestCommitInAPipelinedBatch(t *testing.T) {
	all := connect(t, clientCases()["pgx"], wire.Options{})
	for name, c := range map[string]struct {
		match func(wire.Message) bool
		rows  int
	}{"before it arrives": {wire.Commit, 0}, "before its answer": {wire.Committed, 3}} {
		for mode, statements := range map[string]pgx.QueryExecMode{
			"prepared": pgx.QueryExecModeCacheStatement, "described": pgx.QueryExecModeDescribeExec, "exec": pgx.QueryExecModeExec,
			"simple": pgx.QueryExecModeSimpleProtocol,
		} {
			if mode == "simple" && name == "before its answer" {
				continue // the whole batch is one message, and its answers are not told apart from those of its neighbours
			}
			t.Run(name+"/"+mode, func(t *testing.T) {
				all.empty(t)
				config, err := pgx.ParseConfig(all.d.At(all.Address()).URL())
				require.NoError(t, err)
				config.DefaultQueryExecMode = statements
				conn, err := pgx.ConnectConfig(t.Context(), config)
				require.NoError(t, err)
				defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }() // it was reset
				send := func() error {
					batch := &pgx.Batch{}
					batch.Queue("BEGIN")
					for n := range 3 {
						batch.Queue("INSERT INTO a VALUES ($1)", n)
					}
					batch.Queue("commit")
					return conn.SendBatch(t.Context(), batch).Close()
				}
				require.NoError(t, send())
				require.Equal(t, 3, all.rows(t))

				h := listen(all.Proxy) // now its statements are prepared
				rule := all.On(wire.Rule{Match: c.match, When: wire.Before, Do: wire.Reset})
				require.Error(t, send())
				fired(t, rule)
				require.Equal(t, 3+c.rows, all.rows(t))
				if c.rows > 0 {
					require.Len(t, h.statements("CommandComplete"), 5, "those before the COMMIT's were forwarded")
				}
			})
		}
	}
}

func TestCommitIsRecognised(t *testing.T) {
	for text, want := range map[string]bool{
		"COMMIT": true, "commit": true, " Commit ;\n": true, "COMMIT AND CHAIN": true, "END": true, "end transaction": true,
		"UPDATE a SET n = 1; COMMIT": true, "COMMIT PREPARED 'x'": false, "SELECT 'COMMIT'": false, "": false, ";": false,
		"ROLLBACK": false, "COMMITTED": false, "COMMIT; SELECT 1": false,
	} {
		for _, kind := range []string{"Query", "Execute", "QUERY", "STMT_EXECUTE"} {
			assert.Equal(t, want, wire.Commit(wire.Message{From: wire.Client, Kind: kind, Text: text}), "%s %q", kind, text)
		}
		for _, kind := range []string{"Parse", "Bind", "STMT_PREPARE", "DATA"} {
			assert.False(t, wire.Commit(wire.Message{From: wire.Client, Kind: kind, Text: text}), "%s %q", kind, text)
		}
		assert.Equal(t, want, wire.Committed(wire.Message{From: wire.Server, Kind: "OK", Answers: text}), "OK to %q", text)
	}
	assert.False(t, wire.Commit(wire.Message{From: wire.Server, Kind: "Query", Text: "COMMIT"}))
	assert.True(t, wire.Committed(wire.Message{From: wire.Server, Kind: "CommandComplete", Text: "COMMIT"}))
	assert.False(t, wire.Committed(wire.Message{From: wire.Server, Kind: "CommandComplete", Text: "ROLLBACK", Answers: "COMMIT"}),
		"a failed transaction is rolled back")
}
