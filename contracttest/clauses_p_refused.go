package contracttest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// orNil makes a nil error printable with %w.
func orNil(err error) error {
	if err == nil {
		return errors.New("nil")
	}
	return err
}

// outcome fails unless err is the failure of that kind of its only entry.
func outcome(err error, want sdk.Outcome) error {
	if err == nil {
		return fmt.Errorf("Send gave nil, want outcome %s", want)
	}
	if got := sdk.OutcomeOf(sdk.EntryErrors(err, 1)[0]); got != want {
		return fmt.Errorf("Send gave outcome %s, want %s: %w", got, want, err)
	}
	return nil
}

func checkP06Stall(ctx context.Context, e *Env) error {
	return e.unanswered(ctx, func(context.Context) error { return nil })
}

func checkP06Cut(ctx context.Context, e *Env) error {
	return e.unanswered(ctx, e.h.Cut)
}

// unanswered sends while the broker does not answer, calls cut while the Send is on its way, and looks at what it
// reports: unknown, or rejected if the message was truly not stored.
func (e *Env) unanswered(ctx context.Context, cut func(context.Context) error) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	resume, err := e.h.Stall(ctx)
	if err != nil {
		return fmt.Errorf("hook Stall: %w", err)
	}
	defer resume()
	msgs := b.messages(1)
	limit := e.h.Patience / 20
	answer := make(chan error, 1)
	go func() {
		answer <- e.prompt(ctx, "Send", limit, func(ctx context.Context) error { return b.d.Send(ctx, b.topic, msgs) })
	}()
	_ = pause(ctx, limit/4) // no event tells that the request left the process
	if err := cut(ctx); err != nil {
		return fmt.Errorf("hook Cut: %w", err)
	}
	err = <-answer
	resume()
	switch {
	case err == nil:
		return errors.New("Send gave nil although the broker did not answer")
	case errors.Is(err, errLate):
		return err
	case outcome(err, sdk.OutcomeUnknown) == nil:
		return b.sentAgain(ctx, msgs[0])
	case outcome(err, sdk.OutcomeRejected) != nil:
		return fmt.Errorf("the answer to a Send was lost: %w", outcome(err, sdk.OutcomeUnknown))
	}
	if again, err := b.another(ctx); err != nil {
		return err
	} else if err := again.absent(ctx, msgs...); err != nil {
		return fmt.Errorf("Send reported rejected: %w", err)
	}
	return b.sentAgain(ctx, msgs[0])
}

// sentAgain sends a message of unknown outcome again and fails unless one or two whole copies arrive.
func (b *bench) sentAgain(ctx context.Context, msg sdk.Message) error {
	if err := b.e.eventually(ctx, func() error { return b.sendAll(ctx, msg) }); err != nil {
		return err
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err != nil {
		return err
	}
	if len(got) < 1 || len(got) > 2 {
		return fmt.Errorf("a message sent twice came %d times", len(got))
	}
	for _, d := range got {
		if err := same(d, msg); err != nil {
			return err
		}
	}
	return nil
}

func checkP06Refuse(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	restore, err := e.h.Refuse(ctx, b.topic)
	if err != nil {
		return fmt.Errorf("hook Refuse: %w", err)
	}
	defer restore()
	msgs := b.messages(1)
	if err := outcome(b.sendAll(ctx, msgs...), sdk.OutcomeRejected); err != nil {
		return err
	}
	restore()
	if err := b.sendAll(ctx, msgs...); err != nil {
		return err
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err != nil {
		return err
	}
	return exactly(got, msgs...)
}

func checkP07(ctx context.Context, e *Env) error {
	const most = 64 << 20
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	limit := b.d.Capabilities().MaxPayload
	if limit > most {
		e.note("the declared maximum of %d bytes is too large to try", limit)
		return nil
	}
	batch := b.messages(3)
	batch[1].Payload = make([]byte, limit+1)
	answers := sdk.EntryErrors(b.d.Send(ctx, b.topic, batch), len(batch))
	if answers[1] == nil || sdk.OutcomeOf(answers[1]) != sdk.OutcomePermanent || !errors.Is(answers[1], sdk.ErrTooLarge) {
		return fmt.Errorf("a payload of %d bytes: Send gave %w, want permanent and ErrTooLarge", limit+1, orNil(answers[1]))
	}
	m, err := b.open(ctx, benchWindow)
	if err != nil {
		return err
	}
	got, err := m.fence(ctx)
	if err != nil {
		return fmt.Errorf("after a payload that is too large: %w", err)
	}
	var stored []sdk.Message
	for _, i := range []int{0, 2} {
		if answers[i] == nil {
			stored = append(stored, batch[i])
		}
	}
	return exactly(got, stored...)
}

func checkP08(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	msgs := b.messages(1)
	for _, ended := range []func(context.Context) (context.Context, context.CancelFunc){
		func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithDeadline(ctx, time.Now().Add(-time.Second))
		},
		func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return ctx, cancel
		},
	} {
		err := e.prompt(ctx, "Send with an expired context", 0, func(context.Context) error {
			ctx, cancel := ended(ctx)
			defer cancel()
			return b.d.Send(ctx, b.topic, msgs)
		})
		if errors.Is(err, errLate) {
			return err
		}
		if err == nil {
			e.note("Send stores although its context is over")
		}
	}
	return nil
}

