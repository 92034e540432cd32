// Package wire is a TCP proxy for tests that stands before a database and can lose what passes at a point that is named in
// the database's own terms: the COMMIT is sent and its answer does not come back, the COMMIT never arrives, everything
// falls silent, every answer takes ten milliseconds.
//
//	p := wire.Test(t, wire.Options{Upstream: d.Address, Protocol: wire.Postgres})
//	lost := p.On(wire.Rule{Match: wire.Committed, When: wire.Before, Do: wire.Reset})
//	// … use d.At(p.Address()); <-lost.Fired()
//
// The bytes are forwarded as they came. The protocols of PostgreSQL and MySQL are read only as far as rules need it. There
// are three places where the proxy speaks for itself, because it could not read what is encrypted or compressed: it answers
// a client of PostgreSQL that asks for TLS or GSSAPI with "no", and it takes TLS, compression and query attributes out of
// what a MySQL server offers. A client that insists on TLS cannot be used.
package wire
