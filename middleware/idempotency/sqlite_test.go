package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	_ "modernc.org/sqlite"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// database is a SQLite file with the receipts and an application's table in it.
type database struct {
	*testing.T
	path  string
	db    *sql.DB
	store *receipts.SQLite
}

func openDatabase(t *testing.T, path string) *database {
	t.Helper()
	dsn := "file:" + path + "?_txlock=immediate&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=busy_timeout(5000)"
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`CREATE TABLE IF NOT EXISTS effects (name TEXT PRIMARY KEY, n INTEGER NOT NULL CHECK (n < 1000))`); err != nil {
		t.Fatal(err)
	}
	return &database{T: t, path: path, db: db, store: store}
}

func newDatabase(t *testing.T) *database {
	t.Helper()
	return openDatabase(t, filepath.Join(t.TempDir(), "app.db"))
}

func (d *database) middleware(cfg Config) *Middleware[*sql.Tx] {
	d.Helper()
	if cfg.Consumer == "" {
		cfg.Consumer = "billing"
	}
	m, err := New(d.store, cfg)
	if err != nil {
		d.Fatal(err)
	}
	return m
}

// apply is the effect of every handler here: one more for a name.
func apply(ctx context.Context, tx *sql.Tx, name string) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET n = n + 1`, name)
	return err
}

// applying is a handler that applies an effect named after itself and the message's payload.
func applying(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	return apply(ctx, tx, message.HandlerNameFromCtx(ctx)+" "+string(msg.Payload))
}

func (d *database) effects() map[string]int {
	d.Helper()
	rows, err := d.db.Query(`SELECT name, n FROM effects`)
	if err != nil {
		d.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	effects := map[string]int{}
	for rows.Next() {
		var name string
		var n int
		if err := rows.Scan(&name, &n); err != nil {
			d.Fatal(err)
		}
		effects[name] = n
	}
	if err := rows.Err(); err != nil {
		d.Fatal(err)
	}
	return effects
}

// wantRows is T25: effects, receipts and dead letters agree, and nothing is torn without a reason.
func (d *database) wantRows(done, diverted, torn, letters int) {
	d.Helper()
	stats, err := d.store.Stats(context.Background())
	if err != nil {
		d.Fatal(err)
	}
	n := 0
	for _, count := range stats.DeadLetters {
		n += count
	}
	if stats.Done != done || stats.Diverted != diverted || stats.Torn != torn || n != letters || stats.Unsent != 0 {
		d.Errorf("stats %+v, want done %d, diverted %d, torn %d, dead letters %d", stats, done, diverted, torn, letters)
	}
}

func TestSQLiteOneMessage(t *testing.T) {
	d := newDatabase(t)
	m := d.middleware(Config{})
	h := m.Handle(applying)
	for range 3 {
		if err := h(deliver("u-1", "p")); err != nil {
			t.Fatal(err)
		}
	}
	if err := h(deliver("u-1", "q")); err != nil {
		t.Fatal(err)
	}
	if got := d.effects(); got["charge p"] != 1 || len(got) != 1 {
		t.Errorf("effects %v", got)
	}
	d.wantRows(1, 0, 0, 1)
}

func TestSQLiteWithOneConnection(t *testing.T) {
	d := newDatabase(t)
	d.db.SetMaxOpenConns(1)
	pub := &recording{}
	m := d.middleware(Config{Outputs: pub})
	h := m.HandleOutputs("t", func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("", []byte("o"))}, applying(ctx, tx, msg)
	})
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			for range 2 {
				if err := h(deliver(fmt.Sprint(i), "p")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := d.effects(); got["charge p"] != 10 || len(pub.all()) != 10 {
		t.Errorf("effects %v, %d outputs", got, len(pub.all()))
	}
	d.wantRows(10, 0, 0, 0)
}

// T05: two processes, as far as the database can tell: two handles, two middlewares, the same file.
func TestSQLiteTwoConsumersOfOneScope(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.db")
	one, two := openDatabase(t, path), openDatabase(t, path)
	var wg sync.WaitGroup
	for _, d := range []*database{one, two} {
		h := d.middleware(Config{}).Handle(applying)
		for i := range 15 {
			wg.Go(func() {
				if err := h(deliver(fmt.Sprint(i), "p")); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if got := one.effects(); got["charge p"] != 15 {
		t.Errorf("effects %v", got)
	}
	one.wantRows(15, 0, 0, 0)
}

// T16, T30: what a handler may do to its transaction on SQLite, and that the next message is not harmed by it.
func TestSQLiteHandlersThatBreakTheirTransaction(t *testing.T) {
	exec := func(ctx context.Context, tx *sql.Tx, query string) { _, _ = tx.ExecContext(ctx, query) } // the error is swallowed
	tests := []struct {
		name   string
		act    func(ctx context.Context, tx *sql.Tx) error
		err    error // nil: it commits
		effect int   // of the first delivery, where nothing prevents that it stays
		torn   int   // receipts left torn by it, in the same case
	}{
		{"swallows a constraint", func(ctx context.Context, tx *sql.Tx) error {
			exec(ctx, tx, `INSERT INTO effects VALUES ('big', 5000)`)
			return nil
		}, nil, 1, 0},
		{"swallows an error that ends the transaction", func(ctx context.Context, tx *sql.Tx) error {
			exec(ctx, tx, `INSERT OR ROLLBACK INTO effects VALUES ('big', 5000)`)
			return nil
		}, receipts.ErrTxEnded, 0, 0},
		{"rolls back", func(_ context.Context, tx *sql.Tx) error { return tx.Rollback() }, receipts.ErrTxEnded, 0, 0},
		{"executes ROLLBACK", func(ctx context.Context, tx *sql.Tx) error { exec(ctx, tx, `ROLLBACK`); return nil }, receipts.ErrTxEnded, 0, 0},
		{"commits", func(_ context.Context, tx *sql.Tx) error { return tx.Commit() }, receipts.ErrTxEnded, 1, 1},
		{"executes COMMIT", func(ctx context.Context, tx *sql.Tx) error { exec(ctx, tx, `COMMIT`); return nil }, receipts.ErrTxEnded, 1, 1},
		{"executes COMMIT and begins another", func(ctx context.Context, tx *sql.Tx) error {
			exec(ctx, tx, `COMMIT`)
			exec(ctx, tx, `BEGIN`)
			return nil
		}, receipts.ErrTxEnded, 1, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			effect := 0
			if tt.err == nil {
				effect = 1
			}
			breakTransaction(t, newDatabase(t), tt.act, tt.err, effect, 0)
		})
		t.Run(tt.name+", commit hook left alone", func(t *testing.T) {
			d := newDatabase(t)
			store, err := receipts.NewSQLite(d.db, receipts.SQLiteOptions{LeaveCommitHook: true})
			if err != nil {
				t.Fatal(err)
			}
			d.store = store
			breakTransaction(t, d, tt.act, tt.err, tt.effect, tt.torn)
		})
	}
}

// breakTransaction gives a message to a handler that applies its effect and then acts, and looks at what becomes of it and
// of its neighbour.
func breakTransaction(t *testing.T, d *database, act func(context.Context, *sql.Tx) error, wantErr error, effect, torn int) {
	t.Helper()
	m := d.middleware(Config{Outputs: &recording{}})
	msg, _ := withDelivery(deliver("u-1", "p"))
	err := m.HandleOutputs("t", func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
		if err := applying(ctx, tx, msg); err != nil {
			return nil, err
		}
		return []*message.Message{message.NewMessage("o-1", nil)}, act(ctx, tx)
	})(msg)
	if !errors.Is(err, wantErr) || (err == nil) != (wantErr == nil) || wantErr != nil && !IsFailure(err) {
		t.Errorf("got %v", err)
	}
	if got := d.effects()["charge p"]; got != effect {
		t.Errorf("effect %d, want %d", got, effect)
	}
	if wantErr != nil && len(m.cfg.Outputs.(*recording).all()) != 0 {
		t.Error("outputs were sent")
	}
	good := m.Handle(applying)
	for _, uuid := range []string{"u-1", "u-1", "neighbour"} {
		if err := good(deliver(uuid, "p")); err != nil {
			t.Errorf("%s: %v", uuid, err)
		}
	}
	whole := 2 - torn // u-1 unless it is torn, and its neighbour
	if got := d.effects()["charge p"]; got != torn+whole {
		t.Errorf("effect %d in the end, want %d", got, torn+whole)
	}
	d.wantRows(whole, 0, torn, torn)
}

// T15: a handler that reads before it writes is fine, since the transaction began as a writer.
func TestSQLiteReadThenWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.db")
	one, two := openDatabase(t, path), openDatabase(t, path)
	var wg sync.WaitGroup
	for c, d := range []*database{one, two} {
		h := d.middleware(Config{}).Handle(func(ctx context.Context, tx *sql.Tx, _ *message.Message) error {
			var n int
			if err := tx.QueryRowContext(ctx, `SELECT coalesce(max(n), 0) FROM effects WHERE name = 'sum'`).Scan(&n); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES ('sum', ?) ON CONFLICT (name) DO UPDATE SET n = excluded.n`, n+1)
			return err
		})
		wg.Go(func() {
			for i := range 10 {
				if err := h(deliver(fmt.Sprint(c, i), "p")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := one.effects()["sum"]; got != 20 {
		t.Errorf("sum %d", got)
	}
}

// T21: nothing is locked while a failed message waits.
func TestSQLiteIsFreeWhileAMessageWaits(t *testing.T) {
	d := newDatabase(t)
	m := d.middleware(Config{})
	failed := make(chan struct{})
	msg, cancel := withCancel(deliver("bad", "p"))
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			defer close(failed)
			return errors.Join(applying(ctx, tx, msg), RetryAfter(errHandler, time.Hour))
		})(msg)
	})
	<-failed
	ctx, stop := context.WithTimeout(t.Context(), 4*time.Second)
	defer stop()
	if _, err := d.db.ExecContext(ctx, `INSERT INTO effects VALUES ('other', 1)`); err != nil {
		t.Errorf("another writer: %v", err)
	}
	cancel()
	wg.Wait()
	if got := d.effects(); got["charge p"] != 0 {
		t.Errorf("effects %v", got)
	}
}

