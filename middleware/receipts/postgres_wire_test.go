package receipts_test

import (
	"context"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest/wire"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// TestPostgresCommitLostOnTheWire: COMMIT does not arrive, or its answer does not, with the connection reset or in silence. Each
// time the outcome is unknown, and asking the database gives the true one, at once: the old session does not outlive that.
func TestPostgresCommitLostOnTheWire(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, direct *pgDB) {
		proxy := wire.Test(t, wire.Options{Upstream: direct.at.Address, Protocol: wire.Postgres})
		far := openPg(t, direct.at.At(proxy.Address()), direct.client, pgOptions{})
		done := 0
		for name, c := range map[string]struct {
			match     func(wire.Message) bool
			do        wire.Action
			committed bool
		}{
			"COMMIT reset":     {wire.Commit, wire.Reset, false},
			"COMMIT swallowed": {wire.Commit, wire.Swallow, false},
			"answer reset":     {wire.Committed, wire.Reset, true},
			"answer swallowed": {wire.Committed, wire.Swallow, true},
		} {
			tx := far.claimed(t, name)
			add(t, tx, name)
			fault := proxy.On(wire.Rule{Match: c.match, When: wire.Before, Do: c.do})
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			err := tx.Commit(ctx)
			cancel()
			<-fault.Fired()
			wantIs(t, err, receipts.ErrCommitUnknown)
			ctx, cancel = context.WithTimeout(t.Context(), 20*time.Second)
			committed, err := far.store.Resolve(ctx, tx.Nonce())
			cancel()
			must(t, err)
			if committed != c.committed {
				t.Errorf("%s: resolved as committed: %v", name, committed)
			}
			if c.committed {
				done++
			}
			direct.wantStats(t, done, 0, 0)
			direct.wantEffect(t, name, map[bool]int{true: 1}[c.committed])
			direct.wantIdle(t)
		}
		direct.wantUsable(t, "after")
	})
}

// TestPostgresOldSessionIsEndedOnlyInItsTransaction: what resolves a lost COMMIT must not hit whoever has the session now.
func TestPostgresOldSessionIsEndedOnlyInItsTransaction(t *testing.T) {
	t.Parallel()
	at := servers.PgBouncer(t)
	for _, client := range pgClients() {
		h := openPg(t, at, client, pgOptions{url: bouncerMode(client)})
		must(t, h.store.Migrate(t.Context()))
		proxy := wire.Test(t, wire.Options{Upstream: at.Address, Protocol: wire.Postgres})
		far := openPg(t, at.At(proxy.Address()), client, pgOptions{url: bouncerMode(client)})
		tx := far.claimed(t, client)
		fault := proxy.On(wire.Rule{Match: wire.Committed, When: wire.Before, Do: wire.Reset})
		wantIs(t, tx.Commit(t.Context()), receipts.ErrCommitUnknown)
		<-fault.Fired()
		// The server's session is back with the pooler, and in another transaction soon.
		other := h.claimed(t, client+" other")
		committed, err := far.store.Resolve(t.Context(), tx.Nonce())
		must(t, err)
		if !committed {
			t.Errorf("%s: resolved as not committed", client)
		}
		must(t, other.Commit(t.Context()))
	}
}

// bouncerMode is how a client has to be set up for a pooler in transaction mode.
func bouncerMode(client string) func(string) string {
	if client == "lib/pq" {
		return nil
	}
	return parameter("default_query_exec_mode", "exec")
}
