//go:build race

package receipts_test

// randomKeys is lower under the race detector, which makes modernc 29 times slower; the run without it has all.
const randomKeys = 1_000
