package contracttest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

const (
	textL01 = "Close: idempotent, from ten goroutines at once, bounded in time, output channel closed"
	textL02 = "cancelling the Subscribe context ends the subscription even when nobody reads the channel"
	textL03 = "no goroutine, connection, file or process left after Close"
	textL04 = "Stop, plain Router.Close, SignalsHandler and Handler.Stop: what was in flight can still publish outputs and be acked, and both count; the output channel closes last"
	textL05 = "publish to the topic being handled, from inside the handler, does not deadlock"
	textL06 = "a foreign subscriber under sdk.Run: the same as L04; nothing is nacked in a loop"
)

func lifeClauses() []Clause {
	return []Clause{
		{ID: "L01", Name: "Close of the engine", Text: textL01, Check: checkL01},
		{ID: "L01/driver", Name: "Close of driver and source", Text: textL01, Check: checkL01Driver},
		{ID: "L02", Name: "cancelled and not read", Text: textL02, Capability: "redelivers", Check: checkL02},
		{ID: "L03", Name: "nothing left", Text: textL03, Check: checkL03},
		{ID: "L04/handler", Name: "Handler.Stop", Text: textL04, Check: checkL04Handler},
		{ID: "L04/router", Name: "Router.Close", Text: textL04, Check: checkL04Router},
		{ID: "L04/run", Name: "sdk.Run", Text: textL04, Check: checkL04Run},
		{ID: "L04/signal", Name: "SignalsHandler", Text: textL04, Hooks: []string{"Signal"}, Check: checkL04Signal},
		{ID: "L04/stop", Name: "Stop", Text: textL04, Check: checkL04Stop},
		{ID: "L05", Name: "publish to one's own topic", Text: textL05, Check: checkL05},
		{ID: "L06", Name: "foreign subscriber", Text: textL06, Check: checkL06},
	}
}

// tenTimes calls f from ten goroutines at once, and once more after that.
func (e *Env) tenTimes(ctx context.Context, what string, f func(ctx context.Context) error) error {
	const callers = 10
	errs := make([]error, callers+1)
	var group sync.WaitGroup
	for i := range callers {
		group.Go(func() { errs[i] = e.prompt(ctx, what, e.h.Patience, f) })
	}
	group.Wait()
	errs[callers] = e.prompt(ctx, what+" once more", e.h.Patience, f)
	for _, err := range errs {
		if err != nil {
			return fmt.Errorf("%s from ten goroutines: %w", what, err)
		}
	}
	return nil
}

func checkL01(ctx context.Context, e *Env) error {
	g, err := e.engine(ctx, 4, nil)
	if err != nil {
		return err
	}
	ch, err := g.subscribe(ctx)
	if err != nil {
		return err
	}
	sent, err := g.send(ctx, 8)
	if err != nil {
		return err
	}
	held, err := e.next(ctx, ch) // handed out and never settled: Close has to be bounded all the same
	if err != nil {
		return err
	}
	if err := e.tenTimes(ctx, "Subscriber.Close", func(context.Context) error { return g.sub.Close() }); err != nil {
		return err
	}
	if _, open := <-ch; open {
		return errors.New("after Close the output channel hands out messages")
	}
	if held.Context().Err() == nil {
		return errors.New("after Close the context of a message in flight goes on")
	}
	if _, err := g.sub.Subscribe(ctx, g.topic); !errors.Is(err, sdk.ErrClosed) {
		return fmt.Errorf("Subscribe after Close gave %w, want ErrClosed", orNil(err))
	}
	if err := e.tenTimes(ctx, "Publisher.Close", func(context.Context) error { return g.pub.Close() }); err != nil {
		return err
	}
	if err := g.pub.Publish(g.topic, message.NewMessage("late", nil)); !errors.Is(err, sdk.ErrClosed) {
		return fmt.Errorf("Publish after Close gave %w, want ErrClosed", orNil(err))
	}
	if !g.d.Capabilities().Redelivers {
		return nil
	}
	m, err := g.open(ctx, benchWindow) // the driver stays open, and has everything back
	if err != nil {
		return err
	}
	got, err := m.take(ctx, len(sent))
	if err != nil {
		return err
	}
	return exactly(got, sent...)
}

