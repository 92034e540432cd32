package receipts_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// TestPostgresBackendKilledAtEachStep ends the server's process of a transaction between any two calls.
func TestPostgresBackendKilledAtEachStep(t *testing.T) {
	t.Parallel()
	steps := []string{"begin", "claim", "effect", "outputs"}
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		for at, step := range steps {
			tx := db.tx(t)
			pid := 0
			var err error
			for i, f := range []func() error{
				func() error { pid = backend(t, tx); return nil },
				func() error { _, err := tx.Claim(t.Context(), claimList(step)); return err },
				func() error { return tx.exec(t.Context(), pgAdd, step) },
				func() error {
					_, err := tx.AddOutputs(t.Context(), []receipts.Output{{Topic: "out", UUID: step, At: noon}})
					return err
				},
			} {
				if err = f(); err != nil {
					break
				}
				if i == at {
					db.terminate(t, pid)
				}
			}
			if err != nil {
				db.wantClass(t, err, receipts.ClassOutage)
				_ = tx.Rollback(t.Context())
			} else {
				err = tx.Commit(t.Context())
				if err == nil {
					t.Fatalf("killed after %s: committed", step)
				}
				if !errors.Is(err, receipts.ErrCommitUnknown) {
					db.wantClass(t, err, receipts.ClassOutage)
				}
			}
			committed, err := db.store.Resolve(t.Context(), tx.Nonce())
			must(t, err)
			if committed {
				t.Errorf("killed after %s: resolved as committed", step)
			}
			db.wantEffect(t, step, 0)
		}
		db.wantStats(t, 0, 0, 0)
		db.wantUsable(t, "after")
	})
}

// slowCommit makes COMMIT of a transaction that writes a counter of this name take a while, before it commits.
const slowCommit = `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON counters DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
	WHEN (NEW.name = 'slow') EXECUTE FUNCTION slow()`

// inCommit waits until a session is in its COMMIT, and gives its process.
func (db *pgDB) inCommit(t testing.TB, state string) (pid int) {
	t.Helper()
	eventually(t, "a session is in its COMMIT", func() bool {
		pid = db.count(t, `SELECT coalesce(max(pid), 0) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = $1`, state)
		return pid != 0
	})
	return pid
}

// TestPostgresKilledInsideCommitBeforeIt ends the process while COMMIT is under way and has not happened yet.
func TestPostgresKilledInsideCommitBeforeIt(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		mustExec(t, db.look, slowCommit)
		tx := db.claimed(t, "a")
		add(t, tx, "slow")
		answer := make(chan error, 1)
		go func() { answer <- tx.Commit(context.Background()) }()
		db.terminate(t, db.inCommit(t, "PgSleep"))
		wantIs(t, <-answer, receipts.ErrCommitUnknown)
		committed, err := db.store.Resolve(t.Context(), tx.Nonce())
		must(t, err)
		if committed {
			t.Error("resolved as committed")
		}
		db.wantStats(t, 0, 0, 0)
		db.wantEffect(t, "slow", 0)
		db.wantUsable(t, "after")
	})
}

// TestPostgresKilledInsideCommitAfterIt ends the process after COMMIT has happened and before its answer: it waits for a
// standby that never comes.
func TestPostgresKilledInsideCommitAfterIt(t *testing.T) {
	t.Parallel()
	server := privatePg(t, map[string]string{"synchronous_standby_names": "nobody", "synchronous_commit": "local"})
	for _, client := range pgClients() {
		t.Run(client, func(t *testing.T) {
			db := newPgDB(t, server.TestDatabase(t), client, pgOptions{})
			tx := db.claimed(t, "a")
			add(t, tx, "effect")
			must(t, tx.exec(t.Context(), `SET LOCAL synchronous_commit = on`))
			answer := make(chan error, 1)
			go func() { answer <- tx.Commit(context.Background()) }()
			db.terminate(t, db.inCommit(t, "SyncRep"))
			wantIs(t, <-answer, receipts.ErrCommitUnknown)
			committed, err := db.store.Resolve(t.Context(), tx.Nonce())
			must(t, err)
			if !committed {
				t.Error("resolved as not committed")
			}
			db.wantStats(t, 1, 0, 0)
			db.wantEffect(t, "effect", 1)
		})
	}
}

