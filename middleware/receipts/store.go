// Package receipts keeps the rows that prove a message identity was processed, in the same SQL transaction as the
// effect, together with stored outputs and dead letters. One file per dialect implements [Store].
//
// The flow of one transaction: [Store.Begin], [Tx.Claim], the handler's own statements on [Tx.Raw], [Tx.AddOutputs],
// [Tx.Commit]. Where several messages share it, what each of them writes is between [Tx.Part] and [Tx.Keep]. Every receipt
// carries its transaction's [Nonce], and a transaction with fresh claims writes one marker row just before COMMIT. A receipt
// proves something only while its marker exists: without one it is torn.
//
// How handlers write through the transaction with sqlx, sqlc, bun, GORM or ent is in docs/database-clients.md.
package receipts

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"time"
)

// The largest scope and identity key, in bytes. Every dialect stores and compares them as bytes.
const (
	MaxScope = 512
	MaxKey   = 512
)

// The errors callers compare against with errors.Is.
var (
	// ErrCommitUnknown: COMMIT was sent and its answer was lost, or is not one that proves "not committed". The
	// connection is gone; ask Store.Resolve with the transaction's nonce.
	ErrCommitUnknown = errors.New("outcome of COMMIT is unknown")
	// ErrTxEnded: the transaction was ended by someone else than the store before Commit: the handler committed, rolled
	// back, executed COMMIT as text, or ignored an error that ended it. No marker was written. Where the store holds the
	// database's commit hook (SQLite, see [SQLiteOptions]) nothing of that transaction is durable, nor what was written after
	// its end. Elsewhere a commit stays, receipts included, which are torn; and what was written after the end may stay, by
	// each attempt again.
	ErrTxEnded = errors.New("the transaction ended inside the handler: it committed or rolled back, or ignored an error that " +
		"did (an interrupted or failed write)")
	// ErrBudgetEnded: TxOptions.Budget ended before COMMIT was sent. The transaction is rolled back and its lock released;
	// nothing of it is committed. A handler that was still running saw sql.ErrTxDone, or what its client says instead.
	ErrBudgetEnded = errors.New("the transaction's budget ended")
	// ErrSchemaMissing: the tables are not there; run Migrate, or the printed SQL files.
	ErrSchemaMissing = errors.New("receipt tables are missing")
	// ErrSchemaNewer: the tables were made by a newer version than this one can run on.
	ErrSchemaNewer = errors.New("receipt tables are newer than this version of penstock")
)

// Store hides a dialect and its transaction type T. It is safe for concurrent use and holds no session state: the
// database handle it was made from belongs to the caller, who closes it.
type Store[T any] interface {
	// Check verifies the handle (it can begin as a writer, its pool suffices) and the schema's version. Its error says
	// what to change.
	Check(ctx context.Context) (Info, error)
	// Migrate brings the schema to this version. It is idempotent and safe to run from several processes at once.
	Migrate(ctx context.Context) error
	// Begin starts a transaction as a writer. ctx bounds waiting for a connection and for the lock only; after Begin
	// returned, only Commit, Rollback or the end of opts.Budget end the transaction.
	Begin(ctx context.Context, opts TxOptions) (Tx[T], error)
	// Resolve tells whether the transaction with this nonce, which had fresh claims when it was committed, did commit. It is
	// called after the old session is known to have ended. An error means undecided. Of a transaction that gave up all its
	// claims it says false, also where dead letters that it stored are there: those may be stored again.
	Resolve(ctx context.Context, nonce Nonce) (committed bool, err error)
	// Unsent lists stored outputs that are not marked as sent, oldest first, in commit order as far as the clock tells.
	// Those that go through the router, and those of a torn receipt, are left out.
	Unsent(ctx context.Context, q UnsentQuery) ([]Output, error)
	// Outputs lists all outputs stored with one receipt, sent or not, in their order.
	Outputs(ctx context.Context, scope string, key []byte) ([]Output, error)
	// MarkSent marks outputs as sent at the given time. Marking twice is nil.
	MarkSent(ctx context.Context, refs []OutputRef, at time.Time) error
	// DeadLetters lists dead letters, oldest first, at most limit.
	DeadLetters(ctx context.Context, limit int) ([]DeadLetter, error)
	// Stats counts what the tables hold. It reads whole tables: for reports and tests, not for the flow of messages.
	Stats(ctx context.Context) (Stats, error)
	// Classify tells by error code, never by text, what an error of this database means.
	Classify(err error) Class
}

