package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/contracttest/stage"
	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/sdk"
)

const (
	// stallTime without one acknowledgement ends the run: something is lost, or the machine is out of its depth.
	stallTime = time.Minute
	// stopTime is what a consumer gets to end in an orderly way.
	stopTime = 30 * time.Second
	// publishBatch is how many messages are sent at once, and backlog how many may wait in the topic meanwhile.
	publishBatch = 20
	backlog      = 1000
)

// demo is one run.
type demo struct {
	opts   options
	out    *stage.Display
	sent   []input
	next   int // of sent
	db     *sql.DB
	broker sdk.Driver
	socket string
	tally  *stage.Tally

	pub    *sdk.Publisher
	places []*place
	kills  map[stage.Point]int
}

// runDemo runs all of it on an empty database and prints the result to stdout, the progress to stderr. It returns
// errVerdict, wrapped, where the check fails, and ctx's error soon after ctx is done. It leaves no process and no file.
func runDemo(ctx context.Context, opts options, database string, stdout, stderr io.Writer) error {
	start := time.Now()
	clean, err := transfers(opts.transfers, int32(opts.accounts), opts.seed)
	if err != nil {
		return err
	}
	sent := disturb(clean, opts.seed)
	db, err := openBook(ctx, database, opts.accounts)
	if err != nil {
		return err
	}
	defer db.Close()
	socketDir, err := os.MkdirTemp("", "ledger-") // the path of a socket must be short
	if err != nil {
		return fmt.Errorf("make a folder for the socket: %w", err)
	}
	defer os.RemoveAll(socketDir)
	broker, err := memory.NewNetwork(memory.Options{}).Driver("bank")
	if err != nil {
		return fmt.Errorf("open the broker: %w", err)
	}
	defer broker.Close(context.Background())
	d := &demo{
		opts: opts, sent: sent, db: db, broker: broker, socket: filepath.Join(socketDir, "broker"),
		out: stage.NewDisplay(stderr, len(sent)), tally: stage.NewTally(), kills: map[stage.Point]int{},
	}
	ending := make(chan struct{})
	for range opts.processes {
		spec := consumerSpec{Socket: d.socket, Database: database, Single: opts.single, Bare: opts.bare}
		d.places = append(d.places, newPlace(spec, ending, opts.kills))
	}
	err = d.process(ctx, ending)
	d.out.End()
	if err != nil {
		return err
	}
	result, err := inspect(ctx, db, expect(clean, int32(opts.accounts)))
	if err != nil {
		return err
	}
	d.tell(result)
	result.took = time.Since(start)
	return result.print(stdout)
}

// openBook opens the database and makes the tables: the application's, and those of the receipts.
func openBook(ctx context.Context, database string, accounts int) (*sql.DB, error) {
	db, err := sql.Open("pgx", database)
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	if err := makeTables(ctx, db, accounts); err != nil {
		_ = db.Close()
		return nil, err
	}
	return db, nil
}

func makeTables(ctx context.Context, db *sql.DB, accounts int) error {
	if _, err := db.ExecContext(ctx, tablesSQL); err != nil {
		return fmt.Errorf("create the tables: %w", err)
	}
	_, err := db.ExecContext(ctx, `INSERT INTO accounts SELECT id, $2 FROM generate_series(1, $1::int) id`, accounts, opening)
	if err != nil {
		return fmt.Errorf("open the accounts: %w", err)
	}
	store, err := receipts.NewPostgres(db, receipts.PostgresOptions{})
	if err != nil {
		return fmt.Errorf("make the store: %w", err)
	}
	if err := store.Migrate(ctx); err != nil {
		return fmt.Errorf("migrate the receipts: %w", err)
	}
	return nil
}

