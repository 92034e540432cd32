package receipts_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/penstock-mq/penstock/contracttest/lossydb"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestMySQLStatements(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]string{
		"":                                  nil,
		"\n;\n":                             nil,
		"A;\n":                              {"A"},
		"A;\nB;\n\n-- comment; and more\nC": {"A", "B", "-- comment; and more\nC"},
		"A (\n  ';' \n);\nB;":               {"A (\n  ';' \n)", "B;"},
	} {
		if got := receipts.MySQLStatements(text); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	migrations, err := receipts.MySQLMigrations("")
	must(t, err)
	for _, m := range migrations {
		for _, statement := range receipts.MySQLStatements(m.SQL) {
			words := statement
			for strings.HasPrefix(words, "--") {
				_, words, _ = strings.Cut(words, "\n")
				words = strings.TrimSpace(words)
			}
			if !strings.HasPrefix(words, "CREATE TABLE IF NOT EXISTS") && !strings.Contains(words, "ON DUPLICATE KEY UPDATE") {
				t.Errorf("%s: a statement that cannot be repeated: %s", m.Name, statement)
			}
		}
	}
}

// TestMySQLInserts wants few statements, none too long, with the rows in their order.
func TestMySQLInserts(t *testing.T) {
	t.Parallel()
	row := func(size int) []any { return []any{make([]byte, size), 7, "é"} }
	var many [][]any
	for range 1200 {
		many = append(many, row(10))
	}
	tests := map[string]struct {
		rows [][]any
		want []int // rows of each statement, negative: one with its values apart
	}{
		"none":         {nil, nil},
		"one":          {[][]any{row(0)}, []int{1}},
		"several":      {[][]any{row(1), row(2), row(3)}, []int{3}},
		"many":         {many, []int{500, 500, 200}},
		"a large one":  {[][]any{row(1), row(400_000), row(2)}, []int{1, -1, 1}},
		"rather large": {[][]any{row(100_000), row(100_000), row(100_000)}, []int{2, 1}},
	}
	for name, test := range tests {
		var got []int
		err := receipts.MySQLInserts("INSERT INTO t", " END", test.rows, func(query string, args ...any) error {
			n := strings.Count(query, "(")
			if len(args) > 0 {
				n = -1
			} else if len(query) > 600_000 {
				t.Errorf("%s: a statement of %d bytes", name, len(query))
			}
			if !strings.HasPrefix(query, "INSERT INTO t VALUES (") || !strings.HasSuffix(query, ") END") {
				t.Errorf("%s: %.60s", name, query)
			}
			got = append(got, n)
			return nil
		})
		must(t, err)
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
	var query string
	must(t, receipts.MySQLInserts("I", "", [][]any{{[]byte("a'\x00"), int64(-3), "é"}}, func(q string, _ ...any) error {
		query = q
		return nil
	}))
	if want := "I VALUES (x'612700',-3,_utf8mb4 x'c3a9')"; query != want {
		t.Errorf("%s, want %s", query, want)
	}
	failed := errors.New("it fails")
	calls := 0
	err := receipts.MySQLInserts("I", "", many, func(string, ...any) error { calls++; return failed })
	if !errors.Is(err, failed) || calls != 1 {
		t.Errorf("%d calls, error %v", calls, err)
	}
}

// TestMySQLRemembersSessions opens more connections, one after the other, than are remembered.
func TestMySQLRemembersSessions(t *testing.T) {
	t.Parallel()
	db := newMyDB(t)
	for i := range 40 {
		tx := db.begin(t)
		claimed(t, tx, claim(itoa(i)))
		must(t, tx.Commit(t.Context()))
		db.SetMaxIdleConns(0) // closes them
		db.SetMaxIdleConns(12)
	}
	if n := db.store.RememberedSessions(); n < 1 || n > 20 {
		t.Errorf("%d sessions are remembered", n)
	}
}

// TestMySQLBehindWrapper has the store work, kill and tell a dead connection through a wrapper around the client's connections.
func TestMySQLBehindWrapper(t *testing.T) {
	t.Parallel()
	plain := newMyDB(t)
	connector, err := mysql.NewConnector(plain.config)
	must(t, err)
	c := lossydb.New(connector)
	db := c.DB()
	defer func() { _ = db.Close() }()
	s, err := receipts.NewMySQL(db, receipts.MySQLOptions{})
	must(t, err)
	_, err = s.Check(t.Context())
	must(t, err)
	wantClass(t, s, mysql.ErrInvalidConn, receipts.ClassOutage)
	wrapped := &myDB{DB: db, at: plain.at, store: s}
	everything(t, wrapped)
	tx := wrapped.begin(t)
	claimed(t, tx, claim("k"))
	session := sessionOf(t, tx.Raw())
	lost := c.LoseCommitAnswer(1, nil)
	wantErr(t, tx.Commit(t.Context()), receipts.ErrCommitUnknown)
	if lost.Fired() != 1 {
		t.Fatal("the fault did not fire")
	}
	if committed, err := s.Resolve(t.Context(), tx.Nonce()); err != nil || !committed {
		t.Errorf("Resolve: %t, %v", committed, err)
	}
	plain.wantGone(t, session)
	plain.both(t, receipts.ClaimHeld, "k")
}
