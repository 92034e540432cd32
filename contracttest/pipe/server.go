package pipe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

const (
	// pollTime bounds one Receive on the parent's side, so that an answer never stays away for long.
	pollTime = 500 * time.Millisecond
	// closeTime bounds the closing of the sources of a connection that ended.
	closeTime = 10 * time.Second
	// mostCalls bounds the calls of one connection that run at the same time.
	mostCalls = 1024
)

// Server offers one driver to the processes that connect. It is safe for concurrent use, and its zero value is not
// ready: use [NewServer]. It does not own the driver.
type Server struct {
	driver sdk.Driver
	limit  int

	mu       sync.Mutex
	sessions map[*session]struct{}
	stalled  chan struct{} // closed when answers flow again; nil: they flow
}

// NewServer makes a server in front of a driver. frameLimit is the largest frame in bytes, 0 means [DefaultFrameLimit];
// both sides have to use the same.
func NewServer(d sdk.Driver, frameLimit int) *Server {
	return &Server{driver: d, limit: orDefault(frameLimit), sessions: map[*session]struct{}{}}
}

func orDefault(limit int) int {
	if limit <= 2*frameOverhead {
		return DefaultFrameLimit
	}
	return limit
}

// Serve accepts connections until ctx is done or the listener fails. It closes the listener, ends all connections and
// returns when their sources are closed; nil after ctx.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // ends Accept
	defer stop()
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel() // before waiting
	for {
		conn, err := l.Accept()
		if err != nil {
			_ = l.Close()
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accepting a connection for the pipe driver: %w", err)
		}
		group.Go(func() { _ = s.ServeConn(ctx, conn) }) // how one connection ended is of no interest to the others
	}
}

// ServeConn serves one connection until it ends or ctx is done, closes it and every source opened over it, and then
// returns why it ended; nil after ctx or a regular end. Closing conn has to end its Read and Write.
func (s *Server) ServeConn(ctx context.Context, conn io.ReadWriteCloser) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ss := &session{server: s, wire: newWire(conn, s.limit), sources: map[uint64]*served{}}
	s.mu.Lock()
	s.sessions[ss] = struct{}{}
	s.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { ss.wire.fail(context.Cause(ctx)) })
	defer stop()
	ss.group.Go(ss.wire.write)
	ss.read(ctx)
	cancel() // running calls end
	err := ss.closeSources(context.Background())
	ss.group.Wait()
	s.mu.Lock()
	delete(s.sessions, ss)
	s.mu.Unlock()
	if lost := ss.wire.err; !errors.Is(lost, io.EOF) && !errors.Is(lost, net.ErrClosed) && !errors.Is(lost, context.Canceled) {
		err = errors.Join(lost, err)
	}
	return err
}

// Cut closes every connection. New ones are accepted at once.
func (s *Server) Cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ss := range s.sessions {
		ss.wire.fail(net.ErrClosed)
	}
}

// Stall holds back every answer, on present and future connections, until resume is called, which may be done more than
// once. What is asked for meanwhile is carried out.
func (s *Server) Stall() (resume func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	gate := make(chan struct{})
	if s.stalled != nil {
		gate = s.stalled
	}
	s.stalled = gate
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.stalled == gate {
			s.stalled = nil
			close(gate)
		}
	})
}