// Tx is one open transaction. It is used by one goroutine at a time.
type Tx[T any] interface {
	// Raw gives the transaction that handlers write their effect with. They must not end it; one that does is refused, or found
	// out by Keep, Undo and Commit: ErrTxEnded.
	Raw() T
	// Nonce names this transaction in its receipts, outputs and marker.
	Nonce() Nonce
	// Claim inserts a receipt for each claim, in key order, in as few statements as the database takes, and answers in the
	// order of the claims. A receipt that was there before is returned, not touched; one that this transaction claimed earlier
	// is ClaimHeld, with this transaction's nonce. Claims of one call must be distinct. An identity that another open
	// transaction has claimed is waited for, until that one ends, ctx is done or TxOptions.ClaimWait is over; the last two are
	// contention for Classify. After an error only Rollback is left.
	Claim(ctx context.Context, claims []Claim) ([]ClaimResult, error)
	// Unclaim deletes receipts that this transaction claimed freshly: those messages stay without one, and may be claimed again
	// in the same transaction. Claims name them by scope and key. One that is not this transaction's is left alone.
	Unclaim(ctx context.Context, claims []Claim) error
	// Part begins the part of one message: what is written from here on can be undone alone. Parts follow each other and do
	// not nest; Claim, Unclaim and Commit are refused inside one. Once a transaction has parts, handlers use Raw inside them
	// only. Part, Keep and Undo are for stores whose Info.Parts is true.
	Part(ctx context.Context) error
	// Keep ends the part: it is committed if the transaction is. nil proves that the transaction is still open. ErrTxEnded: it
	// was ended inside this part. ErrBudgetEnded: by its budget. Any other error that is neither contention nor an outage for
	// Classify is this part's fault, rows of a writing statement that its handler left open say. After an error only Rollback is
	// left.
	Keep(ctx context.Context) error
	// Undo undoes the part, outputs and dead letters included, and ends it. What AddOutputs answered inside the part is void:
	// its positions do not come again. Errors are those of Keep.
	Undo(ctx context.Context) error
	// AddOutputs stores messages to be sent after the commit. The store sets Nonce and Position, continuing from earlier
	// calls of the same transaction, and returns the outputs as stored. Positions rise, with holes where a part was undone.
	AddOutputs(ctx context.Context, outputs []Output) ([]Output, error)
	// Divert stores dead letters. A dead letter that is there already (same scope, key and fingerprint) is left alone.
	Divert(ctx context.Context, letters []DeadLetter) error
	// Commit writes the marker, on the condition that every fresh claim that was not given up is still there, and commits.
	// Where no fresh claim is left there is no marker. nil: durable.
	// ErrTxEnded, ErrCommitUnknown: see there. ErrBudgetEnded and any other error: nothing is committed. After Commit the
	// connection is back in the pool in a clean state, or closed.
	Commit(ctx context.Context) error
	// Rollback undoes the transaction. After Commit it does nothing. It never blocks on a handler's statement for longer
	// than ctx.
	Rollback(ctx context.Context) error
}

// TxOptions are the bounds of one transaction.
type TxOptions struct {
	// Budget is the longest time from Begin to the start of COMMIT. When it ends the transaction is rolled back, by the
	// server where it can. 0 means no bound.
	Budget time.Duration
	// ClaimWait is the longest time a Claim waits for another open transaction that has claimed one of its identities. 0
	// means as long as its context. Where there is a single writer no claim ever waits.
	ClaimWait time.Duration
}

// Info is what Check found.
type Info struct {
	// Dialect is "sqlite", "postgres", "mysql" or "mariadb".
	Dialect string
	// Lanes is the most transactions that make sense at a time: 1 where there is a single writer.
	Lanes int
	// Parts tells that Part, Keep and Undo work: one message's work can be undone alone, at little cost.
	Parts bool
	// ClaimWait is how long a claim should wait for another open transaction before its message is set aside; 0 means 100 ms.
	ClaimWait time.Duration
	// Pool is the most open connections of the handle; 0 means no bound.
	Pool int
	// Schema is the version of the tables.
	Schema int
	// Warnings are findings that do not prevent work but weaken a promise, each a sentence that says what to change.
	Warnings []string
}

// Nonce names one transaction: 16 random bytes.
type Nonce [16]byte

// NewNonce draws a nonce.
func NewNonce() Nonce {
	var n Nonce
	_, _ = rand.Read(n[:]) // never fails: it ends the program instead
	return n
}

// String gives the nonce in hexadecimal.
func (n Nonce) String() string { return hex.EncodeToString(n[:]) }

