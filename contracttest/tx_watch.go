package contracttest

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/penstock-mq/penstock/sdk"
)

// watch is a driver that writes down what passes between engine and broker: the deliveries handed out and the
// settlements asked for. The transaction clauses take it as what the broker saw. It changes nothing unless told to.
type watch struct {
	sdk.Driver
	mu         sync.Mutex
	opened     int
	events     int // numbers deliveries and settlements in one sequence
	deliveries []seenDelivery
	settled    []seenSettlement
	// onAck, where set, runs before an ack is forwarded.
	onAck func(ctx context.Context, id string)
	// onSettle, where set, replaces the forwarding of one Settle.
	onSettle func(ctx context.Context, src sdk.Source, batch []sdk.Settlement) error
	// broken makes every Receive of a source opened before fail.
	broken chan struct{}
}

type seenDelivery struct {
	ID    string
	Token sdk.Token
	at    int
}

type seenSettlement struct {
	at      int
	ID      string
	Verdict sdk.Verdict
}

// errCut is what a source answers whose connection a clause has cut.
var errCut = errors.New("the connection was cut by the clause")

func newWatch(d sdk.Driver) *watch { return &watch{Driver: d, broken: make(chan struct{})} }

// Open opens a source that is watched.
func (w *watch) Open(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
	src, err := w.Driver.Open(ctx, b)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.opened++
	seen := &watchedSource{Source: src, w: w, broken: w.broken}
	return withAbilities(seen, src), nil
}

// cut makes every open source fail at its next Receive, as a lost connection does. The engine opens new ones.
func (w *watch) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.broken)
	w.broken = make(chan struct{})
}

// sources tells how many sources were opened so far.
func (w *watch) sources() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.opened
}

// tokens gives the tokens under which a message was handed out, in order.
func (w *watch) tokens(id string) []sdk.Token {
	w.mu.Lock()
	defer w.mu.Unlock()
	var tokens []sdk.Token
	for _, d := range w.deliveries {
		if d.ID == id {
			tokens = append(tokens, d.Token)
		}
	}
	return tokens
}

// ackCount tells how many acks were asked for of one message.
func (w *watch) ackCount(id string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, s := range w.settled {
		if s.ID == id && s.Verdict == sdk.Ack {
			n++
		}
	}
	return n
}

// overlapped tells whether two deliveries of a message were handed out before the first settlement of either.
func (w *watch) overlapped(id string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := 0
	for _, d := range w.deliveries {
		settledBefore := slices.ContainsFunc(w.settled, func(s seenSettlement) bool { return s.ID == id && s.at < d.at })
		if d.ID == id && !settledBefore {
			out++
		}
	}
	return out >= 2
}

// acked lists the messages that were acked, each once, sorted.
func (w *watch) acked() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var ids []string
	for _, s := range w.settled {
		if s.Verdict == sdk.Ack {
			ids = append(ids, s.ID)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// set changes a hook of the watch.
func (w *watch) set(change func(w *watch)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(w)
}

func (w *watch) handedOut(ds []sdk.Delivery) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range ds {
		w.events++
		w.deliveries = append(w.deliveries, seenDelivery{ID: d.ID, Token: d.Token, at: w.events})
	}
}

// settles writes a batch down, before it is forwarded, and gives the hooks to use.
func (w *watch) settles(batch []sdk.Settlement) (acks []string, onAck func(context.Context, string), onSettle func(context.Context, sdk.Source, []sdk.Settlement) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range batch {
		id := w.owner(s.Token)
		w.events++
		w.settled = append(w.settled, seenSettlement{ID: id, Verdict: s.Verdict, at: w.events})
		if s.Verdict == sdk.Ack {
			acks = append(acks, id)
		}
	}
	return acks, w.onAck, w.onSettle
}

// owner names the message of a token. Tokens are unique over a broker's life.
func (w *watch) owner(t sdk.Token) string {
	for _, d := range w.deliveries {
		if d.Token == t {
			return d.ID
		}
	}
	return ""
}

// watchedSource is one source of a watch.
type watchedSource struct {
	sdk.Source
	w      *watch
	broken <-chan struct{}
}

// Receive forwards and writes down, and fails once the watch was cut.
func (s *watchedSource) Receive(ctx context.Context, limit int) ([]sdk.Delivery, error) {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-s.broken:
			cancel()
		case <-stop:
		}
	}()
	ds, err := s.Source.Receive(inner, limit)
	s.w.handedOut(ds)
	if len(ds) > 0 {
		return ds, err
	}
	select {
	case <-s.broken:
		return nil, errCut
	default:
		return ds, err
	}
}

// Settle writes down and forwards.
func (s *watchedSource) Settle(ctx context.Context, batch []sdk.Settlement) error {
	acks, onAck, onSettle := s.w.settles(batch)
	if onAck != nil {
		for _, id := range acks {
			onAck(ctx, id)
		}
	}
	if onSettle != nil {
		return onSettle(ctx, s.Source, batch)
	}
	return s.Source.Settle(ctx, batch)
}

// withAbilities gives the wrapper the optional interfaces that the wrapped source has, and no others.
func withAbilities(wrapper sdk.Source, src sdk.Source) sdk.Source {
	lease, hasLease := src.(sdk.LeaseExtender)
	barrier, hasBarrier := src.(sdk.Barrier)
	switch {
	case hasLease && hasBarrier:
		return struct {
			sdk.Source
			sdk.LeaseExtender
			sdk.Barrier
		}{wrapper, lease, barrier}
	case hasLease:
		return struct {
			sdk.Source
			sdk.LeaseExtender
		}{wrapper, lease}
	case hasBarrier:
		return struct {
			sdk.Source
			sdk.Barrier
		}{wrapper, barrier}
	default:
		return wrapper
	}
}
