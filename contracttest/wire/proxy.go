package wire

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"
)

// Protocol says how the proxy reads what passes.
type Protocol uint8

// The protocols.
const (
	// Raw looks into nothing: a Message is what arrived together, without text.
	Raw Protocol = iota
	// Postgres is that of PostgreSQL and PgBouncer.
	Postgres
	// MySQL is that of MySQL and MariaDB.
	MySQL
)

// Options says what stands behind the proxy.
type Options struct {
	// Upstream is the server's host:port.
	Upstream string
	Protocol Protocol
	// RoundTrip is the time that a message and its answer take longer than without the proxy, half of it each way. What is
	// sent without waiting for an answer is not slowed down otherwise. SetRoundTrip changes it.
	RoundTrip time.Duration
}

// dialTimeout bounds the wait for the server to take a connection. A client whose connection it does not take is reset.
const dialTimeout = 10 * time.Second

// acceptPause is how long we wait after a connection that could not be taken.
const acceptPause = 10 * time.Millisecond

// Proxy forwards connections. Its methods can be called from any goroutine.
type Proxy struct {
	opt      Options
	listener net.Listener
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu        sync.Mutex
	conns     map[*conn]bool
	count     int
	faults    []*Fault
	roundTrip time.Duration
	refusing  int
	gate      chan struct{} // closed while traffic flows
	stalls    int
	err       error
	closed    bool
}

// Open listens on a free port of 127.0.0.1. The proxy ends with Close, or when ctx is done.
func Open(ctx context.Context, opt Options) (*Proxy, error) {
	if opt.Protocol > MySQL {
		return nil, errors.New("opening a proxy: an unknown protocol")
	}
	if _, _, err := net.SplitHostPort(opt.Upstream); err != nil {
		return nil, fmt.Errorf("opening a proxy: the server's address: %w", err)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("opening a proxy: %w", err)
	}
	p := &Proxy{
		opt: opt, listener: listener, conns: map[*conn]bool{}, gate: make(chan struct{}), roundTrip: opt.RoundTrip,
	}
	close(p.gate)
	p.ctx, p.cancel = context.WithCancel(ctx)
	p.wg.Go(p.accept)
	context.AfterFunc(p.ctx, p.shut)
	return p, nil
}

// Test opens a proxy for a test, and closes it when the test ends. What could not be read makes the test fail.
func Test(t testing.TB, opt Options) *Proxy {
	t.Helper()
	p, err := Open(context.WithoutCancel(t.Context()), opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// Address is the host:port where clients connect.
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// On puts a rule to use, after those that are there. The first one that acts at a message ends it for the others if it ends
// or silences the connection. It panics if the rule cannot work.
func (p *Proxy) On(r Rule) *Fault {
	if err := r.check(); err != nil {
		panic("wire: " + err.Error())
	}
	f := &Fault{rule: r, fired: make(chan struct{})}
	f.remove = func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for i, one := range p.faults {
			if one == f {
				p.faults = append(p.faults[:i:i], p.faults[i+1:]...)
				return
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults[:len(p.faults):len(p.faults)], f)
	return f
}

// SetRoundTrip changes the delay of what comes from now on; see [Options].
func (p *Proxy) SetRoundTrip(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.roundTrip = d
}

// Cut resets all connections that are there, also those that were swallowed, and tells how many. New ones are taken.
func (p *Proxy) Cut() int {
	conns := p.current()
	for _, c := range conns {
		c.end(Reset, 0)
	}
	return len(conns)
}

// Stall stops all traffic, of new connections too, until undo is called; nothing is lost. Calling undo again does nothing.
func (p *Proxy) Stall() (undo func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stalls++; p.stalls == 1 {
		p.gate = make(chan struct{})
	}
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.stalls--; p.stalls == 0 {
			close(p.gate)
		}
	})
}

// Refuse resets new connections until undo is called. Those that are there go on.
func (p *Proxy) Refuse() (undo func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusing++
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.refusing--
	})
}

// Connections is how many connections are open, including those that were swallowed.
func (p *Proxy) Connections() int { return len(p.current()) }

// Close ends the proxy and all connections, and returns when its goroutines have ended. The error is the first message that
// could not be read, where there was one; its connection was reset. A second call gives the same.
func (p *Proxy) Close() error {
	p.cancel()
	p.shut()
	p.wg.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// shut closes the listener and the connections.
func (p *Proxy) shut() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	_ = p.listener.Close() // a second time it says that it is closed
	for _, c := range p.current() {
		c.end(Finish, 0)
	}
}

func (p *Proxy) current() []*conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]*conn, 0, len(p.conns))
	for c := range p.conns {
		all = append(all, c)
	}
	return all
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			if p.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(acceptPause) // too many open files, perhaps: the next one may do
			continue
		}
		p.wg.Go(func() { p.serve(client.(*net.TCPConn)) })
	}
}

// serve connects a client with the server and forwards until one of them ends it.
func (p *Proxy) serve(client *net.TCPConn) {
	p.mu.Lock()
	refused := p.refusing > 0
	p.mu.Unlock()
	if refused {
		reset(client)
		return
	}
	ctx, cancel := context.WithTimeout(p.ctx, dialTimeout)
	defer cancel()
	upstream, err := new(net.Dialer).DialContext(ctx, "tcp", p.opt.Upstream)
	if err != nil {
		reset(client)
		return
	}
	c := &conn{
		proxy: p, client: client, server: upstream.(*net.TCPConn), session: p.session(), done: make(chan struct{}),
	}
	if !p.add(c) {
		c.end(Finish, 0)
		return
	}
	defer p.remove(c)
	c.run()
}

func (p *Proxy) session() session {
	switch p.opt.Protocol {
	case Postgres:
		return newPostgres()
	case MySQL:
		return newMySQL()
	case Raw:
	}
	return raw{}
}

func (p *Proxy) add(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.count++
	c.number = p.count
	p.conns[c] = true
	return true
}

func (p *Proxy) remove(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// fail notes what could not be read.
func (p *Proxy) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil && !p.closed {
		p.err = err
	}
}

// taken lists the rules that act at a message, before and after it.
func (p *Proxy) taken(m Message) (before, after []*Fault) {
	p.mu.Lock()
	faults := p.faults
	p.mu.Unlock()
	for _, f := range faults {
		if !f.takes(m) {
			continue
		}
		if f.rule.When == Before {
			before = append(before, f)
		} else {
			after = append(after, f)
		}
		if f.rule.Do != Pass {
			break
		}
	}
	return before, after
}

// state gives the delay in one direction, and the gate.
func (p *Proxy) state() (half time.Duration, gate chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.roundTrip / 2, p.gate
}

func newReader(c net.Conn) *bufio.Reader { return bufio.NewReaderSize(c, 4*most) }
