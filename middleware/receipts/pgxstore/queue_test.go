package pgxstore_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

func member(tx receipts.Tx[*pgxstore.Tx], n int) *pgxstore.Tx {
	tx.(receipts.Attributing).Member(n)
	return tx.Raw()
}

func wantMember(t *testing.T, err error, n int) {
	t.Helper()
	var m *receipts.MemberError
	if !errors.As(err, &m) || m.Member != n {
		t.Fatalf("error %v: want one of member %d", err, n)
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	info, err := db.store.Check(t.Context())
	must(t, err)
	if info.Dialect != "postgres" || info.Lanes != 11 || info.Parts || info.Pool != 12 || info.Schema != 2 || len(info.Warnings) != 0 {
		t.Errorf("info: %+v", info)
	}
}

func TestQueuedEffectsCommitWithTheirReceipts(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	tx := db.claimed(t, "a", "b")
	member(tx, 0).Queue(add, "a")
	member(tx, 1).Queue(add, "b")
	db.wantEffect(t, "a", 0)
	must(t, tx.Commit(t.Context()))
	db.wantEffect(t, "a", 1)
	db.wantEffect(t, "b", 1)
	db.wantStats(t, 2, 0, 0)
	db.wantClean(t)

	again := db.begin(t)
	results, err := again.Claim(t.Context(), []receipts.Claim{claim("c"), claim("a")})
	must(t, err)
	if results[0].Status != receipts.ClaimFresh || results[1].Status != receipts.ClaimHeld {
		t.Errorf("claims: %+v", results)
	}
	must(t, again.Rollback(t.Context()))
	db.wantClean(t)
}

func TestQueuedStatementsKeepTheirOrderWithOthers(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	tx := db.claimed(t, "a")
	raw := member(tx, 0)
	raw.Queue(`INSERT INTO counters VALUES ('x', 1)`)
	var n int
	must(t, raw.QueryRow(t.Context(), `SELECT value FROM counters WHERE name = 'x'`).Scan(&n))
	if n != 1 {
		t.Errorf("the query saw %d", n)
	}
	raw.Queue(`UPDATE counters SET value = value * 10`)
	_, err := raw.Exec(t.Context(), `UPDATE counters SET value = value + 1`)
	must(t, err)
	inner, err := raw.Begin(t.Context())
	must(t, err)
	raw.Queue(`UPDATE counters SET value = value * 10`)
	must(t, inner.Commit(t.Context()))
	must(t, pgx.BeginFunc(t.Context(), raw, func(pgx.Tx) error {
		raw.Queue(`UPDATE counters SET value = 0`)
		return nil
	}))
	_, err = raw.Exec(t.Context(), `UPDATE counters SET value = value + 7`)
	must(t, err)
	must(t, tx.Commit(t.Context()))
	db.wantEffect(t, "x", 7)
}

func TestAFailingQueuedStatementIsItsMembers(t *testing.T) {
	t.Parallel()
	bad := map[string]func(raw *pgxstore.Tx){
		"constraint":     func(raw *pgxstore.Tx) { raw.Queue(`INSERT INTO counters VALUES ($1, 5000)`, "bad") },
		"no such table":  func(raw *pgxstore.Tx) { raw.Queue(`INSERT INTO nowhere VALUES ($1)`, "bad") },
		"value":          func(raw *pgxstore.Tx) { raw.Queue(add, struct{ A int }{1}) },
		"number of args": func(raw *pgxstore.Tx) { raw.Queue(add) },
		"swallowed": func(raw *pgxstore.Tx) {
			_, _ = raw.Exec(t.Context(), `SELECT 1/0`)
			raw.Queue(add, "after")
		},
		"commit as text": func(raw *pgxstore.Tx) { _, _ = raw.Exec(t.Context(), `COMMIT`) },
	}
	for name, f := range bad {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			tx := db.claimed(t, "a", "b", "c")
			member(tx, 0).Queue(add, "a")
			f(member(tx, 1))
			member(tx, 2).Queue(add, "c")
			wantMember(t, tx.Commit(t.Context()), 1)
			db.wantStats(t, 0, 0, map[bool]int{name == "commit as text": 3}[true])
			db.wantClean(t)
		})
	}
}
