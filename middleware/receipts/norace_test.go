//go:build !race

package receipts_test

const randomKeys = 10_000
