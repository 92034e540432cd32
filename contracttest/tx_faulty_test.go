package contracttest_test

import (
	"context"
	"database/sql"
	"sync"

	"github.com/penstock-mq/penstock/contracttest/lossydb"
)

// outage is the type of an entry of DatabaseFaults.Outages.
type outage = func(ctx context.Context) (end func(), fired func() int, err error)

// loseCommit is DatabaseFaults.LoseCommit for a store over database/sql.
func loseCommit(c *lossydb.Connector) func(forwarded, asBadConn bool) func() int {
	return func(forwarded, asBadConn bool) func() int {
		err := lossydb.ErrNoCode
		if asBadConn {
			err = nil
		}
		if forwarded {
			return c.LoseCommitAnswer(1, err).Fired
		}
		return c.DropCommit(1, err).Fired
	}
}

// stopped is a database that is not there, as far as a handle can tell.
func stopped(c *lossydb.Connector) outage {
	return func(context.Context) (func(), func() int, error) { return c.Back, c.Outage(nil).Fired, nil }
}

// exhausted is a pool of n connections that others have taken.
func exhausted(db *sql.DB, n int) outage {
	return func(ctx context.Context) (func(), func() int, error) {
		conns, err := takeAll(ctx, db, n)
		return sync.OnceFunc(func() { giveAll(conns) }), func() int { return len(conns) }, err
	}
}

// takeAll takes n connections, which are all, out of the pool.
func takeAll(ctx context.Context, db *sql.DB, n int) ([]*sql.Conn, error) {
	var conns []*sql.Conn
	for range n {
		conn, err := db.Conn(ctx)
		if err != nil {
			giveAll(conns)
			return nil, err
		}
		conns = append(conns, conn)
	}
	return conns, nil
}

func giveAll(conns []*sql.Conn) {
	for _, c := range conns {
		_ = c.Close()
	}
}
