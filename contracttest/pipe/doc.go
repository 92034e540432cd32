// Package pipe is a [sdk.Driver] for a child process whose broker lives in its parent, so that a consumer can be killed
// without taking the broker along. The parent runs a [Server] in front of any driver; the child opens a [Driver] with a
// function that dials the parent. When the connection ends, for whatever reason, the parent closes the sources that were
// opened over it at once: what a dead child did not settle goes back to the broker.
//
// One frame is a length of four bytes and one gob value. A frame larger than the limit ends the connection; the driver
// splits batches so that it never sends one. Calls overlap; answers come in any order and carry the number of their call.
package pipe
