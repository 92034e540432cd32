package idempotency

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

const (
	// relayGrace is how old an unsent output must be before the relay sends it: its committer comes first.
	relayGrace = 5 * time.Second
	// relayIdle bounds the jittered wait between two looks.
	relayIdle = 2 * time.Second
	// relayPage is the most outputs looked at in one go; it grows to relayPageMax where a topic that cannot be published
	// to fills the page, so that others are reached behind it.
	relayPage    = 100
	relayPageMax = 1600
	// maxNudges is the most receipts that wait to be looked at out of turn. More are dropped: the next look finds them.
	maxNudges = 256
)

// receiptRef names a receipt whose outputs could not be published.
type receiptRef struct{ scope, key string }

// nudge asks the relay to look at one receipt soon.
func (m *Middleware[T]) nudge(ref receiptRef) {
	select {
	case m.nudges <- ref:
	default:
	}
}

// Run sends stored outputs of this consumer that their committer did not send: because it died, or because Config.Outputs failed. It looks
// for them now and then, oldest first, backs off while publishing fails, and returns nil when ctx is done. It blocks until
// then, also where there is nothing to send through. In every consumer process that has Config.Outputs, one Run should be
// going as long as the router runs; several processes may each run one. A second Run of one middleware at the same time
// is refused with ErrRelayRunning. Outputs may be sent twice, with the same ids.
func (m *Middleware[T]) Run(ctx context.Context) error {
	if !m.relaying.CompareAndSwap(false, true) {
		return ErrRelayRunning
	}
	defer m.relaying.Store(false)
	if m.cfg.Outputs == nil {
		<-ctx.Done()
		return nil
	}
	r := relay[T]{m: m, page: relayPage}
	for ctx.Err() == nil {
		more, ok := r.look(ctx)
		if !more || !ok {
			r.rest(ctx, ok)
		}
	}
	return nil
}

// relay is the state of one Run.
type relay[T any] struct {
	m      *Middleware[T]
	page   int
	failed int // looks in a row that failed
}

// look sends one page of outputs. ok: nothing failed. more: there is reason to look again at once.
func (r *relay[T]) look(ctx context.Context) (more, ok bool) {
	outputs, err := r.m.store.Unsent(ctx, receipts.UnsentQuery{
		Limit: r.page, Before: time.Now().Add(-relayGrace), Prefix: r.m.scopePrefix(),
	})
	if err != nil {
		if ctx.Err() == nil {
			r.m.log.Error("The relay cannot look for unsent outputs", err, nil)
		}
		return false, false
	}
	full := len(outputs) == r.page
	mine, ids := r.m.ownAll(slices.DeleteFunc(outputs, func(o receipts.Output) bool { return !r.m.mine(o.Scope) }))
	sent, unsent := r.m.send(mine, ids...)
	page := r.page
	r.page = relayPage
	if full && sent == 0 {
		r.page = min(2*page, relayPageMax)
	}
	return full && sent > 0, unsent == 0
}

// rest waits until the next look is due, and sees to the receipts it is nudged about meanwhile.
func (r *relay[T]) rest(ctx context.Context, ok bool) {
	wait := sdk.Backoff{Min: relayIdle / 2, Max: relayIdle}.Delay(1)
	if ok {
		r.failed = 0
	} else {
		r.failed++
		wait = sdk.Backoff{Min: 100 * time.Millisecond, Max: 30 * time.Second}.Delay(r.failed)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case ref := <-r.m.nudges:
		pause(ctx, 100*time.Millisecond) // what failed a moment ago
		if ctx.Err() == nil {
			r.m.sendUnsent(ctx, ref, relayPage) // without waiting until they are old; where it fails, looks find them
		}
	}
}

// scopePrefix is what this consumer's scopes begin with.
func (m *Middleware[T]) scopePrefix() string {
	if m.cfg.Scope != "" {
		return string(appendPart(nil, m.cfg.Scope))
	}
	return string(appendPart(nil, m.cfg.Consumer))
}

// mine tells whether a scope is one of this consumer's: another one over the same tables has a publisher of its own. A
// configured Scope is the whole of it, though the scopes of a consumer of that name begin alike.
func (m *Middleware[T]) mine(scope string) bool {
	if m.cfg.Scope != "" {
		return scope == m.scopePrefix()
	}
	return strings.HasPrefix(scope, m.scopePrefix())
}
