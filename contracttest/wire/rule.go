package wire

import (
	"errors"
	"sync"
)

// When says on which side of a message a rule acts.
type When uint8

// The two moments.
const (
	// Before the message is forwarded: it does not arrive, if the action ends or silences the connection.
	Before When = iota + 1
	// After the message was handed to the operating system for the other end, which still gets it if the action ends the
	// connection. If the action ends or silences the connection, nothing that the other end sends from this message on
	// arrives, its answer least of all. In PostgreSQL's extended protocol a Sync follows an Execute as a message of its own.
	After
)

// Action is what a rule does to the connection.
type Action uint8

// The actions.
const (
	// Pass does nothing but call Rule.Call.
	Pass Action = iota
	// Reset ends both halves of the connection at once, with RST.
	Reset
	// Finish ends both halves of the connection in order, with FIN.
	Finish
	// Swallow stops forwarding in both directions and keeps both connections open, whatever the ends do, until Cut or
	// Close: what comes is read and thrown away. The server keeps its session.
	Swallow
)

// Rule acts at messages that match.
type Rule struct {
	// Match picks the messages. It is called for every message of every connection, from several goroutines, and does not
	// block.
	Match func(Message) bool
	When  When
	Do    Action
	// Call, where set, is called before the action. Until it returns, nothing is forwarded in the message's direction, and
	// Close waits.
	Call func(Message)
	// Skip lets so many matching messages pass first.
	Skip int
	// Times is how often the rule acts; 0 is once, a negative number is always.
	Times int
}

// Fault is a rule in use.
type Fault struct {
	rule   Rule
	remove func()

	mu    sync.Mutex
	seen  int
	acted int
	fired chan struct{}
}

// Fired is closed when the rule has acted for the first time: a test has to see that.
func (f *Fault) Fired() <-chan struct{} { return f.fired }

// Count is how often the rule has acted.
func (f *Fault) Count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.acted
}

// Remove takes the rule out of use. What it has done to connections stays.
func (f *Fault) Remove() { f.remove() }

// takes tells whether the rule acts at the message, and counts it.
func (f *Fault) takes(m Message) bool {
	if !f.rule.Match(m) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen++
	nth := f.seen - f.rule.Skip
	return nth > 0 && (f.rule.Times < 0 || nth <= max(f.rule.Times, 1))
}

// done notes that the rule has acted.
func (f *Fault) done() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.acted++; f.acted == 1 {
		close(f.fired)
	}
}

func (r Rule) check() error {
	switch {
	case r.Match == nil:
		return errors.New("a rule without Match")
	case r.When != Before && r.When != After:
		return errors.New("a rule has to say When: Before or After")
	case r.Do > Swallow:
		return errors.New("a rule with an unknown action")
	case r.Do == Pass && r.Call == nil:
		return errors.New("a rule that does nothing: set Do or Call")
	}
	return nil
}
