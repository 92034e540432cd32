package memory

// keyState is an order key that has messages in flight or blocked.
type keyState struct {
	node
	key      string
	owner    *source // who has messages of the key in flight; meaningless while inFlight is 0
	inFlight int
	blocked  heap[*item]      // ready messages of the key, by seq
	in       *heap[*keyState] // where the key waits to be found: its owner's heap, the queue's freeKeys, or nil
}

// block moves a ready message to its key's blocked heap if s may not have it, and tells whether it did.
func (q *queue) block(it *item, s *source) bool {
	if it.msg.Key == "" {
		return false
	}
	ks := q.keys[it.msg.Key]
	if ks == nil || ks.inFlight == 0 || ks.owner == s {
		return false
	}
	it.rank = it.seq
	ks.blocked.push(it)
	q.place(ks)
	return true
}

// unblock takes out the oldest blocked message of a key. The caller hands it out, and own places the key anew.
func (q *queue) unblock(ks *keyState) *item {
	return ks.blocked.pop()
}

// own notes that s now has the message in flight, and with it the message's key.
func (q *queue) own(it *item, s *source) {
	key := it.msg.Key
	if key == "" {
		return
	}
	ks := q.keys[key]
	if ks == nil {
		ks = &keyState{key: key}
		q.keys[key] = ks
	}
	ks.owner = s
	ks.inFlight++
	q.place(ks)
}

// disown places the key of a message that left its source for good, or for a delay.
func (q *queue) disown(it *item) {
	if ks := q.keys[it.msg.Key]; ks != nil {
		q.place(ks)
	}
}

// place puts a key where it belongs after its blocked heap or its number in flight changed, and forgets it when nothing
// is left of it.
func (q *queue) place(ks *keyState) {
	var want *heap[*keyState]
	if ks.blocked.len() > 0 {
		want = &q.freeKeys
		if ks.inFlight > 0 {
			want = &ks.owner.keys
		}
	}
	if ks.in != nil && ks.in != want {
		ks.in.remove(ks)
		ks.in = nil
	}
	if want != nil {
		ks.rank = ks.blocked.min().seq
		if ks.in == nil {
			ks.in = want
			want.push(ks)
		} else {
			want.fix(ks)
		}
	}
	if ks.inFlight == 0 && ks.blocked.len() == 0 {
		delete(q.keys, ks.key)
	}
}
