package contracttest_test

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/sony/gobreaker"

	"github.com/penstock-mq/penstock/middleware/idempotency"
)

// shippedMiddleware is one middleware that Watermill ships, with what it does beside ours.
type shippedMiddleware struct {
	name    string
	exports []string // the exported names that it stands for
	make    func(tr *trial) message.HandlerMiddleware
	// outside and inside are the outcomes that differ from those without it.
	outside, inside map[ending]outcome
	// says is what docs/retries.md says of it outside and inside.
	says [2]string
}

func change(o outcome, f func(o *outcome)) outcome {
	f(&o)
	return o
}

// forAll makes the same change to the plain outcome of several endings.
func forAll(f func(o *outcome), ends ...ending) map[ending]outcome {
	changed := map[ending]outcome{}
	for _, end := range ends {
		o := change(plain(end), f)
		if end == away {
			o.deliveries = whatever
		}
		changed[end] = o
	}
	return changed
}

func everyEnding() []ending { return []ending{succeeds, fails, panics, waits, ignores, away} }

// seenOnce is a repository without the goroutine of Watermill's own, which never ends.
type seenOnce struct{ keys sync.Map }

// IsDuplicate tells whether the key was there before.
func (s *seenOnce) IsDuplicate(_ context.Context, key string) (bool, error) {
	_, there := s.keys.LoadOrStore(key, true)
	return there, nil
}

func deduplicator() *middleware.Deduplicator {
	return &middleware.Deduplicator{Repository: &seenOnce{}, KeyFactory: middleware.NewMessageHasherSHA256(1 << 20), Timeout: time.Second}
}

func poisonQueue(tr *trial) message.HandlerMiddleware {
	poison, err := middleware.PoisonQueueWithFilter(tr.poison(), "poison", idempotency.IsFailure)
	if err != nil {
		panic(err)
	}
	return poison
}

// first is one middleware for the first call and another for the later ones: chance with a known result.
func first(one, later message.HandlerMiddleware) message.HandlerMiddleware {
	return func(h message.HandlerFunc) message.HandlerFunc {
		once, then := one(h), later(h)
		var calls atomic.Int64
		return func(msg *message.Message) ([]*message.Message, error) {
			if calls.Add(1) == 1 {
				return once(msg)
			}
			return then(msg)
		}
	}
}

func just(mw message.HandlerMiddleware) func(*trial) message.HandlerMiddleware {
	return func(*trial) message.HandlerMiddleware { return mw }
}

// notMiddlewares are the names in Watermill's package that no router takes, and settings of those it takes.
func notMiddlewares() []string {
	return []string{
		"ErrInvalidPoisonQueueTopic", "ExpiringKeyRepository", "MessageCorrelationID", "MessageHasher",
		"NewMapExpiringKeyRepository", "NewMessageHasherAdler32", "NewMessageHasherFromMetadataField",
		"NewMessageHasherSHA256", "RecoveredPanicError", "RecoveredPanicError.Error", "RetryParams", "SetCorrelationID",
		"Deduplicator.IsDuplicate", "Deduplicator.PublisherDecorator",
	}
}

// shipped is the table: every middleware of Watermill's package message/router/middleware.
func shipped() []shippedMiddleware {
	return slices.Concat(shippedForFailures(), shippedPoisonQueues(), shippedThatRepeat(), shippedForOthers())
}