// State is what became of a message whose receipt exists.
type State uint8

// The states of a receipt.
const (
	// StateDone: the handler's effect is committed with the receipt.
	StateDone State = iota + 1
	// StateDiverted: the message is in the dead-letter table; no effect was applied.
	StateDiverted
)

// Claim asks for the receipt of one identity.
type Claim struct {
	Scope       string
	Key         []byte
	Fingerprint []byte
	State       State
	At          time.Time
}

// ClaimStatus is the answer to a claim.
type ClaimStatus uint8

// The answers to a claim.
const (
	// ClaimFresh: the receipt was inserted by this transaction.
	ClaimFresh ClaimStatus = iota + 1
	// ClaimHeld: a whole receipt was there before.
	ClaimHeld
	// ClaimTorn: a receipt was there, but the marker of its transaction is not: it proves nothing.
	ClaimTorn
)

// ClaimResult is the answer to one claim. Receipt is set unless the claim is fresh.
type ClaimResult struct {
	Status  ClaimStatus
	Receipt Receipt
}

// Receipt is the row that proves an identity was processed.
type Receipt struct {
	Fingerprint []byte
	Nonce       Nonce
	State       State
	At          time.Time
}

// OutputRef names a stored output.
type OutputRef struct {
	Nonce    Nonce
	Position int
}

// Output is a message a handler produced, stored with the effect and sent after the commit.
type Output struct {
	OutputRef
	// Scope and Key name the receipt it belongs to.
	Scope string
	Key   []byte
	Topic string
	UUID  string
	// Metadata and Payload are the message's.
	Metadata map[string]string
	Payload  []byte
	At       time.Time
	// ViaRouter: the router publishes it, so the relay must leave it alone.
	ViaRouter bool
	// Sent: it is marked as sent.
	Sent bool
}

// UnsentQuery selects unsent outputs.
type UnsentQuery struct {
	// Limit is the most rows, at least 1.
	Limit int
	// Before leaves out outputs stored at or after this time. Zero means all.
	Before time.Time
	// Prefix selects the outputs whose scope begins with it: those of one consumer. Empty means all.
	Prefix string
	// Scope and Key, where Scope is not empty, select one receipt's outputs.
	Scope string
	Key   []byte
}

// DeadLetter is a message taken out of the flow, with the reason.
type DeadLetter struct {
	Scope string
	// Key is empty for a message that was refused before it had a valid identity.
	Key         []byte
	Fingerprint []byte
	Kind        DeadLetterKind
	// Reason is for people, at most a few hundred bytes.
	Reason string
	// Consumer, Handler and Topic say where it was consumed.
	Consumer, Handler, Topic string
	UUID                     string
	Metadata                 map[string]string
	Payload                  []byte
	At                       time.Time
}

// DeadLetterKind says why a message was diverted.
type DeadLetterKind string

// The reasons for a dead letter.
const (
	// KindConflict: the identity has a receipt with another fingerprint.
	KindConflict DeadLetterKind = "conflict"
	// KindRefused: empty or over-long identity key, or Validate refused it.
	KindRefused DeadLetterKind = "refused"
	// KindPermanent: the handler said that trying again cannot help.
	KindPermanent DeadLetterKind = "permanent"
	// KindTorn: its receipt is torn.
	KindTorn DeadLetterKind = "torn"
)

// Stats counts rows.
type Stats struct {
	// Done and Diverted count whole receipts by state; Torn those without marker.
	Done, Diverted, Torn int
	// Unsent counts outputs that the relay still has to send, and OldestUnsent is when the oldest of them was stored.
	Unsent       int
	OldestUnsent time.Time
	// Outputs counts all stored outputs.
	Outputs int
	// Parked counts messages that are set aside, where the store is a Parker.
	Parked int
	// DeadLetters counts dead letters by kind.
	DeadLetters map[DeadLetterKind]int
}

// Class is what an error of the database says about whose failure it is.
type Class uint8

// The classes.
const (
	// ClassOther: not a failure of the database's availability; a handler's error, a constraint, a bug.
	ClassOther Class = iota
	// ClassContention: another transaction was in the way; a fresh transaction may succeed.
	ClassContention
	// ClassOutage: the database is unreachable, read-only, full, out of connections or failing on its disk.
	ClassOutage
	// ClassEnded: somebody else than the store tried to commit, was refused, and the transaction is rolled back by that: what
	// the store says of it is ErrTxEnded.
	ClassEnded
)