func TestSQLiteBudgetEnds(t *testing.T) {
	d := newDatabase(t)
	m := d.middleware(Config{TxBudget: 100 * time.Millisecond})
	msg, _ := withDelivery(deliver("u-1", "p"))
	err := m.Handle(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
		if err := applying(ctx, tx, msg); err != nil {
			return err
		}
		<-ctx.Done()
		return nil
	})(msg)
	if !errors.Is(err, context.DeadlineExceeded) || !IsFailure(err) {
		t.Errorf("got %v", err)
	}
	if err := m.Handle(applying)(deliver("u-1", "p")); err != nil {
		t.Error(err)
	}
	if got := d.effects(); got["charge p"] != 1 {
		t.Errorf("effects %v", got)
	}
}

func TestSQLiteGuarantees(t *testing.T) {
	for mode, want := range map[Guarantee]int{EffectivelyOnce: 1, AtMostOnce: 1, AtLeastOnce: 2} {
		d := newDatabase(t)
		pub := &recording{}
		m := d.middleware(Config{Guarantee: mode, Outputs: pub})
		h := m.HandleOutputs("t", func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
			return []*message.Message{message.NewMessage("", nil)}, applying(ctx, tx, msg)
		})
		for range 2 {
			if err := h(deliver("u-1", "p")); err != nil {
				t.Errorf("mode %d: %v", mode, err)
			}
		}
		if got := d.effects()["charge p"]; got != want || len(pub.all()) != want {
			t.Errorf("mode %d: effect %d, %d outputs, want %d", mode, got, len(pub.all()), want)
		}
		unsent, err := d.store.Unsent(t.Context(), receipts.UnsentQuery{Limit: 10})
		if err != nil || len(unsent) != 0 {
			t.Errorf("mode %d: unsent %v, %v", mode, unsent, err)
		}
	}
}
