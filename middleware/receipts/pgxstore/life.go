package pgxstore

import (
	"net"
	"sync"
	"time"
)

// life tells who may end a transaction, its caller or the end of its budget, and cuts its connection off.
type life struct {
	mu      sync.Mutex
	timer   *time.Timer
	closing bool
	expired bool
	wire    net.Conn
	severed bool
}

// begin starts the clock of the budget.
func (l *life) begin(budget time.Duration, outlive func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer = time.AfterFunc(budget, outlive)
}

// take claims the right to end the transaction. Only one caller gets it.
func (l *life) take() (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return false
	}
	l.closing = true
	if l.timer != nil {
		l.timer.Stop()
	}
	return true
}

// expire is take for the end of the budget.
func (l *life) expire() (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return false
	}
	l.closing, l.expired = true, true
	return true
}

func (l *life) isExpired() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.expired
}

// hold names the connection that sever cuts off.
func (l *life) hold(wire net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wire = wire
}

// release is hold of nothing. It tells whether the connection was cut off.
func (l *life) release() (severed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wire = nil
	return l.severed
}

// sever makes whatever happens on the connection fail, from another goroutine. pgx then closes it, and asks the server to
// cancel the statement.
func (l *life) sever() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wire != nil {
		l.severed = true
		_ = l.wire.SetDeadline(time.Unix(1, 0))
	}
}
