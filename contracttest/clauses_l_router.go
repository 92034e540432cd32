package contracttest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/plugin"

	"github.com/penstock-mq/penstock/sdk"
)

// shutdownLead is how long a shutdown gets to begin before the handler in flight goes on.
const shutdownLead = 20 * time.Millisecond

// mill is a router with one handler that waits, in the middle of its work, until it is released.
type mill struct {
	*engine
	router  *message.Router
	handler *message.Handler
	out     *bench // where outputs go
	entered chan string
	release chan struct{}
	ended   chan error
	runs    atomic.Int64
}

// mill sets one up that consumes from sub; nil: from the engine's own. It is not running yet.
func (e *Env) mill(ctx context.Context, sub message.Subscriber) (*mill, error) {
	g, err := e.engine(ctx, 1, func(cfg *sdk.SubscriberConfig) { cfg.DrainTimeout = e.h.Patience / 2 })
	if err != nil {
		return nil, err
	}
	if sub == nil {
		sub = g.sub
	}
	out := &bench{e: e, d: g.d, topic: e.fresh("out"), group: g.group}
	if err := out.prepare(ctx); err != nil {
		return nil, err
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: e.h.Patience}, watermill.NopLogger{})
	if err != nil {
		return nil, fmt.Errorf("making a router: %w", err)
	}
	m := &mill{
		engine: g, router: router, out: out,
		entered: make(chan string, 100), release: make(chan struct{}), ended: make(chan error, 1),
	}
	m.handler = router.AddHandler("grind", g.topic, sub, out.topic, g.pub, m.grind)
	e.atEnd(router.Close)
	return m, nil
}

// grind answers each message with one that has the same identity and payload.
func (m *mill) grind(msg *message.Message) ([]*message.Message, error) {
	m.runs.Add(1)
	m.entered <- msg.UUID
	<-m.release
	return message.Messages{message.NewMessage(msg.UUID, msg.Payload)}, nil
}

// run starts the router with f and waits until a first message is in the handler. It returns what was sent.
func (m *mill) run(ctx context.Context, f func() error) ([]sdk.Message, error) {
	go func() { m.ended <- f() }()
	select {
	case <-m.router.Running():
	case err := <-m.ended:
		return nil, fmt.Errorf("the router did not start: %w", orNil(err))
	}
	msgs, err := m.send(ctx, 2)
	if err != nil {
		return nil, err
	}
	return msgs, m.inHandler(ctx)
}

func (m *mill) inHandler(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.e.h.Patience)
	defer cancel()
	select {
	case <-m.entered:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for a message in the handler: %w", ctx.Err())
	}
}

// shutdown stops the mill by stop while a message is in its handler, lets the handler go on after the shutdown has begun,
// and fails unless the output is there, the message is gone, and the other one is not lost.
func (m *mill) shutdown(ctx context.Context, msgs []sdk.Message, stop func() error) error {
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	_ = pause(ctx, shutdownLead)
	close(m.release)
	err := m.e.prompt(ctx, "the shutdown", m.e.h.Patience, func(context.Context) error { return <-stopped })
	if err != nil {
		return err
	}
	err = m.e.prompt(ctx, "the router", m.e.h.Patience, func(context.Context) error { return errors.Join(m.router.Close(), <-m.ended) })
	if err != nil {
		return fmt.Errorf("ending the router: %w", err)
	}
	return m.counted(ctx, msgs)
}

// counted fails unless every message that was handled has its output and is gone, and every other one is still there.
func (m *mill) counted(ctx context.Context, msgs []sdk.Message) error {
	handled := int(m.runs.Load())
	if handled < 1 || handled > len(msgs) {
		return fmt.Errorf("the handler ran %d times for %d messages", handled, len(msgs))
	}
	outputs, err := m.out.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := outputs.take(ctx, handled)
	if err != nil {
		return fmt.Errorf("the output of what was in flight: %w", err)
	}
	if err := exactly(got, msgs[:handled]...); err != nil {
		return fmt.Errorf("outputs: %w", err)
	}
	if err := m.sub.Close(); err != nil { // it may be open after Handler.Stop and Router.Close
		return err
	}
	left, err := m.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	rest, err := left.fence(ctx)
	if err != nil {
		return err
	}
	if err := exactly(rest, msgs[handled:]...); err != nil {
		return fmt.Errorf("%d of %d messages were handled, still in the group: %w", handled, len(msgs), err)
	}
	return nil
}

func checkL04Router(ctx context.Context, e *Env) error {
	m, err := e.mill(ctx, nil)
	if err != nil {
		return err
	}
	msgs, err := m.run(ctx, func() error { return m.router.Run(context.WithoutCancel(ctx)) })
	if err != nil {
		return err
	}
	return m.shutdown(ctx, msgs, m.router.Close)
}

func checkL04Handler(ctx context.Context, e *Env) error {
	m, err := e.mill(ctx, nil)
	if err != nil {
		return err
	}
	msgs, err := m.run(ctx, func() error { return m.router.Run(context.WithoutCancel(ctx)) })
	if err != nil {
		return err
	}
	return m.shutdown(ctx, msgs, func() error {
		m.handler.Stop()
		<-m.handler.Stopped()
		return nil
	})
}

