package wire

import "strings"

// Side is one of the two ends of a connection.
type Side uint8

// The two ends.
const (
	Client Side = iota + 1
	Server
)

// Message is what is known of one message of the protocol.
type Message struct {
	// Conn is the number of the connection, from 1, in the order in which the proxy took them.
	Conn int
	// From is the end that sends it.
	From Side
	// Kind is its name in the protocol's documentation: for PostgreSQL Startup, Query, Parse, Bind, Execute, Sync,
	// CommandComplete, ReadyForQuery, ErrorResponse and so on; for MySQL the command without COM_ (QUERY, STMT_PREPARE,
	// STMT_EXECUTE), and for the first packet of an answer OK, ERR or RESULT; else DATA.
	Kind string
	// Text is the statement of a message that carries or executes one, by whatever name it was prepared; the tag of a
	// CommandComplete; the state of a ReadyForQuery, I, T or E; the SQLSTATE or number of an error. A long one is cut off
	// after 16 KiB.
	Text string
	// Answers is, for a message of the server, the statement that it is an answer to.
	Answers string
}

// most is how much of a message is looked at.
const most = 16 << 10

// Commit matches the client's message that makes the server commit: a statement of its own, the last one of several in one
// simple query, or the execution of a prepared one, alone or in the middle of a pipelined batch.
func Commit(m Message) bool {
	return m.From == Client && (m.Kind == "Query" || m.Kind == "Execute" || m.Kind == "QUERY" || m.Kind == "STMT_EXECUTE") &&
		commits(m.Text)
}

// Committed matches the server's message that tells of a successful COMMIT. For MySQL the COMMIT has to be a statement of
// its own. When it passes, the transaction is committed.
func Committed(m Message) bool {
	return m.From == Server && (m.Kind == "CommandComplete" && m.Text == "COMMIT" || m.Kind == "OK" && commits(m.Answers))
}

// Statement matches the client's message that makes the server execute a statement that begins with this word or words,
// in whatever case.
func Statement(words string) func(Message) bool {
	return func(m Message) bool {
		switch m.Kind {
		case "Query", "Execute", "QUERY", "STMT_EXECUTE":
			text := strings.TrimSpace(m.Text)
			return len(text) >= len(words) && strings.EqualFold(text[:len(words)], words)
		}
		return false
	}
}

// Sent matches every message of one end.
func Sent(from Side) func(Message) bool { return func(m Message) bool { return m.From == from } }

// commits tells whether the last statement is COMMIT, which PostgreSQL also calls END.
func commits(text string) bool {
	text = strings.TrimRight(text, "; \t\r\n")
	text = text[strings.LastIndexByte(text, ';')+1:]
	words := strings.Fields(text)
	if len(words) == 0 {
		return false
	}
	switch strings.ToUpper(words[0]) {
	case "COMMIT":
		return len(words) == 1 || !strings.EqualFold(words[1], "PREPARED")
	case "END":
		return true
	}
	return false
}

// String names the side.
func (s Side) String() string {
	switch s {
	case Client:
		return "the client"
	case Server:
		return "the server"
	default:
		return "nobody"
	}
}