// TestPostgresCommitAbandoned: the caller's context ends while COMMIT is under way. Resolve ends the old session.
func TestPostgresCommitAbandoned(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		mustExec(t, db.look, slowCommit)
		tx := db.claimed(t, "a")
		add(t, tx, "slow")
		ctx, cancel := context.WithCancel(t.Context())
		answer := make(chan error, 1)
		go func() { answer <- tx.Commit(ctx) }()
		db.inCommit(t, "PgSleep")
		cancel()
		wantIs(t, <-answer, receipts.ErrCommitUnknown)
		bounded, stop := context.WithTimeout(t.Context(), 20*time.Second)
		defer stop()
		committed, err := db.store.Resolve(bounded, tx.Nonce())
		must(t, err)
		if committed {
			t.Error("resolved as committed")
		}
		db.wantStats(t, 0, 0, 0)
		db.wantUsable(t, "after")
	})
}

// TestPostgresLateCommitMeetsTheFence: somebody was told that the transaction did not commit. Then it must not.
func TestPostgresLateCommitMeetsTheFence(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		tx := db.claimed(t, "a")
		add(t, tx, "effect")
		for range 2 {
			committed, err := db.store.Resolve(t.Context(), tx.Nonce())
			must(t, err)
			if committed {
				t.Fatal("an open transaction is resolved as committed")
			}
		}
		err := tx.Commit(t.Context())
		if err == nil {
			t.Fatal("committed after all")
		}
		db.wantEffect(t, "effect", 0)
		db.wantStats(t, 0, 0, 0)
		db.wantUsable(t, "after")
	})
}

// TestPostgresFenceIsNoMarker: a receipt whose only marker is a fence is torn.
func TestPostgresFenceIsNoMarker(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		tx := db.claimed(t, "a")
		_, err := tx.AddOutputs(t.Context(), []receipts.Output{{Scope: "billing", Key: []byte("a"), Topic: "out", UUID: "u", At: noon}})
		must(t, err)
		must(t, tx.exec(t.Context(), "COMMIT"))
		if committed, err := db.store.Resolve(t.Context(), tx.Nonce()); err != nil || committed {
			t.Fatal(committed, err)
		}
		db.wantStats(t, 0, 0, 1)
		if r := claimsOf(t, db.tx(t), "a")[0]; r.Status != receipts.ClaimTorn {
			t.Errorf("claim: %+v", r)
		}
		unsent, err := db.store.Unsent(t.Context(), receipts.UnsentQuery{Limit: 10})
		must(t, err)
		if len(unsent) != 0 {
			t.Errorf("unsent outputs of a torn receipt: %+v", unsent)
		}
	})
}

// TestPostgresResolveWithoutTheRightToKill waits for the old session's own end, and gives up with its context.
func TestPostgresResolveWithoutTheRightToKill(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		mustExec(t, db.look, slowCommit)
		tx := db.claimed(t, "a")
		add(t, tx, "slow")
		answer := make(chan error, 1)
		go func() { answer <- tx.Commit(context.Background()) }()
		pid := db.inCommit(t, "PgSleep")
		other := openPg(t, db.at, db.client, pgOptions{}) // another process knows nothing of the session
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err := other.store.Resolve(ctx, tx.Nonce())
		if err == nil {
			t.Fatal("decided while the old session is in its COMMIT")
		}
		db.wantClass(t, err, receipts.ClassContention)
		db.terminate(t, pid)
		if err := <-answer; err == nil {
			t.Error("COMMIT in a session that was ended gave no error")
		}
		committed, err := other.store.Resolve(t.Context(), tx.Nonce())
		must(t, err)
		if committed {
			t.Error("resolved as committed")
		}
	})
}

