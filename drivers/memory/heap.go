package memory

// node is what an element needs to be in a heap: its rank there, and its place. An element is in one heap at most.
type node struct {
	rank  int64
	place int
}

func (n *node) heapNode() *node { return n }

type ranked interface{ heapNode() *node }

// heap keeps the element of the lowest rank first. Elements know their place, so any of them can be taken out.
type heap[T ranked] struct{ elems []T }

func (h *heap[T]) len() int { return len(h.elems) }

// min gives the element of the lowest rank. The heap must not be empty.
func (h *heap[T]) min() T { return h.elems[0] }

func (h *heap[T]) push(e T) {
	e.heapNode().place = len(h.elems)
	h.elems = append(h.elems, e)
	h.up(len(h.elems) - 1)
}

func (h *heap[T]) pop() T {
	e := h.elems[0]
	h.remove(e)
	return e
}

func (h *heap[T]) remove(e T) {
	var none T
	i, last := e.heapNode().place, len(h.elems)-1
	h.swap(i, last)
	h.elems[last] = none
	h.elems = h.elems[:last]
	if i < last {
		h.settle(i)
	}
	if last == 0 && cap(h.elems) > keepCap {
		h.elems = nil
	}
}

// fix restores the order after the rank of e changed.
func (h *heap[T]) fix(e T) { h.settle(e.heapNode().place) }

func (h *heap[T]) settle(i int) {
	if !h.down(i) {
		h.up(i)
	}
}

func (h *heap[T]) rank(i int) int64 { return h.elems[i].heapNode().rank }

func (h *heap[T]) swap(i, j int) {
	h.elems[i], h.elems[j] = h.elems[j], h.elems[i]
	h.elems[i].heapNode().place = i
	h.elems[j].heapNode().place = j
}

func (h *heap[T]) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if h.rank(parent) <= h.rank(i) {
			return
		}
		h.swap(i, parent)
		i = parent
	}
}

func (h *heap[T]) down(i int) (moved bool) {
	for {
		child := 2*i + 1
		if child >= len(h.elems) {
			return moved
		}
		if right := child + 1; right < len(h.elems) && h.rank(right) < h.rank(child) {
			child = right
		}
		if h.rank(i) <= h.rank(child) {
			return moved
		}
		h.swap(i, child)
		i, moved = child, true
	}
}
