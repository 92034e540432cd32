package sdk

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Run runs a router until it ends by itself or ctx is done; then it shuts down in the order that loses nothing:
//
//  1. The router goes on running: its context is detached from ctx.
//  2. All subscribers stop: no more intake, what was handed out is settled, outputs are published.
//  3. Messages that foreign subscribers hand over from now on are parked: read, neither acked nor nacked, never handled.
//     Their broker hands them out again. Those being handled are waited for.
//  4. When nothing is in flight, or the longest DrainTimeout is over, the router closes, and with it its publishers.
//
// The subscribers are those of this package that the router's handlers use; one that is left out goes on taking messages
// until the router closes. Handlers that start later, by RunHandlers, are covered, too. After Run the subscribers are
// stopped for good, drivers are open. It must be called instead of [message.Router.Run], once, before the router runs: it adds a subscriber decorator,
// the outermost. Under Run also Handler.Stop and a plain Router.Close wait for messages of foreign subscribers.
//
// It returns the router's error, joined with those of subscribers that did not stop in time or whose driver was closed
// under them; nil after an orderly end, also where ctx was done before the router was up.
func Run(ctx context.Context, router *message.Router, subs ...*Subscriber) error {
	if router == nil {
		return errors.New("run: the router is nil")
	}
	p := newParking(subs)
	router.AddSubscriberDecorators(p.decorate)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.WithoutCancel(ctx)) }()
	select {
	case err := <-ended:
		return errors.Join(err, p.stopAll(), p.endings())
	case <-ctx.Done():
	}
	p.park()
	stopped := make(chan error, 1)
	go func() { stopped <- p.stopAll() }()
	select {
	case err := <-ended:
		if errors.Is(err, ErrClosed) { // it was still starting, and its subscribers were closed, as ctx asked
			err = nil
		}
		return errors.Join(err, <-stopped)
	case <-router.Running():
	}
	p.waitIdle()
	stopErr := <-stopped
	closeErr := router.Close()
	return errors.Join(<-ended, closeErr, stopErr)
}

// parking is what Run knows about the subscriptions of its router.
type parking struct {
	parked   chan struct{} // closed by park
	parkOnce sync.Once
	timeout  time.Duration

	subs []*Subscriber

	mu   sync.Mutex
	lots map[*lot]struct{} // guarded by mu
}

func newParking(subs []*Subscriber) *parking {
	p := &parking{
		parked:  make(chan struct{}),
		timeout: DefaultDrainTimeout,
		lots:    map[*lot]struct{}{},
	}
	for _, s := range subs {
		if s != nil {
			p.subs = append(p.subs, s)
			p.timeout = max(p.timeout, s.cfg.DrainTimeout)
		}
	}
	return p
}

// park makes all lots stop passing on foreign messages.
func (p *parking) park() { p.parkOnce.Do(func() { close(p.parked) }) }

// stopAll closes the subscribers that Run was given and waits for them.
func (p *parking) stopAll() error {
	errs := make([]error, len(p.subs))
	var wg sync.WaitGroup
	for i, s := range p.subs {
		wg.Go(func() { errs[i] = s.Close() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// endings tells why subscriptions ended that nobody ended.
func (p *parking) endings() error {
	errs := make([]error, len(p.subs))
	for i, s := range p.subs {
		errs[i] = s.ending()
	}
	return errors.Join(errs...)
}

// waitIdle waits until every foreign message that was passed on is settled, or the time is over.
func (p *parking) waitIdle() {
	ctx, cancel := context.WithTimeout(context.Background(), p.timeout)
	defer cancel()
	p.mu.Lock()
	lots := make([]*lot, 0, len(p.lots))
	for l := range p.lots {
		lots = append(lots, l)
	}
	p.mu.Unlock()
	for _, l := range lots {
		l.waitIdle(ctx)
	}
}

func (p *parking) forget(l *lot) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.lots, l)
}