// pgMisuses are what handlers must not do, with the number of receipts of two that are left, torn.
func pgMisuses() map[string]pgMisuse {
	text := func(statement string) func(ctx context.Context, tx pgTx, key string) {
		return func(ctx context.Context, tx pgTx, _ string) { _ = tx.exec(ctx, statement) }
	}
	return map[string]pgMisuse{
		"COMMIT":              {text("COMMIT"), 2},
		"ROLLBACK":            {text("ROLLBACK"), 0},
		"COMMIT; BEGIN":       {text("COMMIT; BEGIN"), 2},
		"COMMIT AND CHAIN":    {text("COMMIT AND CHAIN"), 2},
		"ROLLBACK AND CHAIN":  {text("ROLLBACK AND CHAIN"), 0},
		"PREPARE TRANSACTION": {text("PREPARE TRANSACTION 'p'"), 0}, // refused: max_prepared_transactions is 0
		"a swallowed error":   {text("SELECT 1/0"), 0},
		"DELETE": {func(ctx context.Context, tx pgTx, key string) {
			_ = tx.exec(ctx, "DELETE FROM penstock_receipts WHERE identity_key = $1", []byte(key))
		}, 0},
		"UPDATE": {func(ctx context.Context, tx pgTx, key string) {
			_ = tx.exec(ctx, "UPDATE penstock_receipts SET state = 2 WHERE identity_key = $1", []byte(key))
		}, 0},
	}
}

type pgMisuse struct {
	do   func(ctx context.Context, tx pgTx, key string)
	torn int
}

// TestPostgresMisuse: each with a neighbour. No receipt may look whole without its effect, nor an effect be committed without a
// receipt.
func TestPostgresMisuse(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		torn := 0
		for name, misuse := range pgMisuses() {
			first, second := name+" 1", name+" 2"
			tx := db.claimed(t, first, second)
			add(t, tx, first)
			misuse.do(t.Context(), tx, first)
			_ = tx.exec(t.Context(), pgAdd, second)
			_, _ = tx.AddOutputs(t.Context(), []receipts.Output{{Topic: "out", UUID: "u", At: noon}})
			if err := tx.Commit(t.Context()); !errors.Is(err, receipts.ErrTxEnded) {
				t.Errorf("%s: %v", name, err)
			}
			torn += misuse.torn
			db.wantStats(t, 0, 0, torn)
			db.wantEffect(t, first, min(misuse.torn, 1))
		}
		db.wantUsable(t, "after")
	})
}

// TestPostgresClaimUndoneBySavepoint: a receipt that a handler's savepoint took back is missed.
func TestPostgresClaimUndoneBySavepoint(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		tx := db.claimed(t, "a")
		must(t, tx.exec(t.Context(), "SAVEPOINT mine"))
		claimsOf(t, tx, "b")
		must(t, tx.exec(t.Context(), "ROLLBACK TO mine"))
		wantIs(t, tx.Commit(t.Context()), receipts.ErrTxEnded)
		db.wantStats(t, 0, 0, 0)

		tx = db.claimed(t, "a")
		must(t, tx.exec(t.Context(), "SAVEPOINT mine"))
		claimsOf(t, tx, "b")
		must(t, tx.exec(t.Context(), "RELEASE mine"))
		must(t, tx.Unclaim(t.Context(), claimList("a")))
		must(t, tx.Commit(t.Context()))
		db.wantStats(t, 1, 0, 0)
	})
}

// TestPostgresErrorInsideAHandlersSavepoint is none of the store's business.
func TestPostgresErrorInsideAHandlersSavepoint(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		tx := db.claimed(t, "a", "b")
		must(t, tx.exec(t.Context(), "SAVEPOINT mine"))
		if err := tx.exec(t.Context(), "SELECT 1/0"); err == nil {
			t.Fatal("no error")
		}
		must(t, tx.exec(t.Context(), "ROLLBACK TO mine"))
		add(t, tx, "a")
		must(t, tx.Unclaim(t.Context(), claimList("b")))
		must(t, tx.Commit(t.Context()))
		db.wantStats(t, 1, 0, 0)
		db.wantEffect(t, "a", 1)
	})
}

// TestPostgresStatementsContextEnds: the connection is lost, the transaction with it, and nobody else's.
func TestPostgresStatementsContextEnds(t *testing.T) {
	t.Parallel()
	onEachPgClient(t, func(t *testing.T, db *pgDB) {
		tx := db.claimed(t, "a")
		add(t, tx, "a")
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		err := tx.exec(ctx, "SELECT pg_sleep(60)")
		db.wantClass(t, err, receipts.ClassOther)
		if err := tx.Commit(t.Context()); err == nil || errors.Is(err, receipts.ErrCommitUnknown) {
			t.Errorf("commit: %v", err)
		}
		db.wantStats(t, 0, 0, 0)
		db.wantEffect(t, "a", 0)
		db.wantUsable(t, "after")
	})
}
