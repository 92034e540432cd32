package main

import (
	"context"
	"time"
)

// study is one comparison: contenders that do the same work in turns.
type study struct {
	// name is what -only selects; pair says what is connected.
	name, pair string
	// window is the most messages in flight, batch the most in one transaction; 0 where that means nothing, or for batch
	// that each contender does as it does unless told.
	window, batch int
	// unprepared: no contender prepares its own statements.
	unprepared bool
	// warmUp and messages are the sizes of a round. messages 0: as many as take span at the speed of the warm-up.
	warmUp, messages int
	span             time.Duration
	contenders       []contender
	// end gives back what the study kept from round to round; nil: nothing.
	end func() error
}

// contender is one way to do the work.
type contender struct {
	name string
	// rivals are those in the same study that it is compared with.
	rivals []string
	// round does the work once and tells what it measured and what it left behind.
	round func(ctx context.Context, w work) (outcome, error)
}

// work is one round's.
type work struct {
	dir      string // empty, the round's own
	messages int
	window   int
	batch    int // 0: as usual
	// unprepared: the contenders execute their own statements as text.
	unprepared bool
	// first is the number of the first message, and scattered gives identities no order.
	first     int
	scattered bool
	// nap is what a handler waits for, its transaction open.
	nap time.Duration
	// place is the database, where there is one, and url its address.
	place place
	url   string
}

// outcome is what a round measured, and what it did, for the runner to check.
type outcome struct {
	took   time.Duration
	values []value
	// effects are the counters read back after all is closed, by name.
	effects map[string]int64
	// receipts are the rows that prove a message was processed; ignored with noReceipts.
	receipts int
	// nothing is what a contender does that is there to be compared with.
	nothing bool
}

// noReceipts says that a contender writes none.
const noReceipts = -1

// value is one measured figure.
type value struct {
	metric, unit string
	amount       float64
}

// The contenders' names, as they are written to bench.json.
const (
	watermillName     = "watermill"
	watermillManyName = "watermill-16"
	nothingName       = "nothing"
	queuedName        = "penstock-queued"
	queuedBatchName   = "penstock-queued-batch"
	pipelineName      = "pipelined-loop"
	penstockName      = "penstock"
	penstockBatchName = "penstock-batch"
	loopName          = "loop"
)

// sqlitePair is the pair of most studies.
const sqlitePair = "memory → SQLite"

// The names of the studies.
const (
	throughputStudy = "throughput"
	unpreparedStudy = "unprepared"
	batchStudy      = "batch-size"
	windowStudy     = "window"
	latencyStudy    = "latency"
	sleepingStudy   = "sleeping"
	overheadStudy   = "overhead"
	postgresStudy   = "postgres"
	pgxStudy        = "pgx"
	mariadbStudy    = "mariadb"
	distanceStudy   = "distance"
	receiptsStudy   = "receipts"
)

// studies lists what is to be run.
func studies(opts options) []study {
	all := []study{throughput(), unprepared()}
	for _, batch := range []int{1, 4, 16, 64, 256} {
		all = append(all, batchSize(batch))
	}
	for _, window := range []int{16, 64, 256, 512, 1024} {
		all = append(all, windows(window))
	}
	all = append(all, latency(opts.quick), sleeping(), overhead(), overheadTogether())
	all = append(all, onPostgres(opts.servers), onPgx(opts.servers), onMariaDB(opts.servers), sleepingOnPostgres(opts.servers))
	for _, trip := range []time.Duration{time.Millisecond, 10 * time.Millisecond} {
		all = append(all, distance(opts.servers, trip))
	}
	all = append(all, manyReceipts(opts))
	var list []study
	for _, s := range all {
		if opts.only != nil && !opts.only.MatchString(s.name) {
			continue
		}
		if s.messages == 0 {
			s.messages = opts.messages
		}
		if opts.quick {
			s.warmUp = min(s.warmUp, 10)
			s.messages = min(max(s.messages, 24), 200)
		}
		list = append(list, s)
	}
	return list
}

// usualWindow is that of the studies that do not ask about it: two full batches.
const usualWindow = 512

func throughput() study {
	return study{
		name: throughputStudy, pair: sqlitePair, window: usualWindow, warmUp: 500, span: time.Second,
		contenders: []contender{doingNothing(), plain(), withHandle(watermillName, loopName), withHandleBatch(watermillName, loopName), byLoop()},
	}
}

// unprepared is throughput with statements as most people write them.
func unprepared() study {
	s := throughput()
	s.name, s.unprepared = unpreparedStudy, true
	return s
}

func batchSize(batch int) study {
	return study{
		name: batchStudy, pair: sqlitePair, window: usualWindow, batch: batch, warmUp: 500, span: time.Second / 2,
		contenders: []contender{withHandle(loopName), withHandleBatch(loopName), byLoop()},
	}
}

func windows(window int) study {
	return study{
		name: windowStudy, pair: sqlitePair, window: window, warmUp: 500, span: time.Second / 2,
		contenders: []contender{plain(), withHandle(watermillName, loopName), byLoop()},
	}
}

func plain() contender {
	return contender{name: watermillName, round: sqlite().on(handWritten(), drain(byHand))}
}

func withHandle(rivals ...string) contender {
	return contender{name: penstockName, rivals: rivals, round: sqlite().on(penstock(), drain(withPenstock))}
}

func withHandleBatch(rivals ...string) contender {
	return contender{name: penstockBatchName, rivals: rivals, round: sqlite().on(penstock(), drain(withPenstockBatch))}
}

func byLoop() contender {
	return contender{name: loopName, round: sqlite().on(handWritten(), loop)}
}
