package contracttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/penstock-mq/penstock/sdk"
)

// Env is what one run of one clause works with: fresh names, drivers that are closed at its end, and bounded waiting.
type Env struct {
	h      Harness
	clause string
	run    string // random, so that runs on one broker do not meet
	names  atomic.Int64

	mu     sync.Mutex
	opened []sdk.Driver
	ending []func() error
	notes  []string
}

func newEnv(h Harness, clause string) *Env {
	run := watermill.NewUUID()[:8]
	return &Env{h: h, clause: strings.ToLower(strings.ReplaceAll(clause, "/", "-")), run: run}
}

// fresh gives a name that no other topic or group of any run has.
func (e *Env) fresh(kind string) string {
	return fmt.Sprintf("%s-%s-%s-%d", kind, e.clause, e.run, e.names.Add(1))
}

// messageID gives a new identity, shaped like a UUID; its last digits count up, which makes failures readable.
func (e *Env) messageID() string {
	return fmt.Sprintf("%s-0000-4000-8000-%012d", e.run, e.names.Add(1))
}

// driver opens a driver on the harness's broker; it is closed when the clause ends.
func (e *Env) driver(ctx context.Context) (sdk.Driver, error) {
	d, err := e.h.Open(ctx)
	if err != nil {
		return nil, fmt.Errorf("opening a driver: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.opened = append(e.opened, d)
	return d, nil
}

// atEnd registers what has to be done before the drivers are closed, the last registered first.
func (e *Env) atEnd(f func() error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ending = append(e.ending, f)
}

// note records something that was declared and not observed; the report shows it.
func (e *Env) note(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.notes = append(e.notes, fmt.Sprintf(format, args...))
}

func (e *Env) noted() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.notes)
}

// close ends what the clause left open. An error here is the driver's, and fails the clause.
func (e *Env) close() error {
	e.mu.Lock()
	opened, ending := e.opened, e.ending
	e.opened, e.ending = nil, nil
	e.mu.Unlock()
	var errs []error
	for _, f := range slices.Backward(ending) {
		errs = append(errs, f())
	}
	for _, d := range slices.Backward(opened) {
		ctx, cancel := context.WithTimeout(context.Background(), e.h.Patience)
		if err := d.Close(ctx); err != nil {
			errs = append(errs, fmt.Errorf("closing a driver at the end of the clause: %w", err))
		}
		cancel()
	}
	return errors.Join(errs...)
}

// probe finds what the driver and a source of it declare together: a source may add to its driver.
func (e *Env) probe(ctx context.Context) (sdk.Capabilities, error) {
	ctx, cancel := context.WithTimeout(ctx, e.h.Patience)
	defer cancel()
	b, err := e.bench(ctx)
	if err != nil {
		return sdk.Capabilities{}, fmt.Errorf("asking for capabilities: %w", err)
	}
	m, err := b.open(ctx, 1)
	if err != nil {
		return sdk.Capabilities{}, fmt.Errorf("asking for capabilities: %w", err)
	}
	caps := m.src.Capabilities()
	return caps, e.close()
}

// eventually asks until the answer is nil or patience ends, and returns the last answer.
func (e *Env) eventually(ctx context.Context, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, e.h.Patience)
	defer cancel()
	for wait := pollPause; ; wait = min(2*wait, pollMax) {
		err := ask()
		if err == nil {
			return nil
		}
		if pause(ctx, wait) != nil {
			return fmt.Errorf("after waiting for %s: %w", e.h.Patience, err)
		}
	}
}

// unsettled waits until the broker says that want deliveries of the group are unsettled. Without the hook it is nil.
func (e *Env) unsettled(ctx context.Context, topic, group string, want int) error {
	if e.h.Unsettled == nil {
		return nil
	}
	return e.eventually(ctx, func() error {
		got, err := e.h.Unsettled(ctx, topic, group)
		if err != nil {
			return fmt.Errorf("hook Unsettled: %w", err)
		}
		if got != want {
			return fmt.Errorf("the broker holds %d unsettled deliveries, want %d", got, want)
		}
		return nil
	})
}

// prompt calls f with a context that ends after limit and fails unless f returns soon after that.
func (e *Env) prompt(ctx context.Context, what string, limit time.Duration, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := make(chan error, 1)
	start := time.Now()
	go func() { done <- f(ctx) }()
	timer := time.NewTimer(limit + promptGrace)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		return fmt.Errorf("%s did not return %s after its deadline: %w", what, time.Since(start)-limit, errLate)
	}
}

const (
	pollPause   = 2 * time.Millisecond
	pollMax     = 50 * time.Millisecond
	promptGrace = 2 * time.Second
)

// errLate marks a call that overran its deadline, to tell it from the error of a call that kept it.
var errLate = errors.New("a call has to return soon after its context is done")

// pause waits for d or until ctx is done.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
