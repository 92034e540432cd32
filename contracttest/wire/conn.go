package wire

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// conn is a client and its connection to the server.
//
// Each direction has a reader and a writer. The reader finds the messages and puts what is to be forwarded and what rules
// want done in a queue; the writer takes it from there when its time has come, in that order. So an action happens exactly
// where the message stands in the stream, whatever the delay.
type conn struct {
	proxy          *Proxy
	number         int
	client, server *net.TCPConn
	session        session

	muted [2]atomic.Bool // what the client, the server sends is thrown away
	once  sync.Once
	done  chan struct{} // closed by end
}

// item is a piece of a stream: bytes, an action, its preparation, or the end.
type item struct {
	data  []byte
	due   time.Time
	fault *Fault
	msg   Message
	// mute throws away what the other end sends from now on, because an action comes that ends or silences the connection
	// behind the next message: else its answer might be faster than the action.
	mute bool
	// end is set for the end of the stream: Finish or Reset, as it came.
	end Action
}

// queued is how many items may wait; with those of the largest size that is 16 MiB.
const queued = 1024

// run forwards until both directions have ended.
func (c *conn) run() {
	up, down := make(chan item, queued), make(chan item, queued)
	var all sync.WaitGroup
	all.Go(func() { c.read(Client, up, down) })
	all.Go(func() { c.read(Server, down, up) })
	all.Go(func() { c.write(Client, up) })
	all.Go(func() { c.write(Server, down) })
	all.Wait()
	c.end(Finish, 0)
}

// end closes both halves, with RST or in order. from is the sender of a message that was just forwarded: the other end
// still gets it, so its half ends in order. 0: nobody.
func (c *conn) end(how Action, from Side) {
	c.once.Do(func() {
		if how == Reset && from != Server {
			_ = c.client.SetLinger(0) // fails where the connection has ended
		}
		if how == Reset && from != Client {
			_ = c.server.SetLinger(0)
		}
		close(c.done)
		_ = c.client.Close()
		_ = c.server.Close()
	})
}

// reset ends a connection with RST.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0) // fails where it has ended
	_ = c.Close()
}

// read puts what one end sends into the queue of that direction; back is that of the other one.
func (c *conn) read(from Side, queue, back chan<- item) {
	source, next := c.client, c.session.client
	if from == Server {
		source, next = c.server, c.session.server
	}
	r := newReader(source)
	for {
		f, err := next(r)
		if err != nil {
			c.ended(err, from, queue)
			return
		}
		f.msg.Conn, f.msg.From = c.number, from
		half, _ := c.proxy.state()
		due := time.Now().Add(half)
		if f.answer != nil && !c.put(back, item{data: f.answer, due: due}) {
			return
		}
		if !c.forward(r, queue, f, due) {
			return
		}
	}
}

// forward puts one message and what rules do at it into the queue. False: nothing more is to be forwarded.
func (c *conn) forward(r *bufio.Reader, queue chan<- item, f frame, due time.Time) bool {
	before, after := c.proxy.taken(f.msg)
	if !c.act(r, queue, before, f.msg, due) {
		return false
	}
	if n := len(after); n > 0 && after[n-1].rule.Do != Pass && !c.put(queue, item{mute: true, due: due}) {
		return false
	}
	if len(f.head) > 0 && !c.put(queue, item{data: f.head, due: due}) {
		return false
	}
	for f.rest > 0 {
		piece := make([]byte, min(f.rest, most))
		if _, err := io.ReadFull(r, piece); err != nil {
			c.ended(cutShort(err, 1), f.msg.From, queue)
			return false
		}
		if f.rest -= int64(len(piece)); !c.put(queue, item{data: piece, due: due}) {
			return false
		}
	}
	return c.act(r, queue, after, f.msg, due)
}

