// Package idempotency is a Watermill middleware that commits a handler's database effect and the receipt of its message
// in one SQL transaction, and lets the broker be acknowledged only after that commit. A message that comes again changes
// nothing.
//
// # The flow of one message
//
// A message becomes a pending message: its identity is taken (identity.go), a lane is waited for (lanes.go), a
// transaction begins and the receipt is claimed (transaction.go), the handler runs on a shadow of the message
// (handler.go, shadow.go), its outputs are stored (outputs.go), the transaction commits, and the outputs are published
// (sending.go). flow.go holds these steps together; what can go wrong is told apart in verdict.go and answered in
// retry.go, pause.go, hold.go and divert.go.
//
// # Where other middlewares belong
//
// What retries, times out, recovers or swallows errors belongs outside: it is added before this one, and sees an error
// only after the transaction was rolled back.
//
//   - Retry outside: each attempt is a transaction of its own. A message of a foreign subscriber is held once for each
//     delivery before its first failure is returned, so Retry's own intervals are not added to ours again and again. Set
//     Retry.ShouldRetry to ask [IsFailure] of its Err.
//
//   - PoisonQueue outside: a poisoned message has no receipt here, and its delivery is acknowledged by the router. Use
//     PoisonQueueWithFilter with [IsFailure]: an outage of the database then poisons nothing. Better still, return
//     [Permanent] and let the dead letter be stored here.
//
//   - Recoverer outside: a panic comes through with its own value, after the rollback.
//
//   - Timeout outside: the handler's statements end with the context, and the transaction is rolled back. Watermill leaves
//     the expired context on the message, so a Retry around Timeout needs ResetContextOnRetry.
//
//   - CircuitBreaker outside: an open breaker fails deliveries without asking this package; the subscriber's own backoff
//     is all that slows them.
//
//   - InstantAck and Deduplicator belong nowhere: both settle or forget a message before its effect is durable. So does
//     AckCommandHandlingErrors of a cqrs.CommandProcessor: it swallows the handler's error where nobody can see it, and half
//     of the effect would commit.
//
// What changes outputs, correlation ids and tracing headers for instance, goes into Config.Inside: this middleware takes
// the outputs away, so what is outside never sees them. A middleware inside that swallows the handler's error, or calls
// the handler again after an error, is found out: the transaction does not commit. What it cannot see is a middleware
// that a router puts between [Middleware.Wrap] and a plain handler (added after it): put nothing there that retries or
// swallows.
//
// # What a handler must know
//
// It may run several times for one message, each time in a fresh transaction; only the last one counts. It must not end
// the transaction, and it must not use it after it returned or from several goroutines at once. It writes its effect
// through the transaction it is given, by [Middleware.Handle] or [TxFrom]: what it writes elsewhere is outside the
// promise.
//
// It returns every SQL error. Some can end the transaction: in SQLite an interrupted write (its context ended), a full disk, an
// I/O error, INSERT OR ROLLBACK; so does ROLLBACK as text. A handler that ignores one fails with receipts.ErrTxEnded, and the
// message comes again. What it writes after it SQLite refuses, as far as the store can hold its commit hook; else that commits
// alone, perhaps again at each attempt. For the same reason statements get the handler's context, not one of their own that
// ends sooner.
package idempotency
