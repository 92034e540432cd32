package contracttest_test

import (
	"context"
	"errors"
	"net/url"
	"sync"

	"github.com/go-sql-driver/mysql"

	"github.com/penstock-mq/penstock/contracttest"
	"github.com/penstock-mq/penstock/contracttest/wire"
)

// proxied is a handle on a server through a proxy of its own, which knows what a COMMIT is. It does for any client what
// lossydb does for database/sql, and to the connections themselves.
type proxied struct {
	*wire.Proxy
	at string // the server's URL, with the proxy's address in it
}

// proxyPostgres puts a proxy before the server of a URL.
func proxyPostgres(ctx context.Context, at string) (proxied, error) {
	u, err := url.Parse(at)
	if err != nil {
		return proxied{}, errors.New("the server's address is not a URL")
	}
	p, err := wire.Open(context.WithoutCancel(ctx), wire.Options{Upstream: u.Host, Protocol: wire.Postgres})
	if err != nil {
		return proxied{}, err
	}
	u.Host = p.Address()
	return proxied{Proxy: p, at: u.String()}, nil
}

// proxyMySQL puts a proxy before the server of a client's configuration, and its address into it.
func proxyMySQL(ctx context.Context, config *mysql.Config) (proxied, error) {
	p, err := wire.Open(context.WithoutCancel(ctx), wire.Options{Upstream: config.Addr, Protocol: wire.MySQL})
	if err != nil {
		return proxied{}, err
	}
	config.Addr = p.Address()
	return proxied{Proxy: p}, nil
}

// closingProxy has the proxy closed with the handle that goes through it.
func closingProxy[T any](p proxied, db contracttest.Database[T]) contracttest.Database[T] {
	inner := db.Close
	db.Close = func() error { return errors.Join(inner(), p.Close()) }
	return db
}

// faults are what a proxy can do. Whether a client takes a lost connection for driver.ErrBadConn is its own affair: one is
// reset, the other ended in order in the middle of an answer.
func (p proxied) faults() contracttest.DatabaseFaults {
	return contracttest.DatabaseFaults{
		LoseCommit: func(forwarded, asBadConn bool) func() int {
			rule := wire.Rule{Match: wire.Commit, When: wire.Before, Do: wire.Finish}
			if forwarded {
				rule.Match = wire.Committed
			}
			if asBadConn {
				rule.Do = wire.Reset
			}
			return p.On(rule).Count
		},
		Outages: map[string]outage{
			"stopped": func(context.Context) (func(), func() int, error) {
				undo := p.Refuse()
				cut := p.Cut()
				return undo, func() int { return cut }, nil
			},
			"silent": func(context.Context) (func(), func() int, error) {
				undo := p.Stall()
				return sync.OnceFunc(func() { undo(); p.Cut() }), func() int { return 1 }, nil
			},
		},
	}
}
