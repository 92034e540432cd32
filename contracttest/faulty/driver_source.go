package faulty

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

func ackBeforeHandingOver(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return source{
		Source: s,
		receive: func(ctx context.Context, limit int) ([]sdk.Delivery, error) {
			ds, err := s.Receive(ctx, limit)
			for _, d := range ds {
				fired.Add(1)
				err = errors.Join(err, s.Settle(ctx, []sdk.Settlement{{Token: d.Token, Verdict: sdk.Ack}}))
			}
			return ds, err
		},
		settle: func(context.Context, []sdk.Settlement) error { return nil },
	}
}

func loseOnRequeue(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return verdicts(s, func(st sdk.Settlement) sdk.Settlement {
		if st.Verdict == sdk.Requeue {
			fired.Add(1)
			st.Verdict, st.Delay = sdk.Ack, 0
		}
		return st
	})
}

// redeliverAcked sends no ack: the broker takes the delivery back when the session ends.
func redeliverAcked(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return source{Source: s, settle: func(ctx context.Context, batch []sdk.Settlement) error {
		return s.Settle(ctx, slices.DeleteFunc(slices.Clone(batch), func(st sdk.Settlement) bool {
			if st.Verdict != sdk.Ack {
				return false
			}
			fired.Add(1)
			return true
		}))
	}}
}

// renaming gives deliveries other tokens and keeps what those mean.
type renaming struct {
	mu   sync.Mutex
	real map[sdk.Token]sdk.Token
}

func (r *renaming) set(shown, meant sdk.Token) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.real[shown] = meant
}

func (r *renaming) get(shown sdk.Token) sdk.Token {
	r.mu.Lock()
	defer r.mu.Unlock()
	if meant, ok := r.real[shown]; ok {
		return meant
	}
	return shown
}

// tokenReused names a delivery after its message, so that every attempt has the same token.
func tokenReused(s sdk.Source, fired *atomic.Int64) sdk.Source {
	names := &renaming{real: map[sdk.Token]sdk.Token{}}
	return source{
		Source: s,
		receive: func(ctx context.Context, limit int) ([]sdk.Delivery, error) {
			ds, err := s.Receive(ctx, limit)
			for i, d := range ds {
				fired.Add(1)
				names.set(sdk.Token(d.ID), d.Token)
				ds[i].Token = sdk.Token(d.ID)
			}
			return ds, err
		},
		settle: verdicts(s, func(st sdk.Settlement) sdk.Settlement { st.Token = names.get(st.Token); return st }).settle,
		extend: func(ctx context.Context, tokens []sdk.Token, d time.Duration) error {
			meant := make([]sdk.Token, len(tokens))
			for i, t := range tokens {
				meant[i] = names.get(t)
			}
			return source{Source: s}.Extend(ctx, meant, d)
		},
	}
}

// staleTokenSettles takes the token of an earlier attempt for the one in flight.
func staleTokenSettles(s sdk.Source, fired *atomic.Int64) sdk.Source {
	latest := &renaming{real: map[sdk.Token]sdk.Token{}} // message -> token in flight
	message := &renaming{real: map[sdk.Token]sdk.Token{}}
	changed := verdicts(s, func(st sdk.Settlement) sdk.Settlement {
		if now := latest.get(message.get(st.Token)); now != st.Token && now != message.get(st.Token) {
			fired.Add(1)
			st.Token = now
		}
		return st
	})
	changed.receive = func(ctx context.Context, limit int) ([]sdk.Delivery, error) {
		ds, err := s.Receive(ctx, limit)
		for _, d := range ds {
			message.set(d.Token, sdk.Token(d.ID))
			latest.set(sdk.Token(d.ID), d.Token)
		}
		return ds, err
	}
	return changed
}

func declaresLess(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return source{Source: s, caps: func() sdk.Capabilities {
		fired.Add(1)
		caps := s.Capabilities()
		caps.Groups = false
		return caps
	}}
}

func delayIgnored(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return verdicts(s, func(st sdk.Settlement) sdk.Settlement {
		if st.Delay > 0 {
			fired.Add(1)
			st.Delay = 0
		}
		return st
	})
}

func rejectLoses(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return verdicts(s, func(st sdk.Settlement) sdk.Settlement {
		if st.Verdict == sdk.Reject {
			fired.Add(1)
			st.Verdict = sdk.Ack
		}
		return st
	})
}

