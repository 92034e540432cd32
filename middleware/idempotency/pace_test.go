package idempotency

import (
	"math/rand/v2"
	"testing"
	"time"
)

// rates is how many messages a second so many transactions at a time do.
type rates func(lanes int) float64

// twoCores is what PostgreSQL and its client did on the same two cores.
func twoCores(lanes int) float64 {
	return []float64{0, 8700, 11000, 12400, 11500, 10400, 9400, 9000, 8600}[min(lanes, 8)]
}

// faraway is a database that one transaction leaves idle most of the time.
func faraway(lanes int) float64 { return 2000 * float64(lanes) }

// middling gets no more from the seventh lane on.
func middling(lanes int) float64 { return 3000 * float64(min(lanes, 6)) }

// drive has n transactions of 50 messages end, and tells how many messages a second that was.
func drive(p *pace, n int, do rates, noise float64, r *rand.Rand) float64 {
	start := time.Unix(0, 0)
	now := start
	for range n {
		rate := do(p.now()) * (1 + noise*(2*r.Float64()-1))
		now = now.Add(time.Duration(50 / rate * float64(time.Second)))
		p.ended(50, p.now(), time.Millisecond, now)
	}
	return float64(50*n) / now.Sub(start).Seconds()
}

func TestPaceFindsTheBestNumber(t *testing.T) {
	for name, c := range map[string]struct {
		do       rates
		from, to int
		best     float64
	}{
		"two cores": {twoCores, 2, 5, 12400},
		"far away":  {faraway, 16, 16, 32000},
		"middling":  {middling, 5, 8, 18000},
		"flat":      {func(int) float64 { return 9000 }, 1, 2, 9000},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			p := &pace{most: 16}
			drive(p, 4000, c.do, 0.2, r)
			if p.base < c.from || p.base > c.to {
				t.Errorf("it stays with %d, want %d to %d", p.base, c.from, c.to)
			}
			if got := drive(p, 20000, c.do, 0.2, r); got < 0.9*c.best {
				t.Errorf("trials and all it does %.0f messages a second, want nearly %.0f", got, c.best)
			}
		})
	}
}

// What was right may become wrong: the search goes on.
func TestPaceFollowsItsHandler(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	p := &pace{most: 16}
	for _, c := range []struct {
		do       rates
		from, to int
	}{{twoCores, 2, 5}, {faraway, 12, 16}, {twoCores, 2, 5}} {
		drive(p, 30000, c.do, 0.1, r)
		if p.base < c.from || p.base > c.to {
			t.Errorf("it stays with %d, want %d to %d", p.base, c.from, c.to)
		}
	}
}

// Where messages are scarce, fewer lanes would do as much: that says nothing of how many there should be when many come.
func TestPaceLearnsNothingFromIdleLanes(t *testing.T) {
	p := &pace{most: 16}
	now := time.Unix(0, 0)
	for range 2000 {
		now = now.Add(10 * time.Millisecond)
		p.ended(1, 1, time.Millisecond, now)
	}
	if p.now() != fewLanes {
		t.Errorf("%d lanes, want %d still", p.now(), fewLanes)
	}
}

// Between bursts nothing is done, however many lanes there are.
func TestPaceDoesNotCountPauses(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	p := &pace{most: 16}
	now := time.Unix(0, 0)
	for i := range 30000 {
		if i%300 == 0 {
			now = now.Add(time.Minute)
		}
		now = now.Add(time.Duration(50 / (faraway(p.now()) * (0.9 + 0.2*r.Float64())) * float64(time.Second)))
		p.ended(50, p.now(), time.Millisecond, now)
		if fastest := 50 * 300 / time.Minute.Seconds(); p.rate > 0 && p.rate <= fastest {
			t.Fatalf("%.0f messages a second were measured over a pause", p.rate)
		}
	}
	if p.base < 12 {
		t.Errorf("it stays with %d, want 12 to 16", p.base)
	}
}

func TestPaceBegins(t *testing.T) {
	for name, c := range map[string]struct {
		most int
		mean time.Duration
		want int
	}{
		"a single writer":      {1, time.Millisecond, 1},
		"fewer than few":       {3, time.Millisecond, 3},
		"a fast handler":       {16, 4 * time.Millisecond, fewLanes},
		"a handler that waits": {16, 5 * time.Millisecond, 16},
	} {
		p := &pace{most: c.most}
		if p.now() != c.most {
			t.Errorf("%s: %d lanes before anything is known, want all of %d", name, p.now(), c.most)
		}
		p.ended(1, 1, c.mean, time.Unix(0, 0))
		if p.now() != c.want {
			t.Errorf("%s: %d lanes, want %d", name, p.now(), c.want)
		}
	}
}
