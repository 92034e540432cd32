package wire

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pass reads a stream to its end, or to what cannot be read, and gives what would be forwarded and what was understood.
func pass(next func(*bufio.Reader) (frame, error), stream []byte) (forwarded []byte, messages []Message, err error) {
	source := bytes.NewReader(stream)
	r := bufio.NewReaderSize(source, 4*most)
	for {
		f, err := next(r)
		if err != nil {
			return forwarded, messages, err
		}
		forwarded = append(forwarded, f.head...)
		messages = append(messages, f.msg)
		rest, err := io.ReadAll(io.LimitReader(r, f.rest))
		forwarded = append(forwarded, rest...)
		if err != nil || int64(len(rest)) < f.rest {
			return forwarded, messages, io.ErrUnexpectedEOF
		}
	}
}

func encode(t testing.TB, messages ...pgproto3.FrontendMessage) (stream []byte) {
	t.Helper()
	for _, m := range messages {
		var err error
		stream, err = m.Encode(stream)
		require.NoError(t, err)
	}
	return stream
}

func encodeBack(t testing.TB, messages ...pgproto3.BackendMessage) (stream []byte) {
	t.Helper()
	for _, m := range messages {
		var err error
		stream, err = m.Encode(stream)
		require.NoError(t, err)
	}
	return stream
}

func startup(t testing.TB) []byte {
	return encode(t, &pgproto3.StartupMessage{ProtocolVersion: 196608, Parameters: map[string]string{"user": "a"}})
}

func packet(sequence byte, body ...byte) []byte {
	return append([]byte{byte(len(body)), byte(len(body) >> 8), byte(len(body) >> 16), sequence}, body...)
}

func FuzzPostgres(f *testing.F) {
	begin := startup(f)
	f.Add(append(begin, encode(f,
		&pgproto3.Parse{Name: "s", Query: "SELECT $1"}, &pgproto3.Bind{DestinationPortal: "p", PreparedStatement: "s"},
		&pgproto3.Execute{Portal: "p"}, &pgproto3.Sync{}, &pgproto3.Query{String: "COMMIT"}, &pgproto3.Close{ObjectType: 'S', Name: "s"},
	)...), encodeBack(f,
		&pgproto3.ParseComplete{}, &pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")}, &pgproto3.ReadyForQuery{TxStatus: 'I'},
		&pgproto3.ErrorResponse{Code: "25P02"},
	))
	f.Add([]byte("\x00\x00\x00\x08\x04\xd2\x16\x2f"), []byte("N"))
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, fromClient, fromServer []byte) {
		p := newPostgres()
		forwarded, _, err := pass(p.client, fromClient)
		require.Error(t, err)
		if asked := []byte("\x00\x00\x00\x08\x04\xd2\x16"); !bytes.HasPrefix(fromClient, asked) && len(forwarded) > 0 {
			require.True(t, bytes.HasPrefix(fromClient, forwarded))
		}
		if errors.Is(err, io.EOF) && p.started && !bytes.Contains(fromClient, []byte("\x04\xd2\x16")) {
			require.Equal(t, fromClient, forwarded)
		}
		forwarded, _, err = pass(p.server, fromServer)
		require.Error(t, err)
		require.True(t, bytes.HasPrefix(fromServer, forwarded))
		if errors.Is(err, io.EOF) {
			require.Len(t, forwarded, len(fromServer))
		}
		require.LessOrEqual(t, len(p.statements)+len(p.portals), 2*remembered)
	})
}

func FuzzMySQL(f *testing.F) {
	greeting := packet(0, append([]byte("\x0a10.11\x00nnnnssssssss\x00"), make([]byte, 40)...)...)
	f.Add(append(packet(1, 1, 2, 3), append(packet(0, append([]byte{comQuery}, "COMMIT"...)...), packet(0, comStmtExecute, 1, 0, 0, 0)...)...),
		append(greeting, append(packet(1, 0, 0, 0, 2, 0), packet(1, 0xff, 0xbd, 0x04)...)...))
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, fromClient, fromServer []byte) {
		m := newMySQL()
		forwarded, _, err := pass(m.client, fromClient)
		require.Error(t, err)
		require.True(t, bytes.HasPrefix(fromClient, forwarded))
		if errors.Is(err, io.EOF) {
			require.Len(t, forwarded, len(fromClient))
		}
		forwarded, _, err = pass(m.server, fromServer)
		require.Error(t, err)
		require.LessOrEqual(t, len(forwarded), len(fromServer))
		if errors.Is(err, io.EOF) {
			require.Len(t, forwarded, len(fromServer))
		}
		different := 0
		for i := range forwarded {
			if forwarded[i] != fromServer[i] {
				different++
			}
		}
		require.LessOrEqual(t, different, 3, "only flags of the greeting change")
	})
}

