package pipe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// errLost: the connection to the parent ended.
var errLost = errors.New("the connection to the parent is lost")

// Dial connects to the parent. It returns soon after ctx is done. Closing what it returns has to end its Read and Write.
type Dial func(ctx context.Context) (io.ReadWriteCloser, error)

// Driver is the child's side: an [sdk.Driver] whose broker is behind the parent's [Server].
//
// When the connection is lost, its sources end with an error and their tokens are worth nothing; the next Prepare, Send or
// Open dials again. A Send that was under way has outcome unknown; one that had not left yet is rejected. A Receive whose
// context ends leaves its request with the parent, and what that brings is kept for the next Receive: it counts as handed
// out at the broker meanwhile.
type Driver struct {
	dial  Dial
	limit int
	caps  sdk.Capabilities

	dialing chan struct{} // a lock that can be waited for with a context
	mu      sync.Mutex
	link    *link // the newest connection, perhaps dead
	closed  bool
	over    chan struct{} // closed when Close has done its work
}

var _ sdk.Driver = (*Driver)(nil)

// Open dials the parent for the first time and learns what the driver behind it declares. frameLimit is the largest frame
// in bytes, 0 means [DefaultFrameLimit]; both sides have to use the same.
func Open(ctx context.Context, dial Dial, frameLimit int) (*Driver, error) {
	if dial == nil {
		return nil, errors.New("open pipe driver: the dial function is nil")
	}
	d := &Driver{dial: dial, limit: orDefault(frameLimit), dialing: make(chan struct{}, 1), over: make(chan struct{})}
	l, err := d.connected(ctx)
	if err != nil {
		return nil, fmt.Errorf("open pipe driver: %w", err)
	}
	d.caps = l.caps
	return d, nil
}

// Capabilities are those of the driver behind the parent, with a payload limit that fits into a frame.
func (d *Driver) Capabilities() sdk.Capabilities { return d.caps }

// Prepare is the parent's.
func (d *Driver) Prepare(ctx context.Context, b sdk.Binding) error {
	l, err := d.connected(ctx)
	if err != nil {
		return err
	}
	_, _, err = l.call(ctx, request{Op: opPrepare, Binding: b})
	return err
}

// Send sends the batch in as few frames as it fits into, one after the other. Of a batch with a payload that is too large
// nothing is sent.
func (d *Driver) Send(ctx context.Context, topic string, batch []sdk.Message) error {
	if err := d.tooLarge(batch); err != nil {
		return err
	}
	failed := map[int]error{}
	for from := 0; from < len(batch); {
		to := from + d.fits(batch[from:])
		err := d.sendFrame(ctx, topic, batch[from:to])
		for i, entry := range sdk.EntryErrors(err, to-from) {
			if entry != nil {
				failed[from+i] = entry
			}
		}
		if from = to; err != nil { // what follows must not overtake what failed
			for i := from; i < len(batch); i++ {
				failed[i] = &sdk.OutcomeError{Kind: sdk.OutcomeRejected, Err: errors.New("not sent: an earlier part of the batch failed")}
			}
			break
		}
	}
	if len(failed) > 0 {
		return &sdk.BatchError{Entries: failed}
	}
	return nil
}

// tooLarge refuses a whole batch if one payload in it is too large.
func (d *Driver) tooLarge(batch []sdk.Message) error {
	bad := func(m sdk.Message) bool {
		return len(m.Payload) > d.caps.MaxPayload || size(m) > d.limit-frameOverhead/2
	}
	if !slices.ContainsFunc(batch, bad) {
		return nil
	}
	be := &sdk.BatchError{Entries: map[int]error{}}
	for i, m := range batch {
		be.Entries[i] = &sdk.OutcomeError{Kind: sdk.OutcomeRejected, Err: errors.New("not sent: a payload of the batch is too large")}
		if bad(m) {
			be.Entries[i] = &sdk.OutcomeError{Kind: sdk.OutcomePermanent, Err: sdk.ErrTooLarge}
		}
	}
	return be
}

// fits tells how many messages go into one frame; at least one.
func (d *Driver) fits(batch []sdk.Message) int {
	room, n := d.limit/2, 0
	for n < len(batch) && (n == 0 || room >= size(batch[n])) {
		room -= size(batch[n])
		n++
	}
	return n
}

func (d *Driver) sendFrame(ctx context.Context, topic string, batch []sdk.Message) error {
	l, err := d.connected(ctx)
	sent := false
	if err == nil {
		_, sent, err = l.call(ctx, request{Op: opSend, Topic: topic, Messages: batch})
	}
	if err == nil || sdk.OutcomeOf(err) != sdk.OutcomeUnknown || answered(err) {
		return err
	}
	kind := sdk.OutcomeRejected
	if sent {
		kind = sdk.OutcomeUnknown
	}
	return every(len(batch), &sdk.OutcomeError{Kind: kind, Err: err})
}

// answered tells whether an error came from the parent.
func answered(err error) bool {
	_, remote := errors.AsType[*remoteError](err)
	_, batch := errors.AsType[*sdk.BatchError](err)
	return remote || batch
}

