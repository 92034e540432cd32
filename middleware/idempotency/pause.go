package idempotency

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/sdk"
)

// patience is how long one delivery waits in memory for a database that is away.
const patience = 2 * time.Second

// gate stops the flow while the database is away. One message at a time probes: it goes through the whole flow, and what
// becomes of it tells whether the others may follow. Nobody who waits here holds a transaction or a lane.
type gate struct {
	paused atomic.Bool // a copy of !since.IsZero(), for the way through an open gate

	mu      sync.Mutex
	since   time.Time // zero: open
	reason  string
	probing bool
	next    time.Time // no probe before
	tries   int
	changed chan struct{} // closed, and replaced, at every change
}

func newGate() *gate { return &gate{changed: make(chan struct{})} }

func (g *gate) backoff() sdk.Backoff {
	return sdk.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}
}

// admit returns at once while the database is there. While it is away it waits until it is back, or until this message
// may probe (probing is true, and probed must be called), until the time that until gives, or the end of ctx.
func (g *gate) admit(ctx context.Context, until func() time.Time) (probing bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if !g.paused.Load() {
		return false, nil
	}
	deadline := until()
	for {
		wait, changed, answer := g.ask()
		switch answer {
		case gateOpen:
			return false, nil
		case gateProbe:
			return true, nil
		}
		left := time.Until(deadline)
		if left <= 0 {
			return false, g.away()
		}
		timer := time.NewTimer(min(wait, left))
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return false, ctx.Err()
		}
		timer.Stop()
	}
}

type gateAnswer uint8

const (
	gateWait gateAnswer = iota
	gateOpen
	gateProbe
)

// ask tells whether to pass, to probe, or how long to wait for a change.
func (g *gate) ask() (wait time.Duration, changed <-chan struct{}, answer gateAnswer) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.since.IsZero() {
		return 0, nil, gateOpen
	}
	if g.probing {
		return patience, g.changed, gateWait
	}
	if wait = time.Until(g.next); wait > 0 {
		return wait, g.changed, gateWait
	}
	g.probing = true
	return 0, nil, gateProbe
}

// close notes that the database is away. It tells whether the gate was open before.
func (g *gate) close(reason string) (was bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if was = g.since.IsZero(); was {
		g.since, g.tries = now, 0
		g.paused.Store(true)
	}
	g.reason = reason
	if was || g.probing {
		g.tries++
		g.next = now.Add(g.backoff().Delay(g.tries))
	}
	g.wake()
	return was
}

// open notes that the database answers. It tells how long it was away, 0 where the gate was open.
func (g *gate) open() time.Duration {
	if !g.paused.Load() {
		return 0
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.since.IsZero() {
		return 0
	}
	away := time.Since(g.since)
	g.since, g.reason = time.Time{}, ""
	g.paused.Store(false)
	g.wake()
	return max(away, 1)
}

// probed gives the right to probe back.
func (g *gate) probed() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.probing = false
	g.wake()
}

// wake wants the lock held.
func (g *gate) wake() {
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *gate) state() (since time.Time, reason string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.since, g.reason
}

// away is the error of a message that waited long enough.
func (g *gate) away() error {
	since, reason := g.state()
	if since.IsZero() {
		return ErrDatabaseAway
	}
	return fmt.Errorf("%w since %s: %s", ErrDatabaseAway, since.Format(time.RFC3339), reason)
}

// untilPatience starts a message's patience the first time it is asked. One with an order key has none: while it waits it
// has no place in a queue, so that later ones could overtake it; Ordered holds it instead.
func (p *pending[T]) untilPatience() time.Time {
	if p.ticket != nil {
		return time.Time{}
	}
	if p.patience.IsZero() {
		p.patience = time.Now().Add(patience)
	}
	return p.patience
}

// awaitDatabase follows a round that found the database away: the message tries again after a moment, as long as its
// patience lasts.
func (m *Middleware[T]) awaitDatabase(p *pending[T], cause error) error {
	p.outages++
	until := p.untilPatience()
	pause(p.ctx, min(m.gate.backoff().Delay(p.outages), time.Until(until)))
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if time.Now().Before(until) {
		return nil
	}
	err := fmt.Errorf("%w: %w", ErrDatabaseAway, cause)
	m.requeueLater(p, err)
	return err
}

// requeueLater asks the engine not to bring the message back while the database is likely to be still away.
func (m *Middleware[T]) requeueLater(p *pending[T], err error) {
	delay := sdk.Backoff{Min: time.Second, Max: 5 * time.Second}.Delay(2)
	switch {
	case p.ctx.Err() != nil:
		return
	case p.ticket != nil:
		p.ticket.after(delay)
	case p.delivery != nil:
		p.delivery.RequeueAfter(delay)
	default:
		return
	}
	m.log.Debug("Requeueing a message until the database is back", m.fields(p).Add(watermill.LogFields{"reason": err.Error()}))
}

func (m *Middleware[T]) databaseAway(err error) {
	if !m.gate.close(brief(err.Error(), 300)) {
		return
	}
	m.counters.outages.Add(1)
	m.log.Error("The database is away: pausing; nothing is charged or diverted", err, nil)
}

func (m *Middleware[T]) databaseBack() {
	if away := m.gate.open(); away > 0 {
		m.log.Info("The database is back: resuming", watermill.LogFields{"away": away.String()})
	}
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