// After an error the server skips what is left of the batch: its answers are not taken for those of the next one.
func TestPostgresSkipsAfterAnError(t *testing.T) {
	p := newPostgres()
	_, _, err := pass(p.client, append(startup(t), encode(t,
		&pgproto3.Parse{Query: "BROKEN"}, &pgproto3.Bind{}, &pgproto3.Execute{},
		&pgproto3.Parse{Query: "SKIPPED"}, &pgproto3.Bind{}, &pgproto3.Execute{}, &pgproto3.Sync{},
		&pgproto3.Query{String: "ROLLBACK"},
		&pgproto3.Parse{Name: "kept", Query: "COMMIT"}, &pgproto3.Bind{PreparedStatement: "kept", DestinationPortal: "p"},
		&pgproto3.Execute{Portal: "p"}, &pgproto3.Sync{},
	)...))
	require.ErrorIs(t, err, io.EOF)
	_, messages, err := pass(p.server, encodeBack(t,
		&pgproto3.ErrorResponse{Severity: "ERROR", Code: "42601", Message: "no"}, &pgproto3.ReadyForQuery{TxStatus: 'E'},
		&pgproto3.CommandComplete{CommandTag: []byte("ROLLBACK")}, &pgproto3.ReadyForQuery{TxStatus: 'I'},
		&pgproto3.CommandComplete{CommandTag: []byte("COMMIT")}, &pgproto3.ReadyForQuery{TxStatus: 'I'},
	))
	require.ErrorIs(t, err, io.EOF)
	var got [][3]string
	for _, m := range messages {
		got = append(got, [3]string{m.Kind, m.Text, m.Answers})
	}
	assert.Equal(t, [][3]string{
		{"ErrorResponse", "42601", "BROKEN"},
		{"ReadyForQuery", "E", "BROKEN"},
		{"CommandComplete", "ROLLBACK", "ROLLBACK"},
		{"ReadyForQuery", "I", "ROLLBACK"},
		{"CommandComplete", "COMMIT", "COMMIT"},
		{"ReadyForQuery", "I", ""},
	}, got)
}

// What a MySQL server offers that could not be read is taken out; the rest stays.
func TestGreetingIsTamed(t *testing.T) {
	body := append([]byte("\x0a8.4\x00nnnnssssssss\x00"), 0xff, 0xff, 0x2d, 2, 0, 0xff, 0xff, 21)
	body = append(body, make([]byte, 30)...)
	forwarded, messages, err := pass(newMySQL().server, packet(0, body...))
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, "Greeting", messages[0].Kind)
	at := 4 + len("\x0a8.4\x00nnnnssssssss\x00")
	assert.Equal(t, []byte{0xdf, 0xf7, 0x2d, 2, 0, 0xff, 0xf3, 21}, forwarded[at:at+8])
	assert.Equal(t, body[:at-4], forwarded[4:at])

	refusal := packet(0, append([]byte{0xff, 0x10, 0x04}, "Too many connections"...)...)
	forwarded, _, err = pass(newMySQL().server, refusal)
	require.ErrorIs(t, err, io.EOF)
	assert.Equal(t, refusal, forwarded)
}

// A command of more than one packet is one message, and what follows is the next one.
func TestMySQLPacketsThatGoOn(t *testing.T) {
	const largest = 1<<24 - 1
	m := newMySQL()
	stream := packet(0, append([]byte{comQuery}, bytes.Repeat([]byte("x"), largest-1)...)...)
	stream = append(stream, packet(0, append([]byte{comQuery}, "COMMIT"...)...)...) // its bytes look like a command
	stream = append(stream, packet(0, append([]byte{comQuery}, "ROLLBACK"...)...)...)
	forwarded, messages, err := pass(m.client, stream)
	require.ErrorIs(t, err, io.EOF)
	require.True(t, bytes.Equal(stream, forwarded))
	require.Len(t, messages, 3)
	assert.Len(t, messages[0].Text, most-5)
	assert.Equal(t, "DATA", messages[1].Kind)
	assert.Equal(t, "ROLLBACK", messages[2].Text)
}

// MariaDB's clients may run the statement prepared last by a number that stands for it.
func TestMySQLRunsWhatWasPreparedLast(t *testing.T) {
	m := newMySQL()
	_, _, err := pass(m.client, packet(0, append([]byte{comStmtPrepare}, "COMMIT"...)...))
	require.ErrorIs(t, err, io.EOF)
	m.greeted = true
	_, _, err = pass(m.server, packet(1, 0, 7, 0, 0, 0))
	require.ErrorIs(t, err, io.EOF)
	for _, number := range [][]byte{{7, 0, 0, 0}, {0xff, 0xff, 0xff, 0xff}} {
		_, messages, err := pass(m.client, packet(0, append([]byte{comStmtExecute}, number...)...))
		require.ErrorIs(t, err, io.EOF)
		assert.Equal(t, "COMMIT", messages[0].Text)
	}
	_, _, err = pass(m.client, packet(0, comStmtClose, 7, 0, 0, 0))
	require.ErrorIs(t, err, io.EOF)
	assert.Empty(t, m.statements)
}

// Names are forgotten only when there are very many.
func TestManyPreparedStatements(t *testing.T) {
	p, m := newPostgres(), newMySQL()
	for n := range 3 * remembered {
		remember(p.statements, string(rune(n)), "x")
		remember(m.statements, uint32(n), "x")
	}
	assert.Len(t, p.statements, remembered)
	assert.Len(t, m.statements, remembered)
}
