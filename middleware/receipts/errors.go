package receipts

import (
	"fmt"
	"time"
)

// classedError carries a class that the cause alone does not tell: a deadline says nothing about what was waited for.
type classedError struct {
	class Class
	what  string
	err   error
}

func (e *classedError) Error() string { return e.what + ": " + e.err.Error() }

func (e *classedError) Unwrap() error { return e.err }

// budgetError says how long the transaction was allowed to stay open.
func budgetError(budget time.Duration) error {
	return fmt.Errorf("%w: it was open for longer than %v and is rolled back", ErrBudgetEnded, budget)
}