// every makes one error speak for all entries of a batch.
func every(n int, err error) error {
	be := &sdk.BatchError{Entries: make(map[int]error, n)}
	for i := range n {
		be.Entries[i] = err
	}
	return be
}

// Open opens a source over the present connection.
func (d *Driver) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	l, err := d.connected(ctx)
	if err != nil {
		return nil, err
	}
	res, _, err := l.call(ctx, request{Op: opOpen, Binding: b})
	if err != nil {
		return nil, err
	}
	return newSource(l, res), nil
}

// Close says goodbye, so that unsettled deliveries are back at the broker when it returns, and closes the connection in
// any case. Without an answer it returns the context's error. Calls beside and after the first wait for it and return nil.
func (d *Driver) Close(ctx context.Context) error {
	d.mu.Lock()
	l, second := d.link, d.closed
	d.closed = true
	d.mu.Unlock()
	if second {
		select {
		case <-d.over:
		case <-ctx.Done():
		}
		return nil
	}
	defer close(d.over)
	if l == nil {
		return nil
	}
	_, _, err := l.call(ctx, request{Op: opBye})
	l.wire.fail(sdk.ErrClosed)
	l.group.Wait() // ends at once: the connection is closed
	if ctx.Err() != nil && err != nil {
		return fmt.Errorf("closing pipe driver: %w", err)
	}
	return nil // a connection that was lost before has nothing to be closed
}

// connected gives the living connection, or dials.
func (d *Driver) connected(ctx context.Context) (*link, error) {
	if l, err := d.living(); l != nil || err != nil {
		return l, err
	}
	select {
	case d.dialing <- struct{}{}:
		defer func() { <-d.dialing }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if l, err := d.living(); l != nil || err != nil { // someone else dialled meanwhile
		return l, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	conn, err := d.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("dialling the parent: %w", err)
	}
	l := newLink(conn, d.limit)
	res, _, err := l.call(ctx, request{Op: opHello})
	if err == nil {
		l.caps = res.Capabilities
		l.caps.MaxPayload = fitting(l.caps.MaxPayload, d.limit)
		err = d.adopt(l)
	}
	if err != nil {
		l.wire.fail(err)
		l.group.Wait()
		return nil, fmt.Errorf("greeting the parent: %w", err)
	}
	return l, nil
}

// fitting is the payload limit that is declared: the broker's own, or less where a frame would not take it.
func fitting(broker, limit int) int {
	most := limit - frameOverhead
	if broker > 0 {
		return min(broker, most)
	}
	return most
}

func (d *Driver) living() (*link, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, sdk.ErrClosed
	}
	if d.link == nil || d.link.isDead() {
		return nil, nil
	}
	return d.link, nil
}

func (d *Driver) adopt(l *link) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return sdk.ErrClosed
	}
	d.link = l
	return nil
}

// link is one connection on the child's side.
type link struct {
	wire  *wire
	caps  sdk.Capabilities
	group sync.WaitGroup

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan response
}

func newLink(conn io.ReadWriteCloser, limit int) *link {
	l := &link{wire: newWire(conn, limit), waiting: map[uint64]chan response{}}
	l.group.Go(l.wire.write)
	l.group.Go(l.read)
	return l
}

func (l *link) isDead() bool {
	select {
	case <-l.wire.dead:
		return true
	default:
		return false
	}
}

// read hands answers to those who wait for them. An answer nobody waits for is dropped.
func (l *link) read() {
	for {
		var res response
		if err := l.wire.receive(&res); err != nil {
			l.wire.fail(fmt.Errorf("%w: %w", errLost, err))
			return
		}
		l.mu.Lock()
		ch := l.waiting[res.ID]
		delete(l.waiting, res.ID)
		l.mu.Unlock()
		if ch != nil {
			ch <- res // has room for the one answer
		}
	}
}

// start sends a request. The answer comes on the channel, unless the link dies or forget is called.
func (l *link) start(ctx context.Context, req request) (<-chan response, func(), error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	ch := make(chan response, 1)
	l.mu.Lock()
	l.last++
	req.ID = l.last
	l.waiting[req.ID] = ch
	l.mu.Unlock()
	forget := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.waiting, req.ID)
	}
	if err := l.wire.send(ctx, req); err != nil {
		forget()
		return nil, nil, err
	}
	return ch, forget, nil
}

// call sends a request and waits for its answer. sent tells whether the request may have reached the parent.
func (l *link) call(ctx context.Context, req request) (res response, sent bool, err error) {
	if deadline, ok := ctx.Deadline(); ok {
		req.Timeout = max(time.Until(deadline), 1)
	}
	answer, forget, err := l.start(ctx, req)
	if err != nil {
		return response{}, false, err
	}
	select {
	case res = <-answer:
		return res, true, res.Err.decode()
	case <-ctx.Done():
		err = ctx.Err()
	case <-l.wire.dead:
		err = l.wire.err
	}
	select { // an answer that came together with the end counts
	case res = <-answer:
		return res, true, res.Err.decode()
	default:
		forget()
		return response{}, true, err
	}
}
