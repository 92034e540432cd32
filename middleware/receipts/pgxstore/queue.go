package pgxstore

import "sync"

// queue holds the statements that wait to be sent, and whose they are. It has a lock of its own: a statement may be queued by
// what pgx calls while another one runs.
type queue struct {
	mu     sync.Mutex
	list   []queued
	member int
}

type queued struct {
	sql    string
	args   []any
	member int
}

// belongsTo says whose the statements are that are queued from now on.
func (q *queue) belongsTo(member int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.member = member
}

// current is whose statements are queued now.
func (q *queue) current() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.member
}

func (q *queue) push(sql string, args []any) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.list = append(q.list, queued{sql: sql, args: args, member: q.member})
}

func (q *queue) pushOf(member int, sql string, args []any) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.list = append(q.list, queued{sql: sql, args: args, member: member})
}

func (q *queue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.list) == 0
}

// take gives what is queued, and empties the queue.
func (q *queue) take() []queued {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := q.list
	q.list = nil
	return list
}
