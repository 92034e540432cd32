package idempotency

import (
	"fmt"
	"sync/atomic"
	"time"
)

// stretch is a run of handlers of one batch in one goroutine, which is not the one that holds the lane: a handler may stand
// still, panic or end its goroutine, and the batch goes on without it. It is not the messages' own goroutines either, which
// a router makes anew for each message: every one would have to grow its stack for the database client, and that costs more
// than the middleware itself (docs/performance.md).
type stretch struct {
	state    atomic.Uint32
	handling atomic.Pointer[handling] // the context of the handler that runs
	ended    chan stretchEnd
}

const (
	stretchIdle      = iota // between handlers
	stretchRunning          // in a handler
	stretchAbandoned        // in a handler that outlived its transaction
	stretchClosed           // no handler starts any more: the budget is over
)

// stretchEnd is how a stretch ended: ok, the transaction can go on; or, left is true, the handler of message number at did
// not return.
type stretchEnd struct {
	ok, left bool
	at       int
}

// start begins a handler, unless the budget is over.
func (s *stretch) start() bool { return s.state.CompareAndSwap(stretchIdle, stretchRunning) }

// returned ends a handler. It fails where the stretch was abandoned meanwhile.
func (s *stretch) returned() bool { return s.state.CompareAndSwap(stretchRunning, stretchIdle) }

// abandon gives up waiting for a handler. It fails where none runs: the stretch then ends by itself.
func (s *stretch) abandon() bool {
	for {
		switch {
		case s.state.CompareAndSwap(stretchRunning, stretchAbandoned):
			if ctx := s.handling.Load(); ctx != nil {
				ctx.expire()
			}
			return true
		case s.state.CompareAndSwap(stretchIdle, stretchClosed), s.state.Load() == stretchClosed:
			return false
		}
	}
}

// runEach runs the handlers of several messages, one after the other. One whose handler did not return runs again, alone,
// in its own goroutine, where a panic reaches the router with its stack.
func (b *batch[T]) runEach(run []*pending[T]) bool {
	timer := time.NewTimer(b.m.cfg.TxBudget - time.Since(b.begun))
	defer timer.Stop()
	late := false
	for from := 0; from < len(run); {
		s := &stretch{ended: make(chan stretchEnd, 1)}
		if late {
			s.state.Store(stretchClosed)
		}
		at := new(atomic.Int64)
		go b.runFrom(s, run, from, at)
		var end stretchEnd
		select {
		case end = <-s.ended:
		case <-timer.C:
			if s.abandon() {
				run[at.Load()].gone = true // its own goroutine waits for the handler
				b.rest(again(0, nil))
				return false
			}
			late = true
			end = <-s.ended
		}
		if !end.left {
			return end.ok
		}
		if called := run[end.at].called; !called.Before(b.begun) {
			b.account(time.Since(called))
		}
		if !b.undo(run[end.at], again(1, errPanicked), run, end.at) {
			return false
		}
		from = end.at + 1
	}
	return true
}

// runFrom is the goroutine of a stretch.
func (b *batch[T]) runFrom(s *stretch, run []*pending[T], from int, at *atomic.Int64) {
	end := stretchEnd{left: true}
	defer func() {
		value := recover()
		end.at = int(at.Load())
		if !s.returned() && s.state.Load() == stretchAbandoned { // a handler that did not return is not running any more
			b.outlived(run[end.at], value)
			return
		}
		s.ended <- end
	}()
	for i := from; i < len(run); i++ {
		at.Store(int64(i))
		if !b.next(s, run, i) {
			end.left = false
			return
		}
	}
	end.left, end.ok = false, true
}

// outlived tells a message that its handler has returned, or not, after its transaction was given up.
func (b *batch[T]) outlived(p *pending[T], value any) {
	if value != nil {
		p.err = fmt.Errorf("the handler panicked: %v", value)
	}
	p.handling.Load().stop()
	p.v = p.outlived(b.m.cfg.TxBudget)
	p.wake <- struct{}{}
}
