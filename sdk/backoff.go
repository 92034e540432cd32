package sdk

import (
	"math/rand/v2"
	"time"
)

// Backoff is a capped exponential delay with full jitter above its minimum. The zero value means 100 ms to 1 min.
type Backoff struct {
	Min, Max time.Duration
}

// The default bounds of a Backoff.
const (
	DefaultBackoffMin = 100 * time.Millisecond
	DefaultBackoffMax = time.Minute
)

// Ceiling is the longest delay after the given attempt (1 is the first): Min doubled with each attempt, at most Max.
func (b Backoff) Ceiling(attempt int) time.Duration {
	b = b.orDefault()
	ceiling := b.Min
	for i := 0; i < attempt && ceiling < b.Max; i++ {
		ceiling *= 2
	}
	return min(ceiling, b.Max)
}

// Delay draws a delay between Min and Ceiling(attempt). It is never below Min, so nothing that uses it spins.
func (b Backoff) Delay(attempt int) time.Duration {
	b = b.orDefault()
	span := b.Ceiling(attempt) - b.Min
	if span <= 0 {
		return b.Min
	}
	return b.Min + rand.N(span+1)
}

func (b Backoff) orDefault() Backoff {
	if b.Min <= 0 {
		b.Min = DefaultBackoffMin
	}
	if b.Max <= 0 {
		b.Max = DefaultBackoffMax
	}
	if b.Max < b.Min {
		b.Max = b.Min
	}
	return b
}
