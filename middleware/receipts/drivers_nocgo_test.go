//go:build !cgo

package receipts_test

const mattnAbsent = "github.com/mattn/go-sqlite3 needs cgo, which this build is without"
