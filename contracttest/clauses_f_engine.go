package contracttest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	textF01 = "connection cut: both directions resume by themselves, nothing lost, and resuming does not wait for running handlers"
	textF05 = "10,000 messages while the consumer stands still: memory stays bounded"
)

// engineFaultClauses are those of letter F about the engine.
func engineFaultClauses() []Clause {
	return []Clause{
		{ID: "F01", Name: "connection cut", Text: textF01, Hooks: []string{"Cut"}, Check: checkF01},
		{ID: "F01/load", Name: "cuts under load", Text: textF01, Hooks: []string{"Cut"}, Check: checkF01Load},
		{ID: "F05", Name: "consumer stands still", Text: textF05, Check: checkF05},
	}
}

func checkF01(ctx context.Context, e *Env) error {
	g, err := e.engine(ctx, 1, nil) // a full window must not keep it from seeing the cut
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
	running, err := e.next(ctx, ch) // its handler runs on through the cut
	if err != nil {
		return err
	}
	if err := e.h.Cut(ctx); err != nil {
		return fmt.Errorf("hook Cut: %w", err)
	}
	id := e.messageID()
	if err := g.pub.PublishContext(ctx, g.topic, message.NewMessage(id, []byte("after the cut"))); err != nil {
		return fmt.Errorf("publishing after a cut: %w", err)
	}
	want := map[string]bool{first[0].ID: true, id: true}
	for len(want) > 0 {
		msg, err := e.next(ctx, ch)
		if err != nil {
			return fmt.Errorf("%d messages are missing after a cut, while a handler runs: %w", len(want), err)
		}
		delete(want, msg.UUID)
		msg.Ack()
	}
	running.Ack()
	return nil
}

// checkF01Load publishes and consumes while the connection is cut again and again.
func checkF01Load(ctx context.Context, e *Env) error {
	const n, cuts = 200, 5
	g, err := e.engine(ctx, 16, nil)
	if err != nil {
		return err
	}
	ch, err := g.subscribe(ctx)
	if err != nil {
		return err
	}
	all := make([]string, n)
	for i := range all {
		all[i] = e.messageID()
	}
	var group sync.WaitGroup
	var published error
	group.Go(func() {
		for _, id := range all {
			if published = g.pub.PublishContext(ctx, g.topic, message.NewMessage(id, []byte("load"))); published != nil {
				return
			}
		}
	})
	acked := map[string]bool{}
	var failed error
	for cut := 0; len(acked) < n && failed == nil; {
		var msg *message.Message
		if msg, failed = e.next(ctx, ch); failed != nil {
			break
		}
		acked[msg.UUID] = true
		msg.Ack()
		if len(acked) >= (cut+1)*n/(cuts+1) && cut < cuts {
			failed = e.h.Cut(ctx)
			cut++
		}
	}
	group.Wait()
	if err := errors.Join(published, failed); err != nil {
		return fmt.Errorf("%d of %d messages came through %d cuts: %w", len(acked), n, cuts, err)
	}
	return nil
}

// checkF05 looks at the broker: what the engine did not take is there for another member.
func checkF05(ctx context.Context, e *Env) error {
	const window = 16
	n := e.h.Many
	g, err := e.engine(ctx, window, nil)
	if err != nil {
		return err
	}
	ch, err := g.subscribe(ctx)
	if err != nil {
		return err
	}
	if _, err := g.sendMany(ctx, n); err != nil {
		return err
	}
	if _, err := e.next(ctx, ch); err != nil { // it stands still with the first message in hand
		return err
	}
	other, err := g.another(ctx)
	if err != nil {
		return err
	}
	m, err := other.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	if _, err := m.drain(ctx, n-window, benchWindow); err != nil {
		return fmt.Errorf("window %d, a consumer stands still, and the broker does not have the rest: %w", window, err)
	}
	if held := g.sub.InFlight(); held > window {
		return fmt.Errorf("window %d, and the subscriber holds %d", window, held)
	}
	return nil
}
