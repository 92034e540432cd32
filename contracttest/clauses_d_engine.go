package contracttest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

const (
	textD05 = "a message that is requeued for ever never spins: attempts stay within the backoff schedule, others keep flowing"
	textD12 = "a lost delivery cancels its message's context"
	textD16 = "an undecodable message reaches the poison path once and blocks nobody"
)

// engineClauses are those of letter D about the engine.
func engineClauses() []Clause {
	return []Clause{
		{ID: "D05", Name: "no hot loop", Text: textD05, Check: checkD05},
		{ID: "D12", Name: "lost delivery cancels", Text: textD12, Hooks: []string{"Cut"}, Check: checkD12},
		{ID: "D16", Name: "poison path", Text: textD16, Hooks: []string{"Undecodable"}, Check: checkD16},
		{
			ID: "D16/reject", Name: "poison rejected", Text: textD16, Capability: "reject", Hooks: []string{"Undecodable"},
			Check: checkD16Reject,
		},
	}
}

func checkD05(ctx context.Context, e *Env) error {
	const attempts, others = 8, 30
	g, err := e.engine(ctx, 4, nil)
	if err != nil {
		return err
	}
	ch, err := g.subscribe(ctx)
	if err != nil {
		return err
	}
	bad, err := g.send(ctx, 1)
	if err != nil {
		return err
	}
	var at []time.Time
	good := map[string]bool{}
	for len(at) < attempts {
		msg, err := e.next(ctx, ch)
		if err != nil {
			return fmt.Errorf("after %d attempts of a message that always fails: %w", len(at), err)
		}
		if msg.UUID != bad[0].ID {
			good[msg.UUID] = true
			msg.Ack()
			continue
		}
		at = append(at, time.Now())
		msg.Nack()
		if len(at) == 1 { // they have to flow while the failing one waits
			if _, err := g.send(ctx, others); err != nil {
				return err
			}
		}
	}
	if len(good) != others {
		return fmt.Errorf("%d of %d other messages came in %d attempts of one that always fails", len(good), others, attempts)
	}
	for i, t := range at[1:] {
		if wait := t.Sub(at[i]); wait < engineMin {
			return fmt.Errorf("attempt %d came %s after the one before, the least backoff is %s", i+2, wait, engineMin)
		}
	}
	// Attempt i waits at most its ceiling; the slowness of a busy machine is allowed for once.
	var most time.Duration
	for i := range attempts - 1 {
		most += sdk.Backoff{Min: engineMin, Max: engineMax}.Ceiling(i + 1)
	}
	if took := at[attempts-1].Sub(at[0]); took > most+e.h.Patience/2 {
		return fmt.Errorf("%d attempts took %s, the backoff allows %s", attempts, took, most)
	}
	return nil
}

func checkD12(ctx context.Context, e *Env) error {
	g, err := e.engine(ctx, 1, nil)
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
	if err := msg.Context().Err(); err != nil {
		return fmt.Errorf("the context is over before the delivery is lost: %w", err)
	}
	if err := e.h.Cut(ctx); err != nil {
		return fmt.Errorf("hook Cut: %w", err)
	}
	limit, cancel := context.WithTimeout(ctx, e.h.Patience)
	defer cancel()
	select {
	case <-msg.Context().Done():
	case <-limit.Done():
		return errors.New("the connection was cut, and the message's context goes on")
	}
	if cause := context.Cause(msg.Context()); !errors.Is(cause, sdk.ErrDeliveryLost) {
		return fmt.Errorf("the cause of the cancelled context is %w, want ErrDeliveryLost", orNil(cause))
	}
	msg.Ack() // of the lost delivery: it must not settle the new one
	again, err := e.next(ctx, ch)
	if err != nil {
		return err
	}
	if again.UUID != sent[0].ID {
		return fmt.Errorf("message %s came, want the lost %s again", again.UUID, sent[0].ID)
	}
	again.Ack()
	return errors.Join(g.sub.Close(), g.acknowledged(ctx, sent...))
}

func checkD16(ctx context.Context, e *Env) error {
	raw := "not what the driver writes\x00\xff"
	var poisoned atomic.Int64
	wrong := make(chan error, 10)
	g, err := e.engine(ctx, 1, func(cfg *sdk.SubscriberConfig) {
		cfg.Poison = func(_ context.Context, d sdk.Delivery) error {
			poisoned.Add(1)
			if d.Err == nil || string(d.Payload) != raw {
				wrong <- fmt.Errorf("Poison got %d bytes and error %w", len(d.Payload), orNil(d.Err))
			}
			return nil
		}
	})
	if err != nil {
		return err
	}
	if err := g.around(ctx, []byte(raw)); err != nil {
		return err
	}
	if err := e.eventually(ctx, func() error { return g.poisonedOnce(poisoned.Load()) }); err != nil {
		return err
	}
	if err := g.sub.Close(); err != nil {
		return err
	}
	if err := errors.Join(g.noPoison(ctx), g.poisonedOnce(poisoned.Load())); err != nil {
		return err
	}
	select {
	case err := <-wrong:
		return err
	default:
		return nil
	}
}

// around sends a good message, the raw bytes and another good message, and takes both good ones.
func (g *engine) around(ctx context.Context, raw []byte) error {
	ch, err := g.subscribe(ctx)
	if err != nil {
		return err
	}
	good := g.messages(2)
	if err := g.sendAll(ctx, good[0]); err != nil {
		return err
	}
	if err := g.e.h.Undecodable(ctx, g.topic, raw); err != nil {
		return fmt.Errorf("hook Undecodable: %w", err)
	}
	if err := g.sendAll(ctx, good[1]); err != nil {
		return err
	}
	for _, want := range good {
		msg, err := g.e.next(ctx, ch)
		if err != nil {
			return fmt.Errorf("a good message beside an undecodable one: %w", err)
		}
		if msg.UUID != want.ID {
			return fmt.Errorf("message %q came beside an undecodable one, want %s", msg.UUID, want.ID)
		}
		msg.Ack()
	}
	return nil
}

func (g *engine) poisonedOnce(n int64) error {
	if n != 1 {
		return fmt.Errorf("Poison was called %d times, want once", n)
	}
	return nil
}

// noPoison fails if something undecodable is still in the group.
func (g *engine) noPoison(ctx context.Context) error {
	m, err := g.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err != nil {
		return err
	}
	for _, d := range got {
		if d.Err != nil {
			return errors.New("the undecodable message is still in the group")
		}
	}
	return m.close(ctx)
}

func checkD16Reject(ctx context.Context, e *Env) error {
	g, err := e.engine(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := g.around(ctx, []byte{0xff}); err != nil {
		return err
	}
	if err := g.sub.Close(); err != nil {
		return err
	}
	return g.noPoison(ctx)
}