func checkL01Driver(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	var blocked []chan error
	for range 2 {
		m, err := b.open(ctx, 1)
		if err != nil {
			return err
		}
		ended := make(chan error, 1)
		go func() {
			var err error
			for err == nil {
				_, err = m.src.Receive(ctx, 1)
				if err == nil {
					err = pause(ctx, pollPause)
				}
			}
			ended <- err
		}()
		blocked = append(blocked, ended)
		if len(blocked) == 1 {
			if err := e.tenTimes(ctx, "Source.Close", m.src.Close); err != nil {
				return err
			}
		}
	}
	if err := e.tenTimes(ctx, "Driver.Close", b.d.Close); err != nil {
		return err
	}
	for _, ended := range blocked {
		err := e.prompt(ctx, "a blocked Receive", e.h.Patience, func(context.Context) error {
			return wantClosed("a Receive that was blocked during Close", <-ended)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func checkL02(ctx context.Context, e *Env) error {
	const n, window = 12, 4
	g, err := e.engine(ctx, window, nil)
	if err != nil {
		return err
	}
	sent, err := g.send(ctx, n)
	if err != nil {
		return err
	}
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	ch, err := g.subscribe(own)
	if err != nil {
		return err
	}
	err = e.eventually(ctx, func() error { // until it holds messages that nobody reads
		if got := g.sub.InFlight(); got == 0 {
			return errors.New("the subscription takes nothing")
		}
		return nil
	})
	if err != nil {
		return err
	}
	cancel()
	m, err := g.open(ctx, n)
	if err != nil {
		return err
	}
	got, err := m.take(ctx, n)
	if err != nil {
		return fmt.Errorf("what a cancelled subscription held has to come back: %w", err)
	}
	return errors.Join(exactly(got, sent...), e.closed(ctx, ch))
}

func checkL03(ctx context.Context, e *Env) error {
	before := e.holding()
	if err := e.busyLife(ctx); err != nil {
		return err
	}
	if err := e.close(); err != nil {
		return err
	}
	return e.nothingLeft(ctx, before)
}

// busyLife uses everything once: an engine that is closed with messages in flight, sources that are closed and sources
// that are left to the driver, a Receive that is cut short.
func (e *Env) busyLife(ctx context.Context) error {
	g, err := e.engine(ctx, 4, nil)
	if err != nil {
		return err
	}
	ch, err := g.subscribe(ctx)
	if err != nil {
		return err
	}
	if err := g.pub.Publish(g.topic, message.NewMessage(e.messageID(), []byte("x")), message.NewMessage(e.messageID(), nil)); err != nil {
		return fmt.Errorf("publishing: %w", err)
	}
	msg, err := e.next(ctx, ch)
	if err != nil {
		return err
	}
	msg.Ack()
	other, err := g.another(ctx)
	if err != nil {
		return err
	}
	for i := range 4 {
		m, err := other.open(ctx, 2)
		if err != nil {
			return err
		}
		short, cancel := context.WithTimeout(ctx, pollPause)
		_, _ = m.src.Receive(short, 1) // whatever comes, or nothing
		cancel()
		if i%2 == 0 {
			if err := m.close(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkL05(ctx context.Context, e *Env) error {
	const chain = 6
	g, err := e.engine(ctx, 1, nil)
	if err != nil {
		return err
	}
	ch, err := g.subscribe(ctx)
	if err != nil {
		return err
	}
	first, err := g.send(ctx, 1)
	if err != nil {
		return err
	}
	want := first[0].ID
	for range chain {
		msg, err := e.next(ctx, ch)
		if err != nil {
			return err
		}
		if msg.UUID != want {
			return fmt.Errorf("message %s came, want %s", msg.UUID, want)
		}
		want = e.messageID()
		err = e.prompt(ctx, "Publish inside a handler", e.h.Patience, func(ctx context.Context) error {
			return g.pub.PublishContext(ctx, g.topic, message.NewMessage(want, []byte("next")))
		})
		if err != nil {
			return err
		}
		msg.Ack()
	}
	return nil
}
