package sdk

import "sync"

// topicsKept bounds the book of programs that make up a topic per message.
const topicsKept = 1 << 16

// topicBook remembers which topics were prepared. Two first publishers of a topic may prepare it twice, which is harmless:
// Prepare is idempotent. The zero value is empty.
type topicBook struct {
	mu       sync.RWMutex
	prepared map[string]struct{}
}

func (b *topicBook) known(topic string) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	_, ok := b.prepared[topic]
	return ok
}

func (b *topicBook) remember(topic string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.prepared == nil || len(b.prepared) >= topicsKept {
		b.prepared = map[string]struct{}{}
	}
	b.prepared[topic] = struct{}{}
}

func (b *topicBook) forget(topic string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.prepared, topic)
}
