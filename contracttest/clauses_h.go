package contracttest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

const textH01 = "each declared capability is observed to be true, limits (payload, lease) are the real ones; a horizon is reported as declared, not observed; an undeclared ability answers unsupported; Source may add to Driver, never less"

func capabilityClauses() []Clause {
	return []Clause{
		{ID: "H01", Name: "capabilities", Text: textH01, Check: checkH01},
		{ID: "H01/lease", Name: "declared lease", Text: textH01, Capability: "lease", Check: checkH01Lease},
		{ID: "H01/payload", Name: "declared payload", Text: textH01, Capability: "max-payload", Check: checkH01Payload},
	}
}

func checkH01(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	driver, source := m.b.d.Capabilities(), m.src.Capabilities()
	if err := addsOnly(driver, source); err != nil {
		return err
	}
	if _, ok := m.src.(sdk.LeaseExtender); source.Lease > 0 && !ok {
		return errors.New("a lease is declared, and the source is no LeaseExtender")
	}
	if source.Horizon > 0 {
		e.note("horizon %s: declared, not observed", source.Horizon)
	}
	if source.DeliveryLimit > 0 {
		e.note("delivery limit %d: declared, not observed", source.DeliveryLimit)
	}
	if !source.DelayedRequeue {
		err := m.src.Settle(ctx, []sdk.Settlement{{Token: d.Token, Verdict: sdk.Requeue, Delay: time.Hour}})
		if err := unsupported("a delayed requeue", err); err != nil {
			return err
		}
	}
	if !source.Reject {
		if err := unsupported("a reject", m.settle(ctx, sdk.Reject, d)); err != nil {
			return err
		}
	}
	// What was refused must not have settled anything.
	if err := m.ack(ctx, d); err != nil {
		return fmt.Errorf("after what is not supported was refused: %w", err)
	}
	return e.declaredBatch(ctx, m)
}

// declaredBatch sends as many messages in one Send as the driver says it takes.
func (e *Env) declaredBatch(ctx context.Context, m *member) error {
	most := e.h.Many
	n := m.b.d.Capabilities().MaxBatch
	if n <= 0 {
		return nil
	}
	if n > most {
		e.note("batch of %d: declared, observed with %d", n, most)
		n = most
	}
	msgs, err := m.b.send(ctx, n)
	if err != nil {
		return err
	}
	got, err := m.drain(ctx, n, benchWindow)
	if err != nil {
		return err
	}
	return exactly(got, msgs...)
}

func unsupported(what string, err error) error {
	if !errors.Is(err, sdk.ErrUnsupported) {
		return fmt.Errorf("%s is not declared and gave %w, want ErrUnsupported", what, orNil(err))
	}
	return nil
}

// addsOnly fails where the source promises less than its driver.
func addsOnly(driver, source sdk.Capabilities) error {
	for _, tag := range []string{
		"durable", "unroutable-detected", "redelivers", "delivery-count", "delayed-requeue", "reject", "tx-settle",
		"ordered", "key-ordered", "order-after-requeue", "groups", "lease", "settle-confirmed", "max-payload",
	} {
		if declares(driver, tag) && !declares(source, tag) {
			return fmt.Errorf("the driver declares %s, and its source does not", tag)
		}
	}
	if source.Settle < driver.Settle {
		return errors.New("the source's settle boundary is weaker than its driver's")
	}
	return nil
}

// checkH01Lease lets the lease that is given where none is asked for run out. Outside a bubble a long one is only noted.
func checkH01Lease(ctx context.Context, e *Env) error {
	m, d, err := e.held(ctx)
	if err != nil {
		return err
	}
	lease := m.src.Capabilities().Lease
	if lease > e.h.Patience/2 && !e.h.Bubble {
		e.note("lease %s: declared, not observed", lease)
		return nil
	}
	start := time.Now()
	var again []sdk.Delivery
	for len(again) == 0 && time.Since(start) < lease+e.h.Patience {
		again, _ = m.take(ctx, 1) // patience may be shorter than the lease
	}
	took := time.Since(start)
	if len(again) == 0 {
		return fmt.Errorf("a lease of %s is declared, and after %s nothing came back", lease, took)
	}
	if took < lease*9/10 {
		return fmt.Errorf("a lease of %s is declared, and it ended after %s", lease, took)
	}
	if again[0].Token == d.Token {
		return errors.New("redelivered with the token whose lease ran out")
	}
	return m.ack(ctx, again...)
}

func checkH01Payload(ctx context.Context, e *Env) error {
	const most = 64 << 20
	b, err := e.bench(ctx)
	if err != nil {
		return err
	}
	limit := b.d.Capabilities().MaxPayload
	if limit > most {
		e.note("payload of %d bytes: declared, not observed", limit)
		return nil
	}
	msgs := b.messages(1)
	msgs[0].Payload = make([]byte, limit)
	for i := range msgs[0].Payload {
		msgs[0].Payload[i] = byte(i >> 8)
	}
	if err := b.sendAll(ctx, msgs...); err != nil {
		return fmt.Errorf("a payload of exactly the declared %d bytes: %w", limit, err)
	}
	m, err := b.open(ctx, 1)
	if err != nil {
		return err
	}
	d, err := m.one(ctx)
	if err != nil {
		return err
	}
	return same(d, msgs[0]) // how long a large payload took is not the subject: it is not acked
}