// flowing waits until answers are not held back.
func (s *Server) flowing(ctx context.Context) error {
	s.mu.Lock()
	gate := s.stalled
	s.mu.Unlock()
	if gate == nil {
		return nil
	}
	select {
	case <-gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// session is one connection on the parent's side.
type session struct {
	server *Server
	wire   *wire
	group  sync.WaitGroup

	mu      sync.Mutex
	sources map[uint64]*served
	calls   int
	last    uint64
	over    bool // no source may be added any more
}

// served is a source of a session. What did not fit into an answer waits in kept.
type served struct {
	sdk.Source
	mu   sync.Mutex
	kept []sdk.Delivery
}

// read starts every call that arrives, until the connection ends.
func (ss *session) read(ctx context.Context) {
	for {
		var req request
		if err := ss.wire.receive(&req); err != nil {
			ss.wire.fail(err)
			return
		}
		ss.mu.Lock()
		ss.calls++
		busy := ss.calls > mostCalls
		ss.mu.Unlock()
		ss.group.Go(func() {
			res := &response{}
			if busy {
				refusal := &sdk.OutcomeError{Kind: sdk.OutcomeRejected, Err: fmt.Errorf("more than %d calls at once", mostCalls)}
				res.Err = encodeError(refusal)
			} else {
				res = ss.call(ctx, req)
			}
			ss.mu.Lock()
			ss.calls--
			ss.mu.Unlock()
			res.ID = req.ID
			if ss.server.flowing(ctx) == nil {
				_ = ss.wire.send(ctx, res) // fails only when the connection is over
			}
		})
	}
}

// call carries out one request.
func (ss *session) call(ctx context.Context, req request) *response {
	if req.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, req.Timeout)
		defer cancel()
	}
	res := &response{}
	var err error
	d := ss.server.driver
	switch req.Op {
	case opHello:
		res.Capabilities = d.Capabilities()
	case opPrepare:
		err = d.Prepare(ctx, req.Binding)
	case opSend:
		err = d.Send(ctx, req.Topic, req.Messages)
	case opOpen:
		err = ss.open(ctx, req.Binding, res)
	case opBye:
		err = ss.closeSources(ctx)
	default:
		err = ss.callSource(ctx, req, res)
	}
	res.Err = encodeError(err)
	return res
}

func (ss *session) callSource(ctx context.Context, req request, res *response) error {
	ss.mu.Lock()
	src := ss.sources[req.Source]
	ss.mu.Unlock()
	if src == nil {
		return sdk.ErrClosed
	}
	switch req.Op {
	case opReceive:
		got, err := src.receive(ctx, req.Limit, ss.wire.limit)
		res.Deliveries = toWire(got)
		return err
	case opSettle:
		return src.Settle(ctx, req.Settlements)
	case opExtend:
		if ext, ok := src.Source.(sdk.LeaseExtender); ok {
			return ext.Extend(ctx, req.Tokens, req.Duration)
		}
	case opBarrier:
		if bar, ok := src.Source.(sdk.Barrier); ok {
			return bar.Barrier(ctx)
		}
	case opCloseSource:
		ss.mu.Lock()
		delete(ss.sources, req.Source)
		ss.mu.Unlock()
		return src.Close(ctx)
	default:
	}
	return fmt.Errorf("call %d: %w", req.Op, sdk.ErrUnsupported)
}

// open opens a source. One that is ready only after the connection ended is closed again.
func (ss *session) open(ctx context.Context, b sdk.Binding, res *response) error {
	src, err := ss.server.driver.Open(ctx, b)
	if err != nil {
		return err
	}
	ss.mu.Lock()
	over := ss.over
	if !over {
		ss.last++
		ss.sources[ss.last] = &served{Source: src}
		res.Source = ss.last
	}
	ss.mu.Unlock()
	if over {
		return errors.Join(sdk.ErrClosed, src.Close(context.WithoutCancel(ctx)))
	}
	res.Capabilities = src.Capabilities()
	_, res.Extends = src.(sdk.LeaseExtender)
	_, res.Barriers = src.(sdk.Barrier)
	return nil
}

// receive asks the source for a bounded time and answers no more than fits into a frame.
func (s *served) receive(ctx context.Context, limit, frame int) ([]sdk.Delivery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.kept) == 0 {
		poll, cancel := context.WithTimeout(ctx, pollTime)
		defer cancel()
		got, err := s.Receive(poll, limit)
		if err != nil && poll.Err() != nil && errors.Is(err, poll.Err()) && ctx.Err() == nil {
			err = nil // only the poll is over
		}
		if err != nil {
			return nil, err
		}
		s.kept = got
	}
	room, n := frame/2, 0
	for n < min(limit, len(s.kept)) && (n == 0 || room >= size(s.kept[n].Message)) {
		room -= size(s.kept[n].Message) + len(s.kept[n].Token)
		n++
	}
	out := s.kept[:n:n]
	s.kept = s.kept[n:]
	return out, nil
}

// closeSources closes every source of the session, all at once, and lets none be added.
func (ss *session) closeSources(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
	defer cancel()
	ss.mu.Lock()
	sources := ss.sources
	ss.sources, ss.over = map[uint64]*served{}, true
	ss.mu.Unlock()
	errs := make(chan error, len(sources))
	for _, src := range sources {
		go func() { errs <- src.Close(ctx) }()
	}
	var all []error
	for range sources {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}
