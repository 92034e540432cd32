package receipts

import "fmt"

// Attributing is what a [Tx] can do beyond its interface where handlers may queue statements, which are sent later: with the
// first statement of the transaction that needs an answer, of whomever, or with Commit. The caller says whose they are, so that
// one that fails is charged to its message and not to the one that happens to be running.
//
// The caller calls Member before each handler. The error of a queued statement is a [*MemberError], found with errors.As. It
// comes from whatever sent the statement: Commit, another method of the Tx, or a statement in a later member's handler, which
// may wrap or ignore it; where it was ignored, Commit answers it again. In each case nothing of the transaction is committed and
// only Rollback is left: the members but this one did nothing wrong and run again.
type Attributing interface {
	// Member says that what is queued from now on belongs to the n-th message of the transaction, as the caller counts; -1:
	// to none of them. It sends nothing. A Tx begins with -1.
	Member(n int)
}

// MemberError is the failure of a statement that was queued by one member of a transaction. Its class is that of Err.
type MemberError struct {
	// Member is what the caller gave to Member before the statement was queued; never -1: what belongs to nobody fails
	// without a MemberError.
	Member int
	// Err is the database's error.
	Err error
}

// Error says which member's statement failed.
func (e *MemberError) Error() string {
	return fmt.Sprintf("a statement queued by message %d of its transaction: %v", e.Member, e.Err)
}

// Unwrap gives the database's error.
func (e *MemberError) Unwrap() error { return e.Err }
