package memory

// keepCap is how much room an emptied heap or deque keeps. A burst must not pin its memory for ever.
const keepCap = 1024

// deque is a first in, first out queue in a ring.
type deque[T any] struct {
	ring  []T
	first int
	count int
}

func (d *deque[T]) len() int { return d.count }

// front gives the oldest element. The deque must not be empty.
func (d *deque[T]) front() T { return d.ring[d.first] }

func (d *deque[T]) push(e T) {
	if d.count == len(d.ring) {
		d.grow()
	}
	// The ring's length is a power of two.
	d.ring[(d.first+d.count)&(len(d.ring)-1)] = e
	d.count++
}

func (d *deque[T]) pop() T {
	var none T
	e := d.ring[d.first]
	d.ring[d.first] = none
	d.first = (d.first + 1) & (len(d.ring) - 1)
	d.count--
	if d.count == 0 && len(d.ring) > keepCap {
		d.ring, d.first = nil, 0
	}
	return e
}

func (d *deque[T]) grow() {
	ring := make([]T, max(16, 2*len(d.ring)))
	n := copy(ring, d.ring[d.first:])
	copy(ring[n:], d.ring[:d.first])
	d.ring, d.first = ring, 0
}
