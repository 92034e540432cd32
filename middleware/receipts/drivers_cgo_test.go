//go:build cgo

package receipts_test

import _ "github.com/mattn/go-sqlite3"

const mattnAbsent = ""
