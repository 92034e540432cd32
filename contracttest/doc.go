// Package contracttest is the contract of a Penstock driver as numbered clauses, and the suite that checks them.
//
// A driver author writes a [Harness] with one required function, Open, and calls [Run] from a test, or [Check] from any
// program, which returns a [Report]. Each [Clause] is one small function that observes from outside: what was delivered,
// what the broker still holds. It never concludes anything from a returned nil alone, and it never waits a while to see
// nothing: that something does not come is shown by a fence, a message that was sent later and came first.
//
// A clause that needs a capability which the driver does not declare, or a hook which the harness does not have, is not
// run, and the report names what was missing. A waived clause still runs, and has to fail.
//
// An id with a suffix, such as D06/kill, is a further check of the same clause, which needs more than the plain one.
package contracttest

//go:generate go run ./internal/gendocs ../docs/contract.md
