package faulty

import (
	"context"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// StoreFault is one broken promise of a receipts store, planted as a wrapper around a healthy one. A contract suite that
// passes over it is blind.
type StoreFault[T any] struct {
	// Name is what reports call it.
	Name string
	// Breaks says in one sentence what a user would see.
	Breaks string
	// Wrap plants the fault.
	Wrap func(receipts.Store[T]) receipts.Store[T]
}

// StoreFaults gives every fault of a store. They share no state: each call makes new ones.
func StoreFaults[T any]() []StoreFault[T] {
	return []StoreFault[T]{
		{"mark-before-work", "a handler that fails once loses its message", MarkBeforeWork[T]},
		{"mark-after-work", "a crash between effect and receipt applies the effect twice", MarkAfterWork[T]},
		{"commit-on-rollback", "half of a failed attempt stays", CommitOnRollback[T]},
		{"rollback-late", "a failed attempt holds its locks while it waits", RollbackLate[T]},
		{"commit-forgotten", "an acknowledged message is lost", CommitForgotten[T]},
		{"commit-error-ignored", "a message is acknowledged though nothing is stored", CommitErrorIgnored[T]},
		{"unknown-is-committed", "a COMMIT that never arrived counts as done", UnknownIsCommitted[T]},
		{"held-as-fresh", "a duplicate is applied again", HeldAsFresh[T]},
		{"torn-as-held", "a receipt that proves nothing makes a message look handled", TornAsHeld[T]},
		{"fingerprint-ignored", "another payload under an old identity passes for a duplicate", FingerprintIgnored[T]},
		{"keys-folded", "identities that differ in case or trailing blanks are taken for one", KeysFolded[T]},
		{"scope-ignored", "two consumers share a receipt and one of them loses its message", ScopeIgnored[T]},
		{"divert-forgotten", "a message is taken out of the flow and kept nowhere", DivertForgotten[T]},
		{"sent-mark-forgotten", "outputs are sent again for ever", SentMarkForgotten[T]},
		{"outage-unseen", "an outage is charged to the messages that meet it", OutageUnseen[T]},
		{"outputs-forgotten", "outputs of a lost publish are gone", OutputsForgotten[T]},
		{"undo-keeps", "half of a failed attempt stays, and the next one does it again", UndoKeeps[T]},
		{"undo-takes-neighbours", "a message is lost because another one of its batch failed", UndoTakesNeighbours[T]},
		{"keep-commits", "a batch is committed up to the message that failed, with the receipt of that one", KeepCommits[T]},
		{"unclaim-forgotten", "a message that failed counts as handled", UnclaimForgotten[T]},
		{"unclaim-takes-neighbours", "a message is applied again because another one of its batch failed", UnclaimTakesNeighbours[T]},
		{"many-held-as-fresh", "duplicates are applied again when several come at once", ManyHeldAsFresh[T]},
		{"answers-out-of-order", "a new message is taken for its neighbour, which was a duplicate", AnswersOutOfOrder[T]},
		{"claim-wait-ignored", "one message that is being handled elsewhere stops all others", ClaimWaitIgnored[T]},
		{"contention-unseen", "messages are charged for being handled at the same time", ContentionUnseen[T]},
	}
}

// OutageUnseen plants: no error is ever the database's own.
func OutageUnseen[T any](s receipts.Store[T]) receipts.Store[T] { return classless[T]{s} }

type classless[T any] struct{ receipts.Store[T] }

// Classify calls everything something else.
func (classless[T]) Classify(error) receipts.Class { return receipts.ClassOther }

// beginStore is a store whose transactions are made by begin.
type beginStore[T any] struct {
	receipts.Store[T]
	begin func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error)
}

// Begin makes the transaction that carries the fault.
func (s beginStore[T]) Begin(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
	return s.begin(ctx, opts)
}

// wrapTx gives a store whose every transaction is passed through wrap.
func wrapTx[T any](s receipts.Store[T], wrap func(receipts.Tx[T]) receipts.Tx[T]) receipts.Store[T] {
	return beginStore[T]{Store: s, begin: func(ctx context.Context, opts receipts.TxOptions) (receipts.Tx[T], error) {
		tx, err := s.Begin(ctx, opts)
		if err != nil {
			return nil, err
		}
		return wrap(tx), nil
	}}
}

// under is the healthy transaction below a planted fault. The name keeps an embedded one apart from its method Tx.
type under[T any] interface{ receipts.Tx[T] }
