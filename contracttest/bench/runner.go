package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"time"

	"github.com/penstock-mq/penstock/contracttest/backends"
)

// runner runs studies.
type runner struct {
	opts options
	dir  string
	show *display
	left []string // why studies were not run
}

// all runs studies one after the other and stops at the first error: numbers of a wrong result are worth nothing.
func (r *runner) all(ctx context.Context, list []study) ([]row, error) {
	var rows []row
	for _, s := range list {
		found, err := r.study(ctx, s)
		if missing := new(backends.Missing); errors.As(err, &missing) {
			r.left = append(r.left, fmt.Sprintf("not run: %s: %v", s.name, missing))
			continue
		}
		if err != nil {
			return nil, err
		}
		rows = append(rows, found...)
	}
	return rows, nil
}

// study warms every contender up, then lets them take turns, so that what else the machine does hits all alike.
func (r *runner) study(ctx context.Context, s study) (_ []row, err error) {
	if s.end != nil {
		defer func() { err = errors.Join(err, s.end()) }()
	}
	sizes := make([]int, len(s.contenders))
	for i, c := range s.contenders {
		var err error
		if sizes[i], err = r.warmUp(ctx, s, c); err != nil {
			return nil, err
		}
	}
	series := make([]series, len(s.contenders))
	for range r.opts.rounds {
		for i, c := range s.contenders {
			r.show.begin(s, c)
			o, err := r.round(ctx, s, c, sizes[i])
			if err != nil {
				return nil, err
			}
			r.show.done()
			series[i].add(o.values)
		}
	}
	return s.rows(series), nil
}

// warmUp runs a contender until its speed is known, and tells how many messages a measured round has.
func (r *runner) warmUp(ctx context.Context, s study, c contender) (size int, err error) {
	r.show.begin(s, c)
	for n := s.warmUp; ; n = min(growth*n, mostMessages) {
		warm, err := r.round(ctx, s, c, n)
		if err != nil {
			return 0, err
		}
		if s.messages > 0 || n == mostMessages || warm.took >= s.span/growth {
			r.show.done()
			return s.size(n, warm.took), nil
		}
	}
}

// growth is by how much a warm-up grows that was too short to tell the speed: starting and stopping a router take time, too.
const growth = 4

// size tells how many messages a measured round has, after so many took so long.
func (s study) size(messages int, took time.Duration) int {
	if s.messages > 0 {
		return s.messages
	}
	speed := float64(messages) / took.Seconds()
	return min(max(int(speed*s.span.Seconds()), s.warmUp/4), mostMessages)
}

// round runs one contender once, in a folder of its own, and checks what it did.
func (r *runner) round(ctx context.Context, s study, c contender, messages int) (o outcome, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("study %s, %s: %w", s.name, c.name, err)
		}
	}()
	if err := ctx.Err(); err != nil {
		return o, err
	}
	dir, err := os.MkdirTemp(r.dir, "round-")
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	runtime.GC() // the last contender's garbage is not this one's burden
	if o, err = c.round(ctx, work{dir: dir, messages: messages, window: s.window, batch: s.batch, unprepared: s.unprepared}); err != nil {
		return o, err
	}
	return o, o.verify(messages)
}

// verify fails unless every message had its effect, once, and its receipt.
func (o outcome) verify(messages int) error {
	if o.nothing {
		return nil
	}
	want := map[string]int64{}
	for i := range messages {
		want[counterName(i)]++
	}
	if !maps.Equal(o.effects, want) {
		var sum int64
		for _, n := range o.effects {
			sum += n
		}
		return fmt.Errorf("%d messages left %d effects, in %d counters instead of %d or unlike what was sent: the result is wrong",
			messages, sum, len(o.effects), len(want))
	}
	if o.receipts != noReceipts && o.receipts != messages {
		return fmt.Errorf("%d messages left %d receipts: the result is wrong", messages, o.receipts)
	}
	return nil
}

// series are one contender's values over all rounds, by metric in the order in which they are reported.
type series []measured

type measured struct {
	value
	amounts []float64
}

func (s *series) add(values []value) {
	for i, v := range values {
		if i == len(*s) {
			*s = append(*s, measured{value: v})
		}
		(*s)[i].amounts = append((*s)[i].amounts, v.amount)
	}
}

// rows gives one row for each contender, metric and rival; one without rival where it has none.
func (s study) rows(all []series) []row {
	medians := map[[2]string]float64{}
	for i, c := range s.contenders {
		for _, m := range all[i] {
			medians[[2]string{c.name, m.metric}] = median(m.amounts)
		}
	}
	var rows []row
	for i, c := range s.contenders {
		rivals := c.rivals
		if len(rivals) == 0 {
			rivals = []string{""}
		}
		for _, m := range all[i] {
			for _, rival := range rivals {
				r := row{
					Study: s.name, Pair: s.pair, Window: s.window, Batch: s.batch, Contender: c.name, Metric: m.metric, Unit: m.unit,
					Median: median(m.amounts), Min: slices.Min(m.amounts), Max: slices.Max(m.amounts), Rival: rival,
				}
				if theirs := medians[[2]string{rival, m.metric}]; rival != "" && theirs > 0 {
					r.Ratio = r.Median / theirs
				}
				rows = append(rows, r)
			}
		}
	}
	return rows
}

// median is the middle value, or the mean of the two in the middle.
func median(amounts []float64) float64 {
	sorted := slices.Sorted(slices.Values(amounts))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
