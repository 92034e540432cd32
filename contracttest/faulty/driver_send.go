package faulty

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

func metadataDropped(batch []sdk.Message, fired *atomic.Int64) []sdk.Message {
	out := slices.Clone(batch)
	for i, m := range out {
		out[i].Metadata = maps.Clone(m.Metadata)
		for k, v := range m.Metadata {
			if v == "" {
				delete(out[i].Metadata, k)
				fired.Add(1)
			}
		}
	}
	return out
}

func emptyPayloadLost(batch []sdk.Message, fired *atomic.Int64) []sdk.Message {
	return slices.DeleteFunc(slices.Clone(batch), func(m sdk.Message) bool {
		if len(m.Payload) > 0 {
			return false
		}
		fired.Add(1)
		return true
	})
}

func orderSwapped(batch []sdk.Message, fired *atomic.Int64) []sdk.Message {
	out := slices.Clone(batch)
	if n := len(out); n > 1 {
		out[n-1], out[n-2] = out[n-2], out[n-1]
		fired.Add(1)
	}
	return out
}

func batchPartlyDropped(batch []sdk.Message, fired *atomic.Int64) []sdk.Message {
	if len(batch) < 2 {
		return batch
	}
	fired.Add(1)
	return batch[:len(batch)-1]
}

func sentTwice(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	return driver{Driver: d, send: func(ctx context.Context, topic string, batch []sdk.Message) error {
		if err := d.Send(ctx, topic, batch); err != nil {
			return err
		}
		fired.Add(1)
		return d.Send(ctx, topic, batch)
	}}
}

// sentLater keeps what is sent until a source of the same driver is open for its topic.
func sentLater(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	return untilOpened(d, fired, func(m sdk.Message) sdk.Message {
		m.Payload, m.Metadata = slices.Clone(m.Payload), maps.Clone(m.Metadata)
		return m
	})
}

// batchKept does the same with the caller's own bytes, which the caller may change meanwhile.
func batchKept(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	return untilOpened(d, fired, func(m sdk.Message) sdk.Message { return m })
}

func untilOpened(d sdk.Driver, fired *atomic.Int64, keep func(sdk.Message) sdk.Message) sdk.Driver {
	var mu sync.Mutex
	opened := map[string]bool{}
	waiting := map[string][]sdk.Message{}
	return driver{
		Driver: d,
		send: func(ctx context.Context, topic string, batch []sdk.Message) error {
			mu.Lock()
			defer mu.Unlock()
			if opened[topic] {
				return d.Send(ctx, topic, batch)
			}
			for _, m := range batch {
				fired.Add(1)
				waiting[topic] = append(waiting[topic], keep(m))
			}
			return nil
		},
		open: func(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
			mu.Lock()
			defer mu.Unlock()
			s, err := d.Open(ctx, b)
			if err != nil {
				return nil, err
			}
			if err := d.Send(ctx, b.Topic, waiting[b.Topic]); err != nil {
				return nil, errors.Join(err, s.Close(ctx))
			}
			opened[b.Topic], waiting[b.Topic] = true, nil
			return s, nil
		},
	}
}

func unroutableSwallowed(err error, fired *atomic.Int64) error {
	if errors.Is(err, sdk.ErrUnroutable) {
		fired.Add(1)
		return nil
	}
	return err
}

func refusalPermanent(err error, fired *atomic.Int64) error {
	if sdk.OutcomeOf(err) != sdk.OutcomeRejected {
		return err
	}
	fired.Add(1)
	return &sdk.OutcomeError{Kind: sdk.OutcomePermanent, Err: err}
}

func tooLargeCut(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	return driver{Driver: d, send: func(ctx context.Context, topic string, batch []sdk.Message) error {
		out := slices.Clone(batch)
		for i, m := range out {
			if limit := d.Capabilities().MaxPayload; len(m.Payload) > limit {
				out[i].Payload = m.Payload[:limit]
				fired.Add(1)
			}
		}
		return d.Send(ctx, topic, out)
	}}
}

func deadlineIgnored(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	return driver{Driver: d, send: func(ctx context.Context, topic string, batch []sdk.Message) error {
		if _, bounded := ctx.Deadline(); bounded {
			fired.Add(1)
		}
		return d.Send(context.WithoutCancel(ctx), topic, batch)
	}}
}

// noticedLate looks at its context only after a while.
func noticedLate(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	const while = 30 * time.Second
	return driver{Driver: d, send: func(ctx context.Context, topic string, batch []sdk.Message) error {
		err := d.Send(ctx, topic, batch)
		if ctx.Err() != nil {
			fired.Add(1)
			time.Sleep(while)
		}
		return err
	}}
}

func closedStillWorks(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	return driver{Driver: d, close: func(context.Context) error {
		fired.Add(1)
		return nil
	}}
}

// windowIgnored fetches what it can get and hands out what it is asked for.
func windowIgnored(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	const hoard = 200
	return driver{Driver: d, open: func(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
		b.Window = hoard
		s, err := d.Open(ctx, b)
		if err != nil {
			return nil, err
		}
		var fetched []sdk.Delivery
		return source{Source: s, receive: func(ctx context.Context, limit int) ([]sdk.Delivery, error) {
			if len(fetched) == 0 {
				if fetched, err = s.Receive(ctx, hoard); err != nil {
					return nil, err
				}
				fired.Add(int64(len(fetched)))
			}
			n := min(limit, len(fetched))
			out := fetched[:n:n]
			fetched = fetched[n:]
			return out, nil
		}}, nil
	}}
}

// membersApart gives each source a group of its own; it is made when the group is, for the first few members.
func membersApart(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	const most = 3
	var opened atomic.Int64
	apart := func(b sdk.Binding, n int64) sdk.Binding {
		if b.Group != "" && n > 0 {
			b.Group = fmt.Sprintf("%s-%d", b.Group, n)
		}
		return b
	}
	return driver{
		Driver: d,
		prepare: func(ctx context.Context, b sdk.Binding) error {
			var errs []error
			for n := range int64(most) {
				errs = append(errs, d.Prepare(ctx, apart(b, n)))
			}
			return errors.Join(errs...)
		},
		open: func(ctx context.Context, b sdk.Binding) (sdk.Source, error) {
			fired.Add(1)
			return d.Open(ctx, apart(b, (opened.Add(1)-1)%most))
		},
	}
}

func groupsMixed(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	one := func(b sdk.Binding) sdk.Binding {
		if b.Group != "" {
			fired.Add(1)
			b.Group = "one for all"
		}
		return b
	}
	return driver{
		Driver:  d,
		prepare: func(ctx context.Context, b sdk.Binding) error { return d.Prepare(ctx, one(b)) },
		open:    func(ctx context.Context, b sdk.Binding) (sdk.Source, error) { return d.Open(ctx, one(b)) },
	}
}

func prepareBlind(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	return driver{Driver: d, prepare: func(ctx context.Context, b sdk.Binding) error {
		err := d.Prepare(ctx, b)
		if err != nil && !b.Declare {
			fired.Add(1)
			return nil
		}
		return err
	}}
}

func payloadLimitLie(d sdk.Driver, fired *atomic.Int64) sdk.Driver {
	return driver{Driver: d, caps: func() sdk.Capabilities {
		fired.Add(1)
		caps := d.Capabilities()
		caps.MaxPayload += 10
		return caps
	}}
}