// rejectRequeues waits a little: without that it would spin, and in a bubble no time would pass.
func rejectRequeues(s sdk.Source, fired *atomic.Int64) sdk.Source {
	const pause = 50 * time.Millisecond
	return verdicts(s, func(st sdk.Settlement) sdk.Settlement {
		if st.Verdict == sdk.Reject {
			fired.Add(1)
			st.Verdict, st.Delay = sdk.Requeue, pause
		}
		return st
	})
}

func errorsSwallowed(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return source{Source: s, settle: func(ctx context.Context, batch []sdk.Settlement) error {
		if err := s.Settle(ctx, batch); err != nil {
			fired.Add(1)
		}
		return nil
	}}
}

// confirmedTooEarly settles one call later than it says, or not at all.
func confirmedTooEarly(s sdk.Source, fired *atomic.Int64) sdk.Source {
	var mu sync.Mutex
	var late []sdk.Settlement
	flush := func(ctx context.Context) error {
		mu.Lock()
		batch := late
		late = nil
		mu.Unlock()
		return s.Settle(ctx, batch)
	}
	return source{
		Source: s,
		settle: func(ctx context.Context, batch []sdk.Settlement) error {
			err := flush(ctx)
			if slices.ContainsFunc(batch, func(st sdk.Settlement) bool { return st.Verdict != sdk.Ack }) || err != nil {
				return errors.Join(err, s.Settle(ctx, batch))
			}
			mu.Lock()
			defer mu.Unlock()
			late = slices.Clone(batch)
			fired.Add(1)
			return nil
		},
		receive: func(ctx context.Context, limit int) ([]sdk.Delivery, error) {
			if err := flush(ctx); err != nil {
				return nil, err
			}
			return s.Receive(ctx, limit)
		},
		close: func(ctx context.Context) error { return errors.Join(flush(ctx), s.Close(ctx)) },
	}
}

func ackCumulative(s sdk.Source, fired *atomic.Int64) sdk.Source {
	h := &held{}
	w := watched(s, h)
	w.settle = func(ctx context.Context, batch []sdk.Settlement) error {
		for _, st := range batch {
			before := h.remove(st.Token)
			if st.Verdict != sdk.Ack {
				continue
			}
			for _, d := range before {
				fired.Add(1)
				h.remove(d.Token)
				_ = s.Settle(ctx, []sdk.Settlement{{Token: d.Token, Verdict: sdk.Ack}}) // one that is in the batch too fails there
			}
		}
		return s.Settle(ctx, batch)
	}
	return w
}

func extendForgotten(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return source{Source: s, extend: func(context.Context, []sdk.Token, time.Duration) error {
		fired.Add(1)
		return nil
	}}
}

func attemptConstant(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return source{Source: s, receive: func(ctx context.Context, limit int) ([]sdk.Delivery, error) {
		ds, err := s.Receive(ctx, limit)
		for i := range ds {
			if ds[i].Attempt != 1 {
				fired.Add(1)
				ds[i].Attempt = 1
			}
		}
		return ds, err
	}}
}

// neighboursCharged settles by closing a channel: everything that is in flight goes back with the one that is requeued.
func neighboursCharged(s sdk.Source, fired *atomic.Int64) sdk.Source {
	h := &held{}
	w := watched(s, h)
	w.settle = func(ctx context.Context, batch []sdk.Settlement) error {
		requeue := false
		for _, st := range batch {
			h.remove(st.Token)
			requeue = requeue || st.Verdict == sdk.Requeue
		}
		err := s.Settle(ctx, batch)
		if !requeue || err != nil {
			return err
		}
		for _, d := range h.all() {
			fired.Add(1)
			h.remove(d.Token)
			err = errors.Join(err, s.Settle(ctx, []sdk.Settlement{{Token: d.Token, Verdict: sdk.Requeue}}))
		}
		return err
	}
	return w
}

func closeForgotten(s sdk.Source, fired *atomic.Int64) sdk.Source {
	return source{Source: s, close: func(context.Context) error {
		fired.Add(1)
		return nil
	}}
}

func closeAcks(s sdk.Source, fired *atomic.Int64) sdk.Source {
	h := &held{}
	w := watched(s, h)
	w.close = func(ctx context.Context) error {
		for _, d := range h.all() {
			fired.Add(1)
			h.remove(d.Token)
			_ = s.Settle(ctx, []sdk.Settlement{{Token: d.Token, Verdict: sdk.Ack}}) // it may be closed already
		}
		return s.Close(ctx)
	}
	return w
}

// leak starts a goroutine that outlives its source, for longer than any clause looks.
func leak(s sdk.Source, fired *atomic.Int64) sdk.Source {
	const long = 30 * time.Minute
	fired.Add(1)
	go func() { <-time.After(long) }()
	return s
}
