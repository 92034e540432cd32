package main

import (
	"context"
	"database/sql"
	"errors"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // registers the driver

	"github.com/penstock-mq/penstock/contracttest/backends"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

const (
	// serverLanes is how many transactions Penstock runs at a time on a server, and how many workers the loop has.
	serverLanes = 8
	// serverPool leaves every contender as many connections as it asks for.
	serverPool = 20
	// parallel is how many handlers the faster plain router runs at a time.
	parallel = 16
)

// postgres is a database for each round, on a server of backends.
func postgres(servers *backends.Set) place {
	return place{
		lanes: serverLanes,
		bump:  `UPDATE counters SET value = value + 1 WHERE name = $1`,
		seen:  `INSERT INTO seen (id, at) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		tables: [2]string{
			`CREATE TABLE counters (name text PRIMARY KEY, value bigint NOT NULL)`,
			`CREATE TABLE seen (id text PRIMARY KEY, at bigint NOT NULL)`,
		},
		store: func(db *sql.DB) (receipts.Store[*sql.Tx], error) {
			return receipts.NewPostgres(db, receipts.PostgresOptions{})
		},
		with: onServer(servers, backends.Postgres, "pgx"),
	}
}

func onServer(servers *backends.Set, kind backends.Kind, client string) func(context.Context, work) (func(func(*sql.DB) error) error, func() error, error) {
	return func(ctx context.Context, _ work) (func(func(*sql.DB) error) error, func() error, error) {
		made, err := servers.Database(ctx, kind)
		if err != nil {
			return nil, nil, err
		}
		open := func(use func(*sql.DB) error) (err error) {
			db, err := sql.Open(client, made.DSN())
			if err != nil {
				return err
			}
			db.SetMaxOpenConns(serverPool)
			db.SetMaxIdleConns(serverPool)
			defer func() { err = errors.Join(err, db.Close()) }()
			return use(db)
		}
		return open, func() error { return servers.Drop(context.WithoutCancel(ctx), made) }, nil
	}
}

// onPostgres compares on a server: one subscription that hands out a message when the one before it is done, sixteen handlers
// side by side, and what commits many messages together.
func onPostgres(servers *backends.Set) study {
	at := postgres(servers)
	return study{
		name: postgresStudy, pair: "memory → PostgreSQL", window: usualWindow, warmUp: 200, span: time.Second,
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
