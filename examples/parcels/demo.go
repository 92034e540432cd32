package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/contracttest/stage"
	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

const (
	// stallTime without one acknowledgement ends the run: something is lost, or the machine is out of its depth.
	stallTime = 30 * time.Second
	// stopTime is what the consumer gets to end in an orderly way.
	stopTime = 30 * time.Second
	// publishBatch is how many messages are sent at once.
	publishBatch = 50
)

// demo is one run.
type demo struct {
	opts     options
	out      *stage.Display
	sent     []input
	database string
	socket   string
	broker   sdk.Driver
	tally    *stage.Tally

	kills    map[stage.Point]int
	words    stage.LastWords // of all that were killed
	replayed uint64
}

// runDemo runs all of it and prints the result to stdout, the progress to stderr. It returns errVerdict, wrapped, where
// the check fails, and ctx's error soon after ctx is done. It leaves no process, and no file outside of -dir.
func runDemo(ctx context.Context, opts options, stdout, stderr io.Writer) error {
	start := time.Now()
	clean, err := events(opts.events, opts.seed)
	if err != nil {
		return err
	}
	sent := disturb(clean, opts.seed)
	database, removeDatabase, err := opts.databasePath()
	if err != nil {
		return err
	}
	defer removeDatabase()
	// The socket has a folder of its own: its path must be short, and it never stays.
	socketDir, err := os.MkdirTemp("", "parcels-")
	if err != nil {
		return fmt.Errorf("make a folder for the socket: %w", err)
	}
	defer os.RemoveAll(socketDir)

	broker, err := memory.NewNetwork(memory.Options{}).Driver("carrier")
	if err != nil {
		return fmt.Errorf("open the broker: %w", err)
	}
	defer broker.Close(context.Background())
	d := &demo{
		opts: opts, sent: sent, database: database, socket: filepath.Join(socketDir, "broker"),
		out: stage.NewDisplay(stderr, len(sent)), broker: broker, tally: stage.NewTally(), kills: map[stage.Point]int{},
	}
	err = d.process(ctx)
	d.out.End()
	if err != nil {
		return err
	}
	result, err := inspect(ctx, database, expect(sent))
	if err != nil {
		return err
	}
	result.deliveries, _, _ = d.tally.Counts()
	result.events, result.replayed, result.kills, result.planned = opts.events, d.replayed, d.kills, opts.kills
	result.words = d.words
	result.bare, result.took = opts.bare, time.Since(start)
	return result.print(stdout)
}

// process publishes everything, and lets one consumer process after the other work until all is acknowledged.
func (d *demo) process(ctx context.Context) error {
	listener, err := net.Listen("unix", d.socket)
	if err != nil {
		return fmt.Errorf("open the socket between broker and consumer: %w", err)
	}
	// The group is there before the first message, so that none is sent to nobody.
	binding := sdk.Binding{Topic: topic, Group: group, Declare: true}
	if err := d.broker.Prepare(ctx, binding); err != nil {
		_ = listener.Close()
		return fmt.Errorf("prepare topic %s: %w", topic, err)
	}
	ctx, done := context.WithCancel(ctx)
	defer done()
	work, ctx := errgroup.WithContext(ctx)
	work.Go(func() error { return pipe.NewServer(d.tally.Driver(d.broker), 0).Serve(ctx, listener) })
	work.Go(func() error { return d.publish(ctx) })
	work.Go(func() error {
		defer done() // ends Serve
		return d.consumers(ctx)
	})
	return work.Wait()
}

// publish sends the messages, in order.
func (d *demo) publish(ctx context.Context) error {
	pub, err := sdk.NewPublisher(d.broker, sdk.PublisherConfig{})
	if err != nil {
		return fmt.Errorf("make the publisher: %w", err)
	}
	defer pub.Close()
	for from := 0; from < len(d.sent); from += publishBatch {
		batch := d.sent[from:min(from+publishBatch, len(d.sent))]
		msgs := make([]*message.Message, len(batch))
		for i, in := range batch {
			msgs[i] = message.NewMessage(in.id, in.payload)
		}
		if err := pub.PublishContext(ctx, topic, msgs...); err != nil {
			return fmt.Errorf("publish the events: %w", err)
		}
	}
	return nil
}

