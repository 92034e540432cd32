package memory

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// elem is something in a heap.
type elem struct{ node }

func TestHeap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var h heap[*elem]
		var in []*elem
		take := func(e *elem) {
			in = slices.DeleteFunc(in, func(x *elem) bool { return x == e })
		}
		rank := rapid.Int64Range(0, 20)
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			switch action := rapid.IntRange(0, 4).Draw(t, "action"); {
			case action < 2 || len(in) == 0:
				e := &elem{node{rank: rank.Draw(t, "rank")}}
				h.push(e)
				in = append(in, e)
			case action == 2:
				take(h.pop())
			case action == 3:
				e := rapid.SampledFrom(in).Draw(t, "removed")
				h.remove(e)
				take(e)
			default:
				e := rapid.SampledFrom(in).Draw(t, "fixed")
				e.rank = rank.Draw(t, "rank")
				h.fix(e)
			}
			if h.len() != len(in) {
				t.Fatalf("%d elements, want %d", h.len(), len(in))
			}
			for i, e := range h.elems {
				if e.place != i || !slices.Contains(in, e) {
					t.Fatalf("element at %d believes to be at %d", i, e.place)
				}
			}
		}
		for last := int64(-1); h.len() > 0; {
			e := h.pop()
			if e.rank < last {
				t.Fatalf("rank %d after %d", e.rank, last)
			}
			last = e.rank
		}
	})
}

func TestDeque(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var d deque[int]
		var want []int
		for i := range rapid.IntRange(0, 200).Draw(t, "steps") {
			if len(want) > 0 && rapid.IntRange(0, 2).Draw(t, "action") == 0 {
				if front, e := d.front(), d.pop(); front != e || e != want[0] {
					t.Fatalf("front %d, popped %d, want %d", front, e, want[0])
				}
				want = want[1:]
			} else {
				d.push(i)
				want = append(want, i)
			}
			if d.len() != len(want) {
				t.Fatalf("%d elements, want %d", d.len(), len(want))
			}
		}
	})
}

// An emptied structure gives back what a burst took.
func TestStructuresShrink(t *testing.T) {
	var d deque[int]
	var h heap[*elem]
	for i := range 100 * keepCap {
		d.push(i)
		h.push(&elem{})
	}
	for d.len() > 0 {
		d.pop()
		h.pop()
	}
	if len(d.ring) > keepCap || cap(h.elems) > keepCap {
		t.Errorf("room for %d and %d is kept", len(d.ring), cap(h.elems))
	}
	d.push(1)
	if d.pop() != 1 {
		t.Error("the deque does not work any more")
	}
}
