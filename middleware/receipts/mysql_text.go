package receipts

import (
	"encoding/hex"
	"strconv"
	"strings"
)

// mysqlText is the text of a statement with its values in it, bytes in hexadecimal: one round trip for any number of rows,
// where values apart cost a second one to prepare. Bytes in hexadecimal mean the same whatever the session's character set and
// sql_mode are. It was as fast as a prepared statement for 256 receipts.
type mysqlText struct{ b []byte }

func (t *mysqlText) raw(s string) *mysqlText {
	t.b = append(t.b, s...)
	return t
}

func (t *mysqlText) bytes(v []byte) *mysqlText {
	t.b = append(t.b, 'x', '\'')
	t.b = hex.AppendEncode(t.b, v)
	t.b = append(t.b, '\'')
	return t
}

// text is bytes for valid UTF-8 that goes into a column with a character set.
func (t *mysqlText) text(v string) *mysqlText {
	return t.raw("_utf8mb4 ").bytes([]byte(v))
}

func (t *mysqlText) number(n int64) *mysqlText {
	t.b = strconv.AppendInt(t.b, n, 10)
	return t
}

// value writes what the values of rows are made of: bytes, texts and numbers.
func (t *mysqlText) value(v any) {
	switch v := v.(type) {
	case []byte:
		t.bytes(v)
	case string:
		t.text(v)
	case int:
		t.number(int64(v))
	case int64:
		t.number(v)
	}
}

// list writes n things with commas between them.
func (t *mysqlText) list(n int, write func(i int)) *mysqlText {
	for i := range n {
		if i > 0 {
			t.b = append(t.b, ',')
		}
		write(i)
	}
	return t
}

func (t *mysqlText) String() string { return string(t.b) }

// row writes a row's values in parentheses.
func (t *mysqlText) row(values []any) {
	t.b = append(t.b, '(')
	t.list(len(values), func(i int) { t.value(values[i]) })
	t.b = append(t.b, ')')
}

// The most rows and bytes of one statement, far below the smallest max_allowed_packet that a server comes with.
const (
	mysqlRows  = 500
	mysqlBytes = 256 << 10
)

// mysqlInserts makes the statements that insert rows: many small ones in one text, a large one by itself with its values
// apart, which the client can send in pieces.
func mysqlInserts(into, end string, rows [][]any, do func(query string, args ...any) error) error {
	for len(rows) > 0 {
		n, size := 0, 0
		for n < len(rows) && n < mysqlRows && (n == 0 || size+rowSize(rows[n]) <= mysqlBytes) {
			size += rowSize(rows[n])
			n++
		}
		var err error
		if n == 1 && size > mysqlBytes {
			err = do(into+" VALUES ("+tuples(len(rows[0]), "?")+")"+end, rows[0]...)
		} else {
			t := &mysqlText{b: make([]byte, 0, len(into)+len(end)+2*size+64*n)}
			t.raw(into).raw(" VALUES ").list(n, func(i int) { t.row(rows[i]) }).raw(end)
			err = do(t.String())
		}
		if err != nil {
			return err
		}
		rows = rows[n:]
	}
	return nil
}

func rowSize(values []any) (size int) {
	for _, v := range values {
		switch v := v.(type) {
		case []byte:
			size += len(v)
		case string:
			size += len(v)
		}
	}
	return size
}

// mysqlStatements takes a file of SQL apart: a client sends one statement at a time. No statement of ours has a semicolon
// at the end of a line in its middle.
func mysqlStatements(text string) []string {
	var statements []string
	for part := range strings.SplitSeq(text, ";\n") {
		if part = strings.TrimSpace(part); part != "" {
			statements = append(statements, part)
		}
	}
	return statements
}
