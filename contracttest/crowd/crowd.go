package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/contracttest/stage"
	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

const (
	// stallTime without one acknowledgement ends the run.
	stallTime = 2 * time.Minute
	// stopTime is what a consumer gets to end in an orderly way.
	stopTime = time.Minute
	// publishBatch is how many messages are sent at once, and backlog how many may wait in the topic meanwhile.
	publishBatch = 200
	backlog      = 5000
)

// identities gives the messages in their order: distinct ones, and duplicates of those, at once or up to 2,000 places later.
func identities(p plan) (sent []string, distinct int) {
	rnd := rand.New(rand.NewPCG(p.seed, 1))
	distinct = max(1, p.messages*(100-p.duplicates)/100)
	type placed struct {
		id    string
		place int
	}
	list := make([]placed, 0, p.messages)
	for i := range p.messages {
		of, later := i, 0
		if i >= distinct {
			of, later = rnd.IntN(distinct), rnd.IntN(2000)*rnd.IntN(2)
		}
		list = append(list, placed{id: fmt.Sprintf("m-%07d", of), place: of + later})
	}
	slices.SortStableFunc(list, func(a, b placed) int { return a.place - b.place })
	for _, l := range list {
		sent = append(sent, l.id)
	}
	return sent, distinct
}

// crowd is one run.
type crowd struct {
	plan   plan
	dsn    string
	socket string
	broker sdk.Driver
	tally  *stage.Tally
	out    *stage.Display
	sent   []string

	members []*member
	took    time.Duration // from the first message to the last acknowledgement
}

// member is one consumer process, and what it said, to be read after its end.
type member struct {
	*stage.Child
	ready chan struct{}
	said  news
}

// runCrowd runs a plan on an empty database. It leaves no process and no file.
func runCrowd(ctx context.Context, p plan, dsn string, progress io.Writer) (r *result, err error) {
	s := stores()[p.store]
	db, err := sql.Open(s.client, dsn)
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.ExecContext(ctx, tableSQL); err != nil {
		return nil, fmt.Errorf("create the table: %w", err)
	}
	if err := s.migrate(ctx, db); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "crowd-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for the socket: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	broker, err := memory.NewNetwork(memory.Options{}).Driver("crowd")
	if err != nil {
		return nil, fmt.Errorf("open the broker: %w", err)
	}
	defer func() { err = errors.Join(err, broker.Close(context.Background())) }()
	sent, distinct := identities(p)
	c := &crowd{
		plan: p, dsn: dsn, socket: filepath.Join(dir, "broker"), broker: broker, tally: stage.NewTally(),
		out: stage.NewDisplay(progress, len(sent)), sent: sent,
	}
	err = c.process(ctx)
	c.out.End()
	if err != nil {
		return nil, err
	}
	return c.inspect(ctx, db, distinct)
}

// process serves the broker while the members work.
func (c *crowd) process(ctx context.Context) error {
	listener, err := net.Listen("unix", c.socket)
	if err != nil {
		return fmt.Errorf("open the socket between broker and consumers: %w", err)
	}
	ctx, done := context.WithCancel(ctx)
	defer done()
	server, ctx := errgroup.WithContext(ctx)
	server.Go(func() error { return pipe.NewServer(c.tally.Driver(c.broker), 0).Serve(ctx, listener) })
	err = c.work(ctx)
	for _, m := range c.members {
		if err == nil {
			err = m.Stop(stopTime)
		} else {
			m.Kill()
		}
	}
	done()
	return errors.Join(err, server.Wait())
}

// work starts the members, sends everything, and returns when all is acknowledged.
func (c *crowd) work(ctx context.Context) error {
	if err := c.broker.Prepare(ctx, sdk.Binding{Topic: topic, Group: group, Declare: true}); err != nil {
		return fmt.Errorf("prepare topic %s: %w", topic, err)
	}
	for range c.plan.processes {
		m := &member{ready: make(chan struct{})}
		var err error
		spec := consumerSpec{Socket: c.socket, Store: c.plan.store, Database: c.dsn, Window: c.plan.window}
		m.Child, err = stage.Start(consumerEnv, spec, m.hear)
		if err != nil {
			return err
		}
		c.members = append(c.members, m)
	}
	for _, m := range c.members {
		select {
		case <-m.ready:
		case <-m.Exited():
			return fmt.Errorf("a consumer ended by itself: %w", m.Ended())
		case <-time.After(stallTime):
			return fmt.Errorf("a consumer was not ready within %s", stallTime)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	start := time.Now()
	if err := c.publish(ctx); err != nil {
		return err
	}
	err := c.await(ctx, len(c.sent))
	c.took = time.Since(start)
	return err
}

func (m *member) hear(line []byte) {
	var n news
	if json.Unmarshal(line, &n) != nil {
		return
	}
	if n.Ready {
		close(m.ready)
	}
	m.said = n
}

// publish sends all messages, not faster than they are worked off.
func (c *crowd) publish(ctx context.Context) (err error) {
	pub, err := sdk.NewPublisher(c.broker, sdk.PublisherConfig{})
	if err != nil {
		return fmt.Errorf("make the publisher: %w", err)
	}
	defer func() { err = errors.Join(err, pub.Close()) }()
	for next := 0; next < len(c.sent); {
		batch := c.sent[next:min(next+publishBatch, len(c.sent))]
		next += len(batch)
		if err := c.await(ctx, next-backlog); err != nil {
			return err
		}
		msgs := make([]*message.Message, len(batch))
		for i, id := range batch {
			msgs[i] = message.NewMessage(id, []byte("effect of "+id))
		}
		if err := pub.PublishContext(ctx, topic, msgs...); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
	}
	return nil
}

// await returns when the broker has counted target acks.
func (c *crowd) await(ctx context.Context, target int) error {
	stalled := time.NewTimer(stallTime)
	defer stalled.Stop()
	for {
		_, acks, changed := c.tally.Counts()
		c.out.Progress(acks)
		if acks >= target {
			return nil
		}
		select {
		case <-changed:
			stalled.Reset(stallTime)
		case <-ctx.Done():
			return ctx.Err()
		case <-stalled.C:
			return fmt.Errorf("no acknowledgement for %s, %d of %d are there", stallTime, acks, len(c.sent))
		}
	}
}
