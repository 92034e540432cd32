package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/contracttest/stage"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/sdk"
)

const (
	topic = "crowded"
	group = "crowd"
)

// consumerEnv holds a consumerSpec in the environment of a child process; its presence makes a process a consumer.
const consumerEnv = "PENSTOCK_CROWD_CONSUMER"

// consumerSpec is what the parent tells a consumer process.
type consumerSpec struct {
	Socket, Store, Database string
	Window                  int
}

// news is a line of JSON from a consumer to its parent: that it is ready, and at the end what it did.
type news struct {
	Ready  bool                `json:",omitempty"`
	Report *idempotency.Report `json:",omitempty"`
	// Errors counts what was logged as an error, by router, subscriber or middleware; First is the first of them.
	Errors int
	First  string
}

func (n news) tell() error {
	line, err := json.Marshal(n)
	if err == nil {
		stage.Line(os.Stdout, line)
	}
	return err
}

// runConsumer is the child's main.
func runConsumer() error {
	var spec consumerSpec
	return stage.Consumer(consumerEnv, &spec, nil, func(ctx context.Context) error { return consume(ctx, spec) })
}

func consume(ctx context.Context, spec consumerSpec) (err error) {
	broker, err := pipe.Open(ctx, func(ctx context.Context) (io.ReadWriteCloser, error) {
		return new(net.Dialer).DialContext(ctx, "unix", spec.Socket)
	}, 0)
	if err != nil {
		return fmt.Errorf("connect to the broker: %w", err)
	}
	defer func() { err = errors.Join(err, broker.Close(context.Background())) }()
	errs := &errorLog{}
	sub, err := sdk.NewSubscriber(broker, sdk.SubscriberConfig{Group: group, MaxInFlight: spec.Window, Logger: errs})
	if err != nil {
		return fmt.Errorf("make the subscriber: %w", err)
	}
	cfg := idempotency.Config{Consumer: "crowd", Limits: sub.Limits(), Logger: errs}
	return stores()[spec.Store].consume(ctx, spec.Database, cfg, func(m middleware, handler message.NoPublishHandlerFunc) error {
		router := message.NewDefaultRouter(errs)
		router.AddConsumerHandler("crowded", topic, sub, handler)
		ran := make(chan error, 1)
		go func() { ran <- sdk.Run(ctx, router, sub) }()
		select {
		case <-router.Running():
			if err := (news{Ready: true}).tell(); err != nil {
				return err
			}
		case <-ctx.Done():
		}
		if err := <-ran; err != nil {
			return err
		}
		report := m.Report()
		count, first := errs.logged()
		return news{Report: &report, Errors: count, First: first}.tell()
	})
}

// errorLog is a logger that counts errors.
type errorLog struct {
	watermill.NopLogger

	mu    sync.Mutex
	count int
	first string
}

// Error counts.
func (l *errorLog) Error(msg string, err error, _ watermill.LogFields) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.count++; l.count == 1 {
		l.first = fmt.Sprintf("%s: %v", msg, err)
	}
}

// With stays the same logger.
func (l *errorLog) With(watermill.LogFields) watermill.LoggerAdapter { return l }

func (l *errorLog) logged() (count int, first string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count, l.first
}