// process publishes everything, and lets consumer processes work, and die, until all is acknowledged.
func (d *demo) process(ctx context.Context, ending chan struct{}) error {
	listener, err := net.Listen("unix", d.socket)
	if err != nil {
		return fmt.Errorf("open the socket between broker and consumers: %w", err)
	}
	// The group is there before the first message, so that none is sent to nobody.
	binding := sdk.Binding{Topic: topic, Group: group, Declare: true}
	if err := d.broker.Prepare(ctx, binding); err != nil {
		_ = listener.Close()
		return fmt.Errorf("prepare topic %s: %w", topic, err)
	}
	if d.pub, err = sdk.NewPublisher(d.broker, sdk.PublisherConfig{}); err != nil {
		_ = listener.Close()
		return fmt.Errorf("make the publisher: %w", err)
	}
	defer d.pub.Close()
	ctx, done := context.WithCancel(ctx)
	defer done()
	server, ctx := errgroup.WithContext(ctx)
	server.Go(func() error { return pipe.NewServer(d.tally.Driver(d.broker), 0).Serve(ctx, listener) })
	work, working := errgroup.WithContext(ctx)
	for _, p := range d.places {
		work.Go(func() error { return p.hold(working) })
	}
	work.Go(func() error {
		if err := d.direct(working); err != nil {
			return err
		}
		close(ending)
		return nil
	})
	err = work.Wait()
	done() // ends Serve
	return errors.Join(err, server.Wait())
}

// direct sends the messages in portions, kills one process while they work on each, and returns when all is acknowledged.
func (d *demo) direct(ctx context.Context) error {
	rnd := rand.New(rand.NewPCG(d.opts.seed, 3))
	for i := range d.opts.kills {
		k := stage.Kill{
			Point: points()[i%len(points())], After: 1 + rnd.IntN(20), Wait: time.Duration(rnd.Int64N(int64(15 * time.Millisecond))),
		}
		victim, err := d.places[i%len(d.places)].victim(ctx)
		if err != nil {
			return err
		}
		if err := victim.Tell(k); err != nil {
			return err
		}
		if err := d.publish(ctx, len(d.sent)*(i+1)/(d.opts.kills+1)); err != nil {
			return err
		}
		if k.Point == stage.AtRandom {
			time.Sleep(k.Wait)
			victim.Kill()
		}
		if err := d.insist(ctx, victim); err != nil {
			return err
		}
		d.kills[k.Point]++
		_, acks, _ := d.tally.Counts()
		d.out.Killed(acks, k.Point)
	}
	if err := d.publish(ctx, len(d.sent)); err != nil {
		return err
	}
	return d.await(ctx, len(d.sent), nil)
}

// insist returns when the victim is dead. Where the others have taken all that was there it sends a little more, until enough
// has come to the victim.
func (d *demo) insist(ctx context.Context, victim *life) error {
	for {
		if err := d.await(ctx, d.next, victim.Exited()); err != nil {
			return err
		}
		select {
		case <-victim.Exited():
			return nil
		default:
		}
		if d.next == len(d.sent) {
			return errors.New("everything was acknowledged before all kills could happen: give -n more transfers, or fewer -kills")
		}
		if err := d.publish(ctx, min(d.next+publishBatch, len(d.sent))); err != nil {
			return err
		}
	}
}

// publish sends the messages before end, in order, and not faster than they are worked off.
func (d *demo) publish(ctx context.Context, end int) error {
	for d.next < end {
		batch := d.sent[d.next:min(d.next+publishBatch, end)]
		if err := d.await(ctx, d.next+len(batch)-backlog, nil); err != nil {
			return err
		}
		msgs := make([]*message.Message, len(batch))
		for i, in := range batch {
			msgs[i] = message.NewMessage(in.id, in.payload)
		}
		if err := d.pub.PublishContext(ctx, topic, msgs...); err != nil {
			return fmt.Errorf("publish the transfers: %w", err)
		}
		d.next += len(batch)
	}
	return nil
}

// await returns when the broker has counted target acks, or dead is closed.
func (d *demo) await(ctx context.Context, target int, dead <-chan struct{}) error {
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
		case <-dead:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-stalled.C:
			return fmt.Errorf("no acknowledgement for %s; %d of %d messages are still with the broker",
				stallTime, d.next-acks, d.next)
		}
	}
}

// tell adds to the result what the database does not know.
func (d *demo) tell(r *result) {
	r.sent, r.kills, r.planned, r.bare = len(d.sent), d.kills, d.opts.kills, d.opts.bare
	r.processes, r.accounts = d.opts.processes, d.opts.accounts
	r.deliveries, _, _ = d.tally.Counts()
	for _, p := range d.places {
		for _, l := range p.past {
			r.counts.Replayed += l.said.Report.Replayed
			r.counts.Failed += l.said.Report.Failed
			r.counts.Contention += l.said.Report.Contention
			if last := l.said.Last; last != nil {
				r.words.Open += last.Open
				r.words.Committed += last.Committed
			}
		}
	}
}
