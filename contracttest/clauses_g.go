package contracttest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/penstock-mq/penstock/sdk"
)

const (
	textG01 = "members of one group share: each message once per group"
	textG02 = "each group gets every message"
	textG03 = "a member joins or dies under load: none lost; duplicates only of what was unsettled"
)

func groupClauses() []Clause {
	return []Clause{
		{ID: "G01", Name: "members share", Text: textG01, Check: checkG01},
		{ID: "G02", Name: "every group", Text: textG02, Capability: "groups", Check: checkG02},
		{ID: "G03", Name: "join and leave under load", Text: textG03, Capability: "redelivers", Check: checkG03},
		{
			ID: "G03/kill", Name: "member killed under load", Text: textG03, Capability: "redelivers", Hooks: []string{"KillConsumer"},
			Check: checkG03Kill,
		},
	}
}

// crew is several members of one group that receive and ack at once, and what they saw together.
type crew struct {
	mu    sync.Mutex
	acked map[string]int // confirmed acks by identity
	total int
	enter chan struct{} // closed when all that was wanted is acked
	want  int
	group sync.WaitGroup
	errs  []error
}

func newCrew(want int) *crew {
	return &crew{acked: map[string]int{}, enter: make(chan struct{}), want: want}
}

// work has a member receive and ack until all is acked, quit is closed, or an error comes. It closes the member.
func (c *crew) work(ctx context.Context, m *member, quit <-chan struct{}) {
	ctx, cancel := context.WithTimeout(ctx, m.b.e.h.Patience)
	c.group.Go(func() {
		defer cancel()
		select {
		case <-c.enter:
		case <-quit:
		case <-ctx.Done():
		}
	})
	c.group.Go(func() {
		defer cancel()
		for ctx.Err() == nil {
			if err := c.step(ctx, m); err != nil && ctx.Err() == nil {
				c.fail(err)
				break
			}
		}
		if err := m.close(context.WithoutCancel(ctx)); err != nil {
			c.fail(err)
		}
	})
}

func (c *crew) step(ctx context.Context, m *member) error {
	got, err := m.src.Receive(ctx, 3)
	if err != nil {
		return fmt.Errorf("a member receives: %w", err)
	}
	for i, d := range got {
		if i > 0 && ctx.Err() != nil {
			break // leaves with what is unsettled
		}
		if err := m.ack(context.WithoutCancel(ctx), d); err != nil {
			return err
		}
		c.note(d)
	}
	if len(got) == 0 {
		return pause(ctx, pollPause)
	}
	return nil
}

func (c *crew) note(d sdk.Delivery) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.acked[d.ID]++
	c.total++
	if len(c.acked) == c.want && c.acked[d.ID] == 1 {
		close(c.enter)
	}
}

func (c *crew) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.errs = append(c.errs, err)
}

// wait ends when every member has ended, and fails unless each message was acked exactly once: what was acked and
// confirmed must not have come again, to any member.
func (c *crew) wait(sent []sdk.Message) error {
	c.group.Wait()
	errs := c.errs
	for _, m := range sent {
		if n := c.acked[m.ID]; n != 1 {
			errs = append(errs, fmt.Errorf("message %s was acked %d times, want once", m.ID, n))
		}
		if len(errs) > 3 {
			break
		}
	}
	return errors.Join(errs...)
}

func checkG01(ctx context.Context, e *Env) error {
	const members, n = 3, 90
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	c := newCrew(n)
	for range members {
		m, err := b.open(ctx, 4)
		if err != nil {
			return err
		}
		c.work(ctx, m, nil)
	}
	msgs, err := b.send(ctx, n)
	if err != nil {
		return err
	}
	if err := c.wait(msgs); err != nil {
		return err
	}
	return b.absent(ctx, msgs...)
}

func checkG02(ctx context.Context, e *Env) error {
	first, err := e.bench(ctx)
	if err != nil {
		return err
	}
	second, err := first.inGroup(ctx, e.fresh("g"))
	if err != nil {
		return err
	}
	early, err := first.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	msgs, err := first.send(ctx, 10)
	if err != nil {
		return err
	}
	got, err := early.take(ctx, len(msgs))
	if err != nil {
		return err
	}
	if err := errors.Join(exactly(got, msgs...), early.ack(ctx, got...)); err != nil {
		return err
	}
	late, err := second.open(ctx, benchWindow) // its group was prepared before the messages were sent
	if err != nil {
		return err
	}
	if got, err = late.take(ctx, len(msgs)); err != nil {
		return fmt.Errorf("a group that was prepared, but not open, when the messages were sent: %w", err)
	}
	if err := errors.Join(exactly(got, msgs...), late.ack(ctx, got...), late.close(ctx)); err != nil {
		return err
	}
	return second.absent(ctx, msgs...)
}

func checkG03(ctx context.Context, e *Env) error {
	const n = 300
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	c := newCrew(n)
	var quits []chan struct{}
	var msgs []sdk.Message
	for step := range 10 { // one joins at each step, and the one that joined three steps before leaves
		m, err := b.open(ctx, 8)
		if err != nil {
			return err
		}
		quits = append(quits, make(chan struct{}))
		c.work(ctx, m, quits[step])
		part, err := b.send(ctx, n/10)
		if err != nil {
			return err
		}
		msgs = append(msgs, part...)
		if step >= 3 {
			close(quits[step-3])
		}
	}
	return c.wait(msgs)
}

func checkG03Kill(ctx context.Context, e *Env) error {
	const n, kills = 120, 3
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	var msgs []sdk.Message
	for range kills {
		part, err := b.send(ctx, n/kills)
		if err != nil {
			return err
		}
		msgs = append(msgs, part...)
		if err := e.h.KillConsumer(ctx, b.topic, b.group, 5); err != nil {
			return fmt.Errorf("hook KillConsumer: %w", err)
		}
	}
	c := newCrew(n)
	m, err := b.open(ctx, 8)
	if err != nil {
		return err
	}
	c.work(ctx, m, nil)
	if err := e.h.KillConsumer(ctx, b.topic, b.group, 0); err != nil { // one that joined beside a working member
		return fmt.Errorf("hook KillConsumer: %w", err)
	}
	return c.wait(msgs)
}
