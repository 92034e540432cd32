package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/contracttest/stage"
)

// betweenHalves is a point of the ledger's own.
const betweenHalves stage.Point = "between debit and credit"

// points are the moments at which a consumer is killed, in turn.
func points() []stage.Point {
	return []stage.Point{betweenHalves, stage.BeforeCommit, stage.AfterCommit, stage.AckInFlight, stage.AtRandom}
}

// life is one consumer process, and what it said of itself: to be read after its end.
type life struct {
	*stage.Child
	ready chan struct{} // closed when its router runs
	said  news          // the last counts, and the last words
}

func startLife(spec consumerSpec) (l *life, err error) {
	l = &life{ready: make(chan struct{})}
	l.Child, err = stage.Start(consumerEnv, spec, func(line []byte) {
		var n news
		if json.Unmarshal(line, &n) != nil {
			return
		}
		if n.Ready {
			close(l.ready)
		}
		l.said = n // the last words are the last line
	})
	return l, err
}

// place is where one consumer process works at a time. When it is killed, the next one takes its place.
type place struct {
	spec   consumerSpec
	lives  chan *life    // each, once it is ready
	ending chan struct{} // closed when the work is done
	past   []*life       // after hold
}

func newPlace(spec consumerSpec, ending chan struct{}, kills int) *place {
	return &place{spec: spec, lives: make(chan *life, kills+1), ending: ending}
}

// hold keeps a process in the place until ending, and returns when the last one has ended in order.
func (p *place) hold(ctx context.Context) error {
	for {
		l, err := startLife(p.spec)
		if err != nil {
			return err
		}
		p.past = append(p.past, l)
		if over, err := p.watch(ctx, l); over || err != nil {
			l.Kill()
			return err
		}
	}
}

// watch returns when the process was killed, or all is over.
func (p *place) watch(ctx context.Context, l *life) (over bool, err error) {
	ready, ending := l.ready, p.ending
	for {
		select {
		case <-ready:
			p.lives <- l // has room for all that can be
			ready = nil
		case <-l.Exited():
			if !l.Killed() {
				return true, fmt.Errorf("a consumer ended by itself: %w", l.Ended())
			}
			return false, nil
		case <-ending:
			return true, l.Stop(stopTime)
		case <-ctx.Done():
			return true, ctx.Err()
		}
	}
}

// victim gives the process that works in the place, once it does.
func (p *place) victim(ctx context.Context) (*life, error) {
	patience := time.NewTimer(stallTime)
	defer patience.Stop()
	select {
	case l := <-p.lives:
		return l, nil
	case <-patience.C:
		return nil, fmt.Errorf("no consumer was ready within %s", stallTime)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
