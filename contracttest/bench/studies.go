package main

import (
	"context"
	"time"
)

// study is one comparison: contenders that do the same work in turns.
type study struct {
	// name is what -only selects; pair says what is connected.
	name, pair string
	// window is the most messages in flight; 0 where that means nothing.
	window int
	// warmUp and messages are the sizes of a round. messages 0: as many as take span at the speed of the warm-up.
	warmUp, messages int
	span             time.Duration
	contenders       []contender
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
}

// outcome is what a round measured, and what it did, for the runner to check.
type outcome struct {
	took   time.Duration
	values []value
	// effects are the counters read back after all is closed, by name.
	effects map[string]int64
	// receipts are the rows that prove a message was processed; ignored with noReceipts.
	receipts int
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
	watermillName = "watermill"
	penstockName  = "penstock"
	loopName      = "loop"
)

// sqlitePair is the pair of most studies.
const sqlitePair = "memory → SQLite"

// studies lists what is to be run.
func studies(opts options) []study {
	all := []study{throughput("throughput", 512, time.Second)}
	windows := []int{1, 4, 16, 64, 256, 512}
	if opts.quick {
		windows = []int{1, 16}
	}
	for _, window := range windows {
		all = append(all, throughput("window", window, time.Second/2))
	}
	all = append(all, latency(opts.quick), sleeping(), overhead())
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

func throughput(name string, window int, span time.Duration) study {
	return study{
		name: name, pair: sqlitePair, window: window, warmUp: 500, span: span,
		contenders: []contender{
			{name: watermillName, round: onSQLite(handWritten(), drain(byHand))},
			{name: penstockName, rivals: []string{watermillName, loopName}, round: onSQLite(penstock(), drain(withPenstock))},
			{name: loopName, round: onSQLite(handWritten(), loop)},
		},
	}
}