// consumers starts one process after the other: one for each kill, and one that survives.
func (d *demo) consumers(ctx context.Context) error {
	kinds := points()
	if d.opts.bare {
		kinds = barePoints()
	}
	for _, k := range stage.Plan(kinds, d.opts.kills, d.opts.events, d.opts.seed) {
		if err := d.shortLife(ctx, k); err != nil {
			return err
		}
		d.kills[k.Point]++
		d.out.Killed(d.acks(), k.Point)
	}
	survivor, err := startLife(d.spec(stage.Kill{}))
	if err != nil {
		return err
	}
	if err := d.await(ctx, survivor, len(d.sent)); err != nil {
		survivor.Kill()
		return err
	}
	err = survivor.Stop(stopTime)
	d.replayed += survivor.replayed
	return err
}

// points are the moments at which a consumer is killed, in turn.
func points() []stage.Point {
	return []stage.Point{stage.BeforeCommit, stage.MidBatch, stage.AfterCommit, stage.AckInFlight, stage.AtRandom}
}

// barePoints are those of a consumer whose messages never share a transaction.
func barePoints() []stage.Point {
	return []stage.Point{stage.BeforeCommit, stage.AfterCommit, stage.AckInFlight, stage.AtRandom}
}

// life is one consumer process, and what it said of itself: to be read after its end.
type life struct {
	*stage.Child
	replayed uint64
	last     stage.LastWords
}

func startLife(spec consumerSpec) (l *life, err error) {
	l = &life{}
	l.Child, err = stage.Start(consumerEnv, spec, func(line []byte) {
		var p progress
		if json.Unmarshal(line, &p) != nil {
			return
		}
		if l.replayed = max(l.replayed, p.Replayed); p.Last != nil {
			l.last = *p.Last
		}
	})
	return l, err
}

// shortLife runs a consumer until it is killed.
func (d *demo) shortLife(ctx context.Context, k stage.Kill) error {
	victim, err := startLife(d.spec(k))
	if err != nil {
		return err
	}
	defer func() {
		victim.Kill()
		d.replayed += victim.replayed
		d.words.Open += victim.last.Open
		d.words.Committed += victim.last.Committed
	}()
	target := len(d.sent) // it dies before
	if k.Point == stage.AtRandom {
		target = d.acks() + k.After
	}
	if err := d.await(ctx, victim, target); err != nil {
		return err
	}
	if k.Point == stage.AtRandom {
		time.Sleep(k.Wait)
		victim.Kill()
	}
	if !victim.Killed() {
		return fmt.Errorf("everything was acknowledged before the kill %q could happen", k.Point)
	}
	return nil
}

// await returns when the broker has counted target acks or the process was killed. Everything else is an error.
func (d *demo) await(ctx context.Context, c *life, target int) error {
	stalled := time.NewTimer(stallTime)
	defer stalled.Stop()
	for {
		_, acks, changed := d.tally.Counts()
		d.out.Progress(acks)
		if acks >= target {
			return nil
		}
		select {
		case <-changed:
			stalled.Reset(stallTime)
		case <-c.Exited():
			if c.Killed() {
				return nil
			}
			return fmt.Errorf("the consumer ended by itself: %w", c.Ended())
		case <-ctx.Done():
			return ctx.Err()
		case <-stalled.C:
			return fmt.Errorf("no acknowledgement for %s; %d of %d messages are still with the broker%s",
				stallTime, len(d.sent)-acks, len(d.sent), c.LastWords())
		}
	}
}

func (d *demo) acks() int {
	_, acks, _ := d.tally.Counts()
	return acks
}

func (d *demo) spec(k stage.Kill) consumerSpec {
	return consumerSpec{Socket: d.socket, Database: d.database, Kill: k, Bare: d.opts.bare}
}
