package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"sync"
)

// The codes in the place of a protocol version, of a first message that is none.
const (
	cancelCode = 80877102
	tlsCode    = 80877103
	gssCode    = 80877104
)

// remembered is how many prepared statements and portals of a connection are kept; the oldest names are not worth more.
const remembered = 4096

// postgres reads both directions of a connection of PostgreSQL's protocol, version 3.
type postgres struct {
	started     bool // the client's first message has passed; used by its reader alone
	clientNames map[byte]string
	serverNames map[byte]string

	mu         sync.Mutex
	statements map[string]string
	portals    map[string]string
	// asked are the client's messages that wait for an answer, oldest first.
	asked []question
}

// question is a message of the client that the server answers.
type question struct {
	text string
	ends bool // its answer ends with ReadyForQuery
}

func newPostgres() *postgres {
	return &postgres{
		statements: map[string]string{}, portals: map[string]string{},
		clientNames: postgresClientNames(), serverNames: postgresServerNames(),
	}
}

// readPostgres takes the head of the next message: its envelope and as much of the body as is looked at.
func readPostgres(r *bufio.Reader, envelope int) (frame, []byte, error) {
	head, err := r.Peek(envelope + 4)
	if err != nil {
		return frame{}, nil, cutShort(err, len(head))
	}
	length := int64(binary.BigEndian.Uint32(head[envelope:]))
	if length < 4 || length > 1<<30 {
		return frame{}, nil, fmt.Errorf("a PostgreSQL message with length %d", length)
	}
	size := length + int64(envelope)
	head, err = r.Peek(int(min(size, most)))
	if err != nil {
		return frame{}, nil, cutShort(err, len(head))
	}
	f := frame{head: bytes.Clone(head), rest: size - int64(len(head))}
	_, err = r.Discard(len(head))
	return f, f.head[envelope+4:], err
}

func (p *postgres) client(r *bufio.Reader) (frame, error) {
	if !p.started {
		return p.first(r)
	}
	f, body, err := readPostgres(r, 1)
	if err != nil {
		return f, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	kind := f.head[0]
	f.msg.Kind = name(p.clientNames, kind)
	switch kind {
	case 'Q':
		f.msg.Text, _ = cString(body)
		p.ask(question{text: f.msg.Text, ends: true})
	case 'P':
		var statement string
		statement, body = cString(body)
		f.msg.Text, _ = cString(body)
		remember(p.statements, statement, f.msg.Text)
	case 'B':
		portal, rest := cString(body)
		statement, _ := cString(rest)
		f.msg.Text = p.statements[statement]
		remember(p.portals, portal, f.msg.Text)
	case 'E':
		portal, _ := cString(body)
		f.msg.Text = p.portals[portal]
		p.ask(question{text: f.msg.Text})
	case 'S', 'F':
		p.ask(question{ends: true})
	}
	return f, nil
}

// first reads the message that begins a connection, which has no type.
func (p *postgres) first(r *bufio.Reader) (frame, error) {
	f, body, err := readPostgres(r, 0)
	if err != nil {
		return f, err
	}
	if len(body) < 4 {
		return f, errors.New("a PostgreSQL connection that begins with too short a message")
	}
	switch binary.BigEndian.Uint32(body) {
	case tlsCode, gssCode:
		f.msg.Kind, f.head, f.answer = "SSLRequest", nil, []byte("N")
	case cancelCode:
		f.msg.Kind, p.started = "CancelRequest", true
	default:
		f.msg.Kind, p.started = "Startup", true
	}
	return f, nil
}

func (p *postgres) server(r *bufio.Reader) (frame, error) {
	f, body, err := readPostgres(r, 1)
	if err != nil {
		return f, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	kind := f.head[0]
	f.msg.Kind = name(p.serverNames, kind)
	if len(p.asked) > 0 {
		f.msg.Answers = p.asked[0].text
	}
	switch kind {
	case 'C', 'I', 's': // complete, empty, suspended: the end of one Execute
		f.msg.Text, _ = cString(body)
		if len(p.asked) > 0 && !p.asked[0].ends {
			p.asked = p.asked[1:]
		}
	case 'Z':
		f.msg.Text = string(body[:min(1, len(body))])
		p.settled()
	case 'E':
		f.msg.Text = sqlState(body)
	}
	return f, nil
}

// settled forgets the questions up to the one that this ReadyForQuery answers: after an error the server skips the rest.
func (p *postgres) settled() {
	for i, q := range p.asked {
		if q.ends {
			p.asked = p.asked[i+1:]
			return
		}
	}
	p.asked = nil
}

// ask notes that an answer is due. A client that asks without end and never reads is not followed.
func (p *postgres) ask(q question) {
	if len(p.asked) < 1<<20 {
		p.asked = append(p.asked, q)
	}
}

// remember notes what a name or number stands for.
func remember[K comparable](names map[K]string, name K, text string) {
	if _, known := names[name]; !known && len(names) >= remembered {
		for old := range names {
			delete(names, old)
			break
		}
	}
	names[name] = text
}

// cString reads a string that a zero ends, or the part that is there.
func cString(body []byte) (text string, rest []byte) {
	before, rest, _ := bytes.Cut(body, []byte{0})
	return string(before), rest
}

// sqlState finds the code among the fields of an ErrorResponse.
func sqlState(body []byte) string {
	for len(body) > 0 && body[0] != 0 {
		field := body[0]
		var text string
		if text, body = cString(body[1:]); field == 'C' {
			return text
		}
	}
	return ""
}

func name(names map[byte]string, kind byte) string {
	if name, ok := names[kind]; ok {
		return name
	}
	return "0x" + strconv.FormatUint(uint64(kind), 16)
}

func postgresClientNames() map[byte]string {
	return map[byte]string{
		'Q': "Query", 'P': "Parse", 'B': "Bind", 'E': "Execute", 'S': "Sync", 'H': "Flush", 'D': "Describe", 'C': "Close",
		'p': "Password", 'X': "Terminate", 'F': "FunctionCall", 'd': "CopyData", 'c': "CopyDone", 'f': "CopyFail",
	}
}

func postgresServerNames() map[byte]string {
	return map[byte]string{
		'R': "Authentication", 'S': "ParameterStatus", 'K': "BackendKeyData", 'Z': "ReadyForQuery", 'C': "CommandComplete",
		'I': "EmptyQueryResponse", 's': "PortalSuspended", 'E': "ErrorResponse", 'N': "NoticeResponse", '1': "ParseComplete",
		'2': "BindComplete", '3': "CloseComplete", 'T': "RowDescription", 't': "ParameterDescription", 'D': "DataRow",
		'n': "NoData", 'A': "NotificationResponse", 'G': "CopyInResponse", 'H': "CopyOutResponse", 'W': "CopyBothResponse",
		'd': "CopyData", 'c': "CopyDone", 'V': "FunctionCallResponse", 'v': "NegotiateProtocolVersion",
	}
}
