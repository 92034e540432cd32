package wire

import (
	"bufio"
	"errors"
	"fmt"
	"io"
)

// frame is one message as it is forwarded: a head that was looked at, and the number of bytes that follow it unseen.
type frame struct {
	head []byte
	rest int64
	// answer goes back to the sender in the place of an answer of the other end.
	answer []byte
	msg    Message
}

// session reads the messages of one connection. Each method is called by one goroutine, the two of them at the same time.
// They end with io.EOF where the stream ends between two messages.
type session interface {
	client(r *bufio.Reader) (frame, error)
	server(r *bufio.Reader) (frame, error)
}

// raw is a session of which nothing is known: what arrives together is one message.
type raw struct{}

func (raw) client(r *bufio.Reader) (frame, error) { return readRaw(r) }
func (raw) server(r *bufio.Reader) (frame, error) { return readRaw(r) }

func readRaw(r *bufio.Reader) (frame, error) {
	if _, err := r.Peek(1); err != nil {
		return frame{}, err
	}
	f := frame{head: make([]byte, r.Buffered())}
	f.msg.Kind = "DATA"
	_, err := io.ReadFull(r, f.head)
	return f, err
}

// cutShort tells the end of the stream between two messages from the end within one.
func cutShort(err error, have int) error {
	if have > 0 && errors.Is(err, io.EOF) {
		return fmt.Errorf("the stream ends within a message: %w", io.ErrUnexpectedEOF)
	}
	return err
}
