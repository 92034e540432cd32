package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/sdk"
)

// latency asks how long a message takes from Publish to the confirmed ack, at a rate that leaves every contender idle most
// of the time: nothing that makes many messages fast may make a single one slow.
func latency(quick bool) study {
	rate := 50
	if quick {
		rate = 500
	}
	return study{
		name: latencyStudy, pair: sqlitePair, window: 256, warmUp: 25, messages: 10 * rate,
		contenders: []contender{
			{name: watermillName, round: sqlite().on(handWritten(), paced(rate, byHand))},
			{name: penstockName, rivals: []string{watermillName}, round: sqlite().on(penstock(), paced(rate, withPenstock))},
		},
	}
}

// paced publishes rate messages a second to a router with a contender's handler.
func paced(rate int, with handlerOn) body {
	return func(ctx context.Context, w work, db *sql.DB) (took time.Duration, values []value, err error) {
		driver, err := openBroker(ctx, w.messages)
		if err != nil {
			return 0, nil, err
		}
		defer func() { err = errors.Join(err, driver.Close(context.WithoutCancel(ctx))) }()
		pub, err := sdk.NewPublisher(driver, sdk.PublisherConfig{})
		if err != nil {
			return 0, nil, err
		}
		end := holdsNothing
		var trips trips
		a := newAcks(w.messages)
		a.each = trips.acked
		c, err := consume(ctx, driver, w.window, a, func(limits sdk.Limits) (handle message.NoPublishHandlerFunc, err error) {
			handle, end, err = with(ctx, db, w, limits)
			return handle, err
		})
		if err != nil {
			return 0, nil, errors.Join(err, end())
		}
		began := time.Now()
		err = trips.publish(ctx, pub, c, w, time.Second/time.Duration(rate))
		if err == nil {
			err = a.wait(ctx)
		}
		took = time.Since(began)
		if err := errors.Join(err, c.end(), end(), pub.Close()); err != nil {
			return 0, nil, err
		}
		at := fmt.Sprintf("publish → ack at %d msg/s", rate)
		return took, []value{
			{"p50 " + at, "ms", trips.percentile(50)},
			{"p99 " + at, "ms", trips.percentile(99)},
		}, nil
	}
}

// trips are the times of messages under way. It is safe for concurrent use.
type trips struct {
	mu        sync.Mutex
	published map[string]time.Time
	took      []time.Duration
}

// publish publishes messages at even intervals, each at its own time, whether or not earlier ones are done.
func (t *trips) publish(ctx context.Context, pub *sdk.Publisher, c *running, w work, every time.Duration) error {
	select {
	case <-c.router.Running():
	case <-ctx.Done():
		return ctx.Err()
	}
	t.published = make(map[string]time.Time, w.messages)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for _, m := range workload(w) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		t.mu.Lock()
		t.published[m.ID] = time.Now()
		t.mu.Unlock()
		if err := pub.PublishContext(ctx, topic, message.NewMessage(m.ID, m.Payload)); err != nil {
			return err
		}
	}
	return nil
}

func (t *trips) acked(id string) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.took = append(t.took, now.Sub(t.published[id]))
}

// percentile gives milliseconds: the smallest time that p per cent of the messages did not exceed.
func (t *trips) percentile(p int) float64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.Sort(t.took)
	i := (len(t.took)*p+99)/100 - 1
	return float64(t.took[max(i, 0)].Microseconds()) / 1000
}
