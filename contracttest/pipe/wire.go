package pipe

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"sync"
)

const (
	// DefaultFrameLimit is the largest frame, in bytes, that either side writes or accepts.
	DefaultFrameLimit = 64 << 20
	// frameOverhead is what a frame with one message holds beside payload, metadata, key and identity, generously.
	frameOverhead = 64 << 10
	// queued is the number of frames that may wait to be written. Callers beyond that wait themselves.
	queued = 16
)

// errFrame: the other side sent a frame that is too large, or one that is none.
var errFrame = errors.New("malformed frame")

// wire sends and receives gob values as frames of limited size. One goroutine writes and one reads, so that a caller is
// never stuck in a write that the other side does not take.
type wire struct {
	conn  io.ReadWriteCloser
	limit int

	slots chan struct{} // one per frame that is encoded and not written
	queue chan []byte

	mu  sync.Mutex // one frame is encoded and queued at a time: gob streams have an order
	buf bytes.Buffer
	enc *gob.Encoder

	in  bytes.Buffer // used by the reader only
	dec *gob.Decoder
	src *bufio.Reader

	once sync.Once
	dead chan struct{} // closed when the connection is of no use any more
	err  error         // why; readable once dead is closed
}

func newWire(conn io.ReadWriteCloser, limit int) *wire {
	w := &wire{
		conn:  conn,
		limit: limit,
		slots: make(chan struct{}, queued),
		queue: make(chan []byte, queued),
		src:   bufio.NewReader(conn),
		dead:  make(chan struct{}),
	}
	w.enc, w.dec = gob.NewEncoder(&w.buf), gob.NewDecoder(&w.in)
	return w
}

// send queues a value for writing. An error means that it was not and never will be written: the caller's context is
// done, or the wire is dead. nil means that it may be.
func (w *wire) send(ctx context.Context, v any) error {
	select {
	case w.slots <- struct{}{}:
	case <-w.dead:
		return w.err
	case <-ctx.Done():
		return ctx.Err()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf.Reset()
	w.buf.Write([]byte{0, 0, 0, 0})
	if err := w.enc.Encode(v); err != nil {
		w.fail(fmt.Errorf("encoding a frame: %w", err)) // the gob stream is out of step now
		return w.err
	}
	frame := bytes.Clone(w.buf.Bytes())
	if len(frame) > w.limit {
		w.fail(fmt.Errorf("%w: %d bytes, the limit is %d", errFrame, len(frame), w.limit))
		return w.err
	}
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-4)) //nolint:gosec // checked against the limit above
	w.queue <- frame                                        // never blocks: a slot is a place in the queue
	if w.buf.Cap() > 1<<20 {
		w.buf = bytes.Buffer{}
	}
	return nil
}

// write writes what is queued until the wire is dead.
func (w *wire) write() {
	for {
		select {
		case frame := <-w.queue:
			if _, err := w.conn.Write(frame); err != nil {
				w.fail(fmt.Errorf("writing: %w", err))
				return
			}
			<-w.slots
		case <-w.dead:
			return
		}
	}
}

// receive reads the next value. It is called by one goroutine.
func (w *wire) receive(v any) error {
	var head [4]byte
	if _, err := io.ReadFull(w.src, head[:]); err != nil {
		return fmt.Errorf("reading: %w", err)
	}
	n := int64(binary.BigEndian.Uint32(head[:]))
	if n > int64(w.limit) {
		return fmt.Errorf("%w: %d bytes, the limit is %d", errFrame, n, w.limit)
	}
	w.in.Reset()
	if _, err := io.CopyN(&w.in, w.src, n); err != nil { // grows with what arrives, not with what was announced
		return fmt.Errorf("reading: %w", err)
	}
	if err := w.dec.Decode(v); err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	if w.in.Len() > 0 {
		return fmt.Errorf("%w: %d bytes too many", errFrame, w.in.Len())
	}
	return nil
}

// fail ends the wire; the first reason counts.
func (w *wire) fail(err error) {
	w.once.Do(func() {
		w.err = err
		close(w.dead)
		_ = w.conn.Close() // the reason is already known, and a second one would not help
	})
}
