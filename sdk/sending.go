package sdk

import (
	"context"
	"errors"
	"time"
)

// sendAll sends a batch until all of it is stored, a failure is permanent, or ctx is done. It tells how many entries are
// not known to be stored, and the outcome and error of the worst of them.
func (p *Publisher) sendAll(ctx context.Context, topic string, batch []Message) (int, Outcome, error) {
	unsure := false // an attempt with an unknown outcome stays unknown, however later ones are refused
	for attempt := 1; ; attempt++ {
		left, kind, err := p.attempt(ctx, topic, batch)
		if err == nil {
			return 0, 0, nil
		}
		batch = left
		unsure = unsure || kind == OutcomeUnknown
		if kind == OutcomePermanent || errors.Is(err, ErrClosed) {
			return len(batch), kind, err
		}
		delay := p.cfg.Backoff.Delay(attempt)
		if deadline, ok := ctx.Deadline(); ctx.Err() == nil && (!ok || time.Until(deadline) > delay) {
			p.report.report(Event{
				Kind: EventPublishRetried, Topic: topic, ID: batch[0].ID, Attempt: attempt, Delay: delay, Err: err,
			})
			if pause(ctx, delay) {
				continue
			}
		}
		if unsure {
			kind = OutcomeUnknown
		}
		return len(batch), kind, err
	}
}

// attempt prepares the topic, where that is still to be done, and sends once. It returns the entries that failed.
func (p *Publisher) attempt(ctx context.Context, topic string, batch []Message) ([]Message, Outcome, error) {
	if err := p.prepare(ctx, topic); err != nil {
		return batch, outcomeOfPrepare(err), err
	}
	sendCtx, cancel := context.WithTimeout(ctx, p.cfg.AttemptTimeout)
	defer cancel()
	err := p.driver.Send(sendCtx, topic, batch)
	if err == nil {
		return nil, 0, nil
	}
	p.topics.forget(topic) // it may have been deleted: the next attempt prepares it again (F04)
	return failures(batch, err)
}

// prepare makes sure that the topic exists, once; what failed is tried again at the next attempt.
func (p *Publisher) prepare(ctx context.Context, topic string) error {
	if p.topics.known(topic) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.AttemptTimeout)
	defer cancel()
	if err := p.driver.Prepare(ctx, Binding{Topic: topic, Declare: !p.cfg.VerifyOnly}); err != nil {
		return err
	}
	p.topics.remember(topic)
	return nil
}

// outcomeOfPrepare: nothing was sent, so the messages are rejected unless trying again is pointless.
func outcomeOfPrepare(err error) Outcome {
	if OutcomeOf(err) == OutcomePermanent || errors.Is(err, ErrUnsupported) {
		return OutcomePermanent
	}
	return OutcomeRejected
}

// failures picks the entries that failed, the worst outcome among them, and its error: permanent before unknown before
// rejected, because it decides what happens next.
func failures(batch []Message, err error) ([]Message, Outcome, error) {
	var (
		left  []Message
		kind  Outcome
		worst error
	)
	for i, e := range EntryErrors(err, len(batch)) {
		if e == nil {
			continue
		}
		left = append(left, batch[i])
		if k := OutcomeOf(e); kind == 0 || severity(k) > severity(kind) {
			kind, worst = k, e
		}
	}
	return left, kind, worst
}

func severity(o Outcome) int {
	switch o {
	case OutcomePermanent:
		return 3
	case OutcomeRejected:
		return 1
	default:
		return 2
	}
}