// shippedForFailures are those that deal with errors, or make some.
func shippedForFailures() []shippedMiddleware {
	moreDeliveries := func(o *outcome) { o.deliveries++ }
	charged := func(o *outcome) { o.deliveries++; o.failed++ }
	return []shippedMiddleware{
		{
			name: "CircuitBreaker", exports: []string{"CircuitBreaker", "NewCircuitBreaker", "CircuitBreaker.Middleware"},
			make: func(*trial) message.HandlerMiddleware {
				return middleware.NewCircuitBreaker(gobreaker.Settings{
					Timeout: 70 * time.Millisecond, IsSuccessful: func(err error) bool { return !idempotency.IsFailure(err) },
					ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures > 0 },
				}).Middleware
			},
			outside: forAll(moreDeliveries, fails, panics, waits),
			inside:  forAll(charged, fails, panics, waits),
			says: [2]string{
				"Good. With `IsSuccessful` asking `IsFailure` it opens for failed attempts only. While it is open, messages go " +
					"back before they reach us, and nobody is charged",
				"Not here: what an open breaker sends back is charged to the message as a failed attempt",
			},
		},
		{
			name: "DelayOnError", exports: []string{"DelayOnError", "DelayOnError.Middleware"},
			make: just((&middleware.DelayOnError{InitialInterval: time.Second, MaxInterval: time.Second, Multiplier: 1}).Middleware),
			says: [2]string{
				"No effect: it writes on the router's copy of the message, and what comes again is the broker's. Return `RetryAfter`",
				"No effect: it writes on the handler's shadow",
			},
		},
		{
			name: "IgnoreErrors", exports: []string{"IgnoreErrors", "NewIgnoreErrors", "IgnoreErrors.Middleware"},
			make: just(middleware.NewIgnoreErrors([]error{errFirst}).Middleware),
			says: [2]string{
				"No effect: it compares texts, and the text it sees also names handler, topic and message. Return `Permanent` to " +
					"give a message up",
				"No effect: an attempt whose handler failed cannot commit, whatever is ignored",
			},
		},
		{
			name: "RandomFail", exports: []string{"RandomFail"},
			make:    just(first(middleware.RandomFail(1), middleware.RandomFail(-1))),
			outside: forAll(moreDeliveries, everyEnding()...), inside: forAll(charged, everyEnding()...),
			says: [2]string{"As meant: such an attempt does not reach us and is not charged", "As meant: such an attempt is charged"},
		},
		{
			name: "RandomPanic", exports: []string{"RandomPanic"},
			make:    just(first(middleware.RandomPanic(1), middleware.RandomPanic(-1))),
			outside: forAll(moreDeliveries, everyEnding()...), inside: forAll(charged, everyEnding()...),
			says: [2]string{"As `RandomFail`", "As `RandomFail`"},
		},
	}
}

// shippedPoisonQueues are those that take failures out of the flow.
func shippedPoisonQueues() []shippedMiddleware {
	poisoned := outcome{deliveries: 1, runs: 1, acks: 1, poisoned: 1, failed: 1}
	poisonedCopy := func(o *outcome) { o.poisoned = 1 }
	unfiltered := func(tr *trial) message.HandlerMiddleware {
		poison, err := middleware.PoisonQueue(tr.poison(), "poison")
		if err != nil {
			panic(err)
		}
		return poison
	}
	return []shippedMiddleware{
		{
			name: "PoisonQueue", exports: []string{"PoisonQueue"}, make: unfiltered,
			outside: map[ending]outcome{
				fails: poisoned, waits: poisoned, away: {deliveries: 1, acks: 1, poisoned: 1},
			},
			inside: forAll(poisonedCopy, fails, waits),
			says: [2]string{
				"**Takes healthy messages** while the database is away: use `PoisonQueueWithFilter`",
				"Not here: each failed attempt leaves a copy on the poison topic, and the message comes again all the same",
			},
		},
		{
			name: "PoisonQueueWithFilter", exports: []string{"PoisonQueueWithFilter"}, make: poisonQueue,
			outside: map[ending]outcome{fails: poisoned, waits: poisoned},
			inside:  forAll(poisonedCopy, fails, waits),
			says: [2]string{
				"Good, with `IsFailure` as its filter. The first failed attempt is the last one, unless there is a `Retry` inside " +
					"it; a panic passes it by, unless there is a `Recoverer` inside it. There is no receipt: sent again, the message " +
					"is new",
				"Not here, as `PoisonQueue`",
			},
		},
	}
}