func checkL04Run(ctx context.Context, e *Env) error {
	m, err := e.mill(ctx, nil)
	if err != nil {
		return err
	}
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	msgs, err := m.run(ctx, func() error { return sdk.Run(own, m.router, m.sub) })
	if err != nil {
		return err
	}
	return m.shutdown(ctx, msgs, func() error { cancel(); return nil })
}

func checkL04Signal(ctx context.Context, e *Env) error {
	m, err := e.mill(ctx, nil)
	if err != nil {
		return err
	}
	m.router.AddPlugin(plugin.SignalsHandler)
	msgs, err := m.run(ctx, func() error { return m.router.Run(context.WithoutCancel(ctx)) })
	if err != nil {
		return err
	}
	return m.shutdown(ctx, msgs, func() error {
		if err := e.h.Signal(ctx); err != nil {
			return fmt.Errorf("hook Signal: %w", err)
		}
		return e.eventually(ctx, func() error {
			if !m.router.IsClosed() {
				return errors.New("the router did not close on the signal")
			}
			return nil
		})
	})
}

func checkL04Stop(ctx context.Context, e *Env) error {
	g, err := e.engine(ctx, 1, func(cfg *sdk.SubscriberConfig) { cfg.DrainTimeout = e.h.Patience / 2 })
	if err != nil {
		return err
	}
	ch, err := g.subscribe(ctx)
	if err != nil {
		return err
	}
	sent, err := g.send(ctx, 1)
	if err != nil {
		return err
	}
	msg, err := e.next(ctx, ch)
	if err != nil {
		return err
	}
	stopped := make(chan error, 1)
	go func() { stopped <- g.sub.Stop(ctx) }()
	_ = pause(ctx, shutdownLead)
	select {
	case _, open := <-ch:
		return fmt.Errorf("the output channel hands out or closes (open %t) while a message is in flight", open)
	case err := <-stopped:
		return fmt.Errorf("Stop returned %w while a message is in flight", orNil(err))
	default:
	}
	if err := msg.Context().Err(); err != nil {
		return fmt.Errorf("Stop ends the context of what is in flight: %w", err)
	}
	if err := g.pub.Publish(g.topic+"-out", message.NewMessage(msg.UUID, nil)); err != nil && !errors.Is(err, sdk.ErrUnroutable) {
		return fmt.Errorf("publishing during Stop: %w", err)
	}
	msg.Ack()
	if err := e.closed(ctx, ch); err != nil {
		return err
	}
	// The channel closes last: the ack has arrived by now, and nobody waits for it here.
	if e.h.Unsettled != nil {
		left, err := e.h.Unsettled(ctx, g.topic, g.group)
		if err != nil {
			return fmt.Errorf("hook Unsettled: %w", err)
		}
		if left != 0 {
			return fmt.Errorf("the output channel is closed, and the broker counts %d unsettled", left)
		}
	}
	return errors.Join(<-stopped, g.acknowledged(ctx, sent...))
}

// foreign is a subscriber as other libraries have them: it hands out a message again as soon as it is nacked.
type foreign struct {
	in    chan *message.Message
	acked chan string
	nacks atomic.Int64
}

// Subscribe hands out what is put into in, one message at a time, until ctx is done.
func (f *foreign) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for {
			select {
			case msg := <-f.in:
				f.deliver(ctx, out, msg)
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func (f *foreign) deliver(ctx context.Context, out chan<- *message.Message, msg *message.Message) {
	for {
		copied := msg.Copy()
		select {
		case out <- copied:
		case <-ctx.Done():
			return
		}
		select {
		case <-copied.Acked():
			f.acked <- copied.UUID
			return
		case <-copied.Nacked():
			f.nacks.Add(1)
		case <-ctx.Done():
			return
		}
	}
}

// Close does nothing: its subscriptions end with their contexts.
func (f *foreign) Close() error { return nil }

func checkL06(ctx context.Context, e *Env) error {
	f := &foreign{in: make(chan *message.Message, 10), acked: make(chan string, 10)}
	m, err := e.mill(ctx, f)
	if err != nil {
		return err
	}
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { m.ended <- sdk.Run(own, m.router) }()
	msgs := m.messages(2)
	for _, msg := range msgs {
		f.in <- message.NewMessage(msg.ID, msg.Payload)
	}
	if err := m.inHandler(ctx); err != nil {
		return err
	}
	cancel()
	_ = pause(ctx, shutdownLead)
	close(m.release)
	if err := e.prompt(ctx, "sdk.Run", e.h.Patience, func(context.Context) error { return <-m.ended }); err != nil {
		return err
	}
	outputs, err := m.out.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := outputs.fence(ctx)
	if err != nil {
		return err
	}
	if err := exactly(got, msgs[0]); err != nil {
		return fmt.Errorf("the output of what was in flight: %w", err)
	}
	if n := f.nacks.Load(); n > 0 {
		return fmt.Errorf("%d nacks during the shutdown", n)
	}
	select {
	case id := <-f.acked:
		if id != msgs[0].ID {
			return fmt.Errorf("message %s is acked, want %s", id, msgs[0].ID)
		}
		return nil
	default:
		return errors.New("what was in flight is not acked when sdk.Run returns")
	}
}