// act puts actions into the queue. After one that ends or silences the connection nothing follows: what still comes is read
// and thrown away until the connection ends.
func (c *conn) act(r *bufio.Reader, queue chan<- item, faults []*Fault, m Message, due time.Time) bool {
	for _, f := range faults {
		if !c.put(queue, item{fault: f, msg: m, due: due}) {
			return false
		}
		if f.rule.Do != Pass {
			_, _ = io.Copy(io.Discard, r) // ends with the connection
			return false
		}
	}
	return true
}

// ended deals with the end of what one side sends.
func (c *conn) ended(err error, from Side, queue chan<- item) {
	select {
	case <-c.done:
		return // we have ended it
	default:
	}
	how := Reset
	var broken net.Error
	switch {
	case errors.Is(err, io.EOF):
		how = Finish
	case errors.As(err, &broken), errors.Is(err, io.ErrUnexpectedEOF): // it was lost, or gave up
	default:
		c.proxy.fail(fmt.Errorf("connection %d: reading what %s sends: %w", c.number, from, err))
	}
	half, _ := c.proxy.state()
	c.put(queue, item{end: how, due: time.Now().Add(half)}) // behind what it has sent before
}

// put waits for room in the queue. False: the connection has ended.
func (c *conn) put(queue chan<- item, it item) bool {
	select {
	case queue <- it:
		return true
	case <-c.done:
		return false
	}
}

// write forwards what one end has sent to the other one, each piece when its time has come.
func (c *conn) write(from Side, queue <-chan item) {
	target := c.server
	if from == Server {
		target = c.client
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	var held *item // taken from the queue, and not part of what was written last
	for {
		it, ok := c.take(queue, held)
		if !ok || !c.wait(timer, it.due) {
			return
		}
		held = nil
		switch {
		case c.muted[from-1].Load(): // nobody hears of it, of the end neither
		case it.mute:
			c.muted[2-from].Store(true)
		case it.fault != nil:
			c.perform(it.fault, it.msg)
		case it.end == Finish:
			_ = target.CloseWrite() // fails where the connection has ended
			return
		case it.end == Reset:
			c.end(Reset, 0)
			return
		default:
			var data []byte
			data, held = gather(queue, it)
			if _, err := target.Write(data); err != nil {
				c.end(Reset, 0)
				return
			}
		}
	}
}

// take gives the next item.
func (c *conn) take(queue <-chan item, held *item) (item, bool) {
	if held != nil {
		return *held, true
	}
	select {
	case it := <-queue:
		return it, true
	case <-c.done:
		return item{}, false
	}
}

// gather adds to the bytes of an item those that are queued behind it and due too, so that a pipelined batch does not become
// one packet a message. It gives back the item it took too many.
func gather(queue <-chan item, first item) (data []byte, held *item) {
	data = first.data
	for now := time.Now(); len(data) < 4*most; {
		select {
		case next := <-queue:
			if next.data == nil || next.due.After(now) {
				return data, &next
			}
			data = append(data, next.data...)
		default:
			return data, nil
		}
	}
	return data, nil
}

// wait returns when the time has come and traffic flows. False: the connection has ended.
func (c *conn) wait(timer *time.Timer, due time.Time) bool {
	for {
		_, gate := c.proxy.state()
		select {
		case <-gate:
		case <-c.done:
			return false
		}
		left := time.Until(due)
		if left <= 0 {
			return true
		}
		timer.Reset(left)
		select {
		case <-timer.C: // and the gate may be closed again
		case <-c.done:
			return false
		}
	}
}

// perform does what a rule says. It counts before a client can see that its connection has ended, and after it can no
// longer be heard.
func (c *conn) perform(f *Fault, m Message) {
	if f.rule.Call != nil {
		f.rule.Call(m)
	}
	if f.rule.Do == Swallow {
		c.muted[0].Store(true)
		c.muted[1].Store(true)
	}
	f.done()
	if f.rule.Do == Reset || f.rule.Do == Finish {
		forwarded := Side(0)
		if f.rule.When == After {
			forwarded = m.From
		}
		c.end(f.rule.Do, forwarded)
	}
}