func checkP08Stall(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	resume, err := e.h.Stall(ctx)
	if err != nil {
		return fmt.Errorf("hook Stall: %w", err)
	}
	defer resume()
	err = e.prompt(ctx, "Send", e.h.Patience/20, func(ctx context.Context) error {
		return b.d.Send(ctx, b.topic, b.messages(1))
	})
	if err == nil {
		return errors.New("Send gave nil although the broker did not answer")
	}
	if errors.Is(err, errLate) {
		return err
	}
	return nil
}

func checkP09(ctx context.Context, e *Env) error {
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	if _, err := b.send(ctx, 2); err != nil {
		return err
	}
	first, err := b.open(ctx, 1)
	if err != nil {
		return err
	}
	second, err := b.open(ctx, 1)
	if err != nil {
		return err
	}
	d, err := first.one(ctx)
	if err != nil {
		return err
	}
	if err := first.close(ctx); err != nil {
		return err
	}
	errs := []error{first.closed(ctx, "after Source.Close", d.Token)}
	if d, err = second.one(ctx); err != nil {
		return err
	}
	if err := b.d.Close(ctx); err != nil {
		return err
	}
	errs = append(errs, second.closed(ctx, "after Driver.Close", d.Token))
	_, opened := b.d.Open(ctx, b.binding(1))
	return errors.Join(append(errs,
		wantClosed("Send", b.d.Send(ctx, b.topic, b.messages(1))),
		wantClosed("Prepare", b.d.Prepare(ctx, b.binding(1))),
		wantClosed("Open", opened))...)
}

// closed fails unless the source answers ErrClosed.
func (m *member) closed(ctx context.Context, when string, t sdk.Token) error {
	got, err := m.src.Receive(ctx, 1)
	errs := []error{wantClosed("Receive "+when, err)}
	if len(got) > 0 {
		errs = append(errs, fmt.Errorf("Receive %s returned %s", when, ids(got)))
	}
	errs = append(errs, wantClosed("Settle "+when, m.settleTokens(ctx, sdk.Ack, t)))
	if ext, ok := m.src.(sdk.LeaseExtender); ok {
		errs = append(errs, wantClosed("Extend "+when, ext.Extend(ctx, []sdk.Token{t}, m.b.e.h.Lease)))
	}
	return errors.Join(errs...)
}

func wantClosed(call string, err error) error {
	if errors.Is(err, sdk.ErrClosed) {
		return nil
	}
	return fmt.Errorf("%s gave %w, want ErrClosed", call, orNil(err))
}
