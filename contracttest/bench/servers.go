package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	_ "github.com/go-sql-driver/mysql" // registers the driver
	_ "github.com/jackc/pgx/v5/stdlib" // registers the driver

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/contracttest/wire"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

const (
	// serverLoops is how many workers the loop by hand has on a server of this machine, and serverPipelines the one on pgx: with
	// these they did best, with two cores for client and server. distantLoops is the same where each statement has a long way.
	serverLoops, serverPipelines = 4, 2
	distantLoops                 = 16
	// serverSpan is how long a round is: opening and preparing on each connection takes some tenths of a second of it.
	serverSpan = 3 * time.Second
	// serverPool leaves every contender as many connections as it asks for.
	serverPool = 20
	// parallel is how many handlers the faster plain router runs at a time.
	parallel = 16
)

// postgres is a database for each round, on a server of backends.
func postgres(servers *backends.Set, trip time.Duration) place {
	return place{
		loops: serverLoops, pipelines: serverPipelines,
		bump: `UPDATE counters SET value = value + 1 WHERE name = $1`,
		seen: `INSERT INTO seen (id, at) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		tables: [2]string{
			`CREATE TABLE counters (name text PRIMARY KEY, value bigint NOT NULL)`,
			`CREATE TABLE seen (id text PRIMARY KEY, at bigint NOT NULL)`,
		},
		store: func(db *sql.DB) (receipts.Store[*sql.Tx], error) {
			return receipts.NewPostgres(db, receipts.PostgresOptions{})
		},
		make: onServer(servers, backends.Postgres, "pgx", trip),
	}
}

// mariadb is a database for each round, on a server of backends.
func mariadb(servers *backends.Set) place {
	return place{
		loops: serverLoops,
		bump:  `UPDATE counters SET value = value + 1 WHERE name = ?`,
		seen:  `INSERT INTO seen (id, at) VALUES (?, ?) ON DUPLICATE KEY UPDATE id = id`,
		tables: [2]string{
			`CREATE TABLE counters (name VARCHAR(64) PRIMARY KEY, value BIGINT NOT NULL) ENGINE = InnoDB`,
			`CREATE TABLE seen (id VARBINARY(64) PRIMARY KEY, at BIGINT NOT NULL) ENGINE = InnoDB`,
		},
		store: func(db *sql.DB) (receipts.Store[*sql.Tx], error) {
			return receipts.NewMySQL(db, receipts.MySQLOptions{})
		},
		make: onServer(servers, backends.MySQL, "mysql", 0),
	}
}

// onServer makes databases on a server, which is trip further away than it is.
func onServer(servers *backends.Set, kind backends.Kind, client string, trip time.Duration) func(context.Context, work) (site, error) {
	return func(ctx context.Context, _ work) (site, error) {
		made, err := servers.Database(ctx, kind)
		if err != nil {
			return site{}, err
		}
		drop := func() error { return servers.Drop(context.WithoutCancel(ctx), made) }
		through := made
		if trip > 0 {
			proxy, err := wire.Open(ctx, wire.Options{Upstream: made.Address, RoundTrip: trip})
			if err != nil {
				return site{}, errors.Join(err, drop())
			}
			through.Address = proxy.Address()
			made := made
			drop = func() error {
				return errors.Join(proxy.Close(), servers.Drop(context.WithoutCancel(ctx), made))
			}
		}
		open := func(use func(*sql.DB) error) (err error) {
			db, err := sql.Open(client, through.DSN())
			if err != nil {
				return err
			}
			db.SetMaxOpenConns(serverPool)
			db.SetMaxIdleConns(serverPool)
			defer func() { err = errors.Join(err, db.Close()) }()
			return use(db)
		}
		return site{open: open, drop: drop, url: through.URL()}, nil
	}
}

// onPostgres compares on a server: one subscription that hands out a message when the one before it is done, sixteen handlers
// side by side, and what commits many messages together.
func onPostgres(servers *backends.Set) study {
	return compare(postgresStudy, "memory → PostgreSQL", postgres(servers, 0))
}

// onMariaDB is the same on MariaDB.
func onMariaDB(servers *backends.Set) study {
	return compare(mariadbStudy, "memory → MariaDB", mariadb(servers))
}

func compare(name, pair string, at place) study {
	return study{
		name: name, pair: pair, window: usualWindow, warmUp: 500, span: serverSpan,
		contenders: []contender{
			{name: watermillName, round: withWindow(1, at.on(handWritten(), drain(byHand)))},
			{name: watermillManyName, round: withWindow(parallel, at.on(handWritten(), drain(byHand)))},
			{name: penstockName, rivals: serverRivals(), round: at.on(penstock(), drain(withPenstock))},
			{name: penstockBatchName, rivals: serverRivals(), round: at.on(penstock(), drain(withPenstockBatch))},
			{name: loopName, round: at.on(handWritten(), loop)},
		},
	}
}

func serverRivals() []string { return []string{watermillName, watermillManyName, loopName} }

// withWindow gives a contender another window than its study's.
func withWindow(window int, round func(context.Context, work) (outcome, error)) func(context.Context, work) (outcome, error) {
	return func(ctx context.Context, w work) (outcome, error) {
		w.window = window
		return round(ctx, w)
	}
}

// distance asks what becomes of it where every answer takes longer.
func distance(servers *backends.Set, trip time.Duration) study {
	at := postgres(servers, trip)
	at.loops = distantLoops
	return study{
		name: distanceStudy, pair: fmt.Sprintf("memory → PostgreSQL, %v away", trip), window: usualWindow, warmUp: 100, span: 2 * time.Second,
		contenders: []contender{
			{name: watermillManyName, round: withWindow(parallel, at.on(handWritten(), drain(byHand)))},
			{name: penstockName, rivals: []string{watermillManyName, loopName}, round: at.on(penstock(), drain(withPenstock))},
			{name: queuedName, rivals: []string{watermillManyName, loopName, pipelineName}, round: at.on(penstock(), drain(withQueue))},
			{name: loopName, round: at.on(handWritten(), loop)},
			{name: pipelineName, round: at.on(handWritten(), pipelinedLoop)},
		},
	}
}

// sleepingOnPostgres is sleeping on a server: Penstock chooses its lanes.
func sleepingOnPostgres(servers *backends.Set) study {
	at := postgres(servers, 0)
	slow := func(s scheme, with handlerOn) func(context.Context, work) (outcome, error) {
		round := at.on(s, drain(with))
		return func(ctx context.Context, w work) (outcome, error) {
			w.nap = nap
			return round(ctx, w)
		}
	}
	return study{
		name: sleepingStudy, pair: "memory → PostgreSQL, handler sleeps 20 ms", window: 16, warmUp: 32, span: 2 * time.Second,
		contenders: []contender{
			{name: watermillName, round: slow(handWritten(), byHand)},
			{name: penstockName, rivals: []string{watermillName}, round: slow(penstock(), withPenstock)},
		},
	}
}