// shippedThatRepeat are those that run a handler again, or end its run.
func shippedThatRepeat() []shippedMiddleware {
	return []shippedMiddleware{
		{
			name: "Recoverer", exports: []string{"Recoverer"}, make: just(middleware.Recoverer),
			says: [2]string{
				"Good: a panic arrives there when the transaction is rolled back, and is an error from there on",
				"Harmless: the panic is an error already inside, and rolls back as well",
			},
		},
		{
			name: "Retry", exports: []string{"Retry", "Retry.Middleware"},
			make: just(middleware.Retry{
				MaxRetries: 3, InitialInterval: time.Millisecond,
				ShouldRetry: func(p middleware.RetryParams) bool { return idempotency.IsFailure(p.Err) },
			}.Middleware),
			outside: forAll(func(o *outcome) { o.deliveries = 1 }, fails, waits),
			says: [2]string{
				"Good, with `ShouldRetry` asking `IsFailure`: each try is a transaction of its own, and between them none is open. " +
					"Around a `Timeout` it needs `ResetContextOnRetry`",
				"No effect: a transaction that has failed cannot commit, so each further try is refused without running the " +
					"handler; the message comes again",
			},
		},
		{
			name: "Timeout", exports: []string{"Timeout"}, make: just(middleware.Timeout(100 * time.Millisecond)),
			outside: forAll(func(o *outcome) { o.deliveries = whatever }, away),
			says: [2]string{
				"Good: statements end with the context, and the attempt is charged. It stops no handler: what ignores its " +
					"context, and succeeds, is committed, unless `TxBudget` is over too. It also ends the wait for a lane or the " +
					"database, which is not charged",
				"Good, for the handler alone",
			},
		},
	}
}

// shippedForOthers are the rest.
func shippedForOthers() []shippedMiddleware {
	correlated := func(o *outcome) { o.correlated = 1 }
	// An acknowledged delivery's context ends, and what has lost its delivery is not committed.
	// Whether its handler begins at all is a race with that.
	early := outcome{deliveries: 1, runs: whatever, acks: 1, failed: whatever}
	// The second delivery is taken for a duplicate, and inside ours recorded as done.
	duplicate := outcome{deliveries: 2, runs: 1, acks: 1, failed: 1}
	recorded := change(duplicate, func(o *outcome) { o.receipts, o.unused = 1, 1 })
	return []shippedMiddleware{
		{
			name: "CorrelationID", exports: []string{"CorrelationID"}, make: just(middleware.CorrelationID),
			inside: forAll(correlated, everyEnding()...),
			says: [2]string{
				"No effect: our outputs do not pass through the router, unless `OutputsThroughRouter` is set",
				"Good: outputs are stored with the id",
			},
		},
		{
			name: "Deduplicator", exports: []string{"Deduplicator", "Deduplicator.Middleware"},
			make: func(*trial) message.HandlerMiddleware { return deduplicator().Middleware },
			outside: map[ending]outcome{
				fails: duplicate, panics: duplicate, waits: duplicate,
				away: change(duplicate, func(o *outcome) { o.deliveries, o.runs, o.failed = whatever, 0, 0 }),
			},
			inside: map[ending]outcome{fails: recorded, panics: recorded, waits: recorded},
			says: [2]string{
				"**Loses messages**: it marks one before the handler runs, and what failed and comes again is acknowledged as a " +
					"duplicate. Receipts do its work",
				"**Loses messages** in the same way, with a receipt that says they were handled; `RequireTx` refuses that",
			},
		},
		{
			name: "Duplicator", exports: []string{"Duplicator"}, make: just(middleware.Duplicator),
			inside: forAll(func(o *outcome) { o.runs++; o.effects++; o.outputs++ }, everyEnding()...),
			says: [2]string{
				"Harmless: its second run is a replay",
				"**Applies the effect twice** in one transaction, under one receipt",
			},
		},
		{
			name: "InstantAck", exports: []string{"InstantAck"}, make: just(middleware.InstantAck),
			outside: map[ending]outcome{
				succeeds: early, fails: early, panics: early, waits: early, ignores: early, away: early,
			},
			says: [2]string{
				"**Loses messages**: it acknowledges before the work is done. With an `sdk.Subscriber` even the work of a handler " +
					"that succeeds is rolled back, because the context of an acknowledged delivery ends",
				"No effect: it acknowledges the handler's shadow",
			},
		},
		{
			name: "Throttle", exports: []string{"Throttle", "NewThrottle", "Throttle.Middleware"},
			make: func(*trial) message.HandlerMiddleware { return middleware.NewThrottle(100, time.Second).Middleware },
			says: [2]string{
				"Good: it waits before there is a transaction",
				"Not here: it waits with the transaction open, and all others wait for that",
			},
		},
	}
}
