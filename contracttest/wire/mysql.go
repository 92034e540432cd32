package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"strconv"
	"sync"
)

// What is taken out of the capabilities that a MySQL server offers, because we could not read what follows, as flags of
// the lower and the upper 16 bits.
const (
	hiddenLow  = 1<<5 | 1<<11            // compression, TLS
	hiddenHigh = 1<<(26-16) | 1<<(27-16) // zstd compression, query attributes
)

// The commands of MySQL's protocol that are treated apart.
const (
	comQuit        = 0x01
	comQuery       = 0x03
	comStmtPrepare = 0x16
	comStmtExecute = 0x17
	comStmtLong    = 0x18
	comStmtClose   = 0x19
)

// lastPrepared is the statement number that stands for the one prepared last, in MariaDB.
const lastPrepared = 1<<32 - 1

// mysql reads both directions of a connection of MySQL's protocol. It counts on a client that waits for the answer to a
// command before it sends the next one, as the protocol wants.
type mysql struct {
	greeted    bool // the server's first packet has passed; used by its reader alone
	goesOn     [2]bool
	names      map[byte]string
	mu         sync.Mutex
	statements map[uint32]string
	last       string // the one prepared last
	// asked are the commands that wait for the first packet of their answer, oldest first.
	asked []command
}

type command struct {
	kind byte
	text string
}

func newMySQL() *mysql { return &mysql{statements: map[uint32]string{}, names: mysqlNames()} }

// readMySQL takes the head of the next packet.
func readMySQL(r *bufio.Reader) (f frame, sequence byte, body []byte, err error) {
	head, err := r.Peek(4)
	if err != nil {
		return frame{}, 0, nil, cutShort(err, len(head))
	}
	size := int64(head[0]) | int64(head[1])<<8 | int64(head[2])<<16 + 4
	head, err = r.Peek(int(min(size, most)))
	if err != nil {
		return frame{}, 0, nil, cutShort(err, len(head))
	}
	f = frame{head: bytes.Clone(head), rest: size - int64(len(head))}
	_, err = r.Discard(len(head))
	return f, f.head[3], f.head[4:], err
}

// continues tells whether the packet goes on with the one before it, which was of the largest size.
func (m *mysql) continues(from Side, f frame) bool {
	was := m.goesOn[from-1]
	m.goesOn[from-1] = f.head[0] == 0xff && f.head[1] == 0xff && f.head[2] == 0xff
	return was
}

func (m *mysql) client(r *bufio.Reader) (frame, error) {
	f, sequence, body, err := readMySQL(r)
	if err != nil {
		return f, err
	}
	f.msg.Kind = "DATA"
	if m.continues(Client, f) || sequence != 0 || len(body) == 0 {
		return f, nil // the rest of a large command, the answer to a question of the server's, a file
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c := command{kind: body[0]}
	f.msg.Kind = name(m.names, c.kind)
	number := uint32(0)
	if len(body) >= 5 {
		number = binary.LittleEndian.Uint32(body[1:])
	}
	switch c.kind {
	case comQuery, comStmtPrepare:
		c.text = string(body[1:])
	case comStmtExecute:
		if c.text = m.statements[number]; number == lastPrepared {
			c.text = m.last
		}
	case comStmtClose:
		delete(m.statements, number)
	}
	f.msg.Text = c.text
	if c.kind != comQuit && c.kind != comStmtClose && c.kind != comStmtLong && len(m.asked) < remembered {
		m.asked = append(m.asked, c)
	}
	return f, nil
}

func (m *mysql) server(r *bufio.Reader) (frame, error) {
	f, sequence, body, err := readMySQL(r)
	if err != nil {
		return f, err
	}
	f.msg.Kind = "DATA"
	if !m.greeted {
		m.greeted = true
		f.msg.Kind = "Greeting"
		hide(body)
		m.continues(Server, f)
		return f, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.continues(Server, f) || sequence != 1 || len(m.asked) == 0 || len(body) == 0 {
		return f, nil
	}
	c := m.asked[0]
	m.asked = m.asked[1:]
	f.msg.Answers = c.text
	switch body[0] {
	case 0x00:
		f.msg.Kind = "OK"
		if c.kind == comStmtPrepare && len(body) >= 5 {
			remember(m.statements, binary.LittleEndian.Uint32(body[1:]), c.text)
			m.last = c.text
		}
	case 0xff:
		f.msg.Kind = "ERR"
		if len(body) >= 3 {
			f.msg.Text = strconv.Itoa(int(binary.LittleEndian.Uint16(body[1:])))
		}
	default:
		f.msg.Kind = "RESULT"
	}
	return f, nil
}

// hide takes capabilities out of a greeting, in place.
func hide(greeting []byte) {
	version := bytes.IndexByte(greeting, 0)
	low := version + 1 + 4 + 8 + 1 // behind the connection's number and the first part of the scramble
	if version < 1 || greeting[0] != 10 || len(greeting) < low+7 {
		return // an error in the place of the greeting, or another version
	}
	clearBits(greeting[low:], hiddenLow)
	clearBits(greeting[low+5:], hiddenHigh) // behind character set and status
}

func clearBits(at []byte, bits uint16) {
	binary.LittleEndian.PutUint16(at, binary.LittleEndian.Uint16(at)&^bits)
}

func mysqlNames() map[byte]string {
	return map[byte]string{
		comQuit: "QUIT", 0x02: "INIT_DB", comQuery: "QUERY", 0x04: "FIELD_LIST", 0x08: "SHUTDOWN", 0x09: "STATISTICS",
		0x0c: "PROCESS_KILL", 0x0e: "PING", 0x11: "CHANGE_USER", comStmtPrepare: "STMT_PREPARE", comStmtExecute: "STMT_EXECUTE",
		comStmtLong: "STMT_SEND_LONG_DATA", comStmtClose: "STMT_CLOSE", 0x1a: "STMT_RESET", 0x1b: "SET_OPTION",
		0x1c: "STMT_FETCH", 0x1f: "RESET_CONNECTION", 0xfa: "STMT_BULK_EXECUTE",
	}
}
