package handlertest

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"

	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// What a handler does wrong.
const (
	anotherHandle = "the handler writes through another handle than its transaction"
	endsIt        = "the handler ends its transaction itself: it must leave COMMIT and ROLLBACK to the middleware"
	swallows      = "the handler swallows errors: half of its effect would commit"
	notRepeatable = "the handler is not repeatable: it keeps something, outside its transaction, from an attempt that was rolled back"
	notFixed      = "two clean runs differ: the handler is not deterministic, or it keeps something from one run to the next, " +
		"or State holds what differs from run to run, such as a clock or a random id"
	waitsForItself = anotherHandle + ", and waits for the lock that its own transaction holds: the database reported contention " +
		"although nothing else uses it (unless State leaves a query open)"
)

// errPlanted fails an attempt on a scenario's behalf.
var errPlanted = errors.New("handlertest: this attempt has to fail")

// explain says what an error of a delivery means for the author of a handler.
func explain(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, receipts.ErrTxEnded):
		return fmt.Errorf("%s: %w", endsIt, err)
	case errors.Is(err, idempotency.ErrContention):
		return fmt.Errorf("%s: %w", waitsForItself, err)
	case errors.Is(err, idempotency.ErrTxUnused):
		return fmt.Errorf("the handler never asked for its transaction: %w", err)
	case errors.Is(err, receipts.ErrBudgetEnded), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the handler took longer than Config.TxBudget; if it writes through another handle than its "+
			"transaction, it waits for itself: %w", err)
	default:
		return fmt.Errorf("the handler failed: %w", err)
	}
}

// panicked makes an error of what recover gave.
func panicked(value any) error {
	if value == nil {
		return errors.New("the handler called runtime.Goexit")
	}
	return fmt.Errorf("the handler panicked: %v\n%s", value, debug.Stack())
}

// difference shows two states one below the other.
func difference(left string, a any, right string, b any) string {
	width := max(len(left), len(right))
	return fmt.Sprintf("  %-*s %s\n  %-*s %s", width, left, brief(a), width, right, brief(b))
}

// brief keeps a huge state readable.
func brief(v any) string {
	const limit = 2000
	s := fmt.Sprintf("%+v", v)
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return s
}

// summary names the counters that are not zero.
func summary(r idempotency.Report) string {
	var parts []string
	for _, c := range []struct {
		name string
		n    uint64
	}{
		{"handled", r.Handled},
		{"replayed", r.Replayed},
		{"conflicted", r.Conflicted},
		{"refused", r.Refused},
		{"diverted", r.Diverted},
		{"torn", r.Torn},
		{"failed", r.Failed},
		{"returned", r.Returned},
	} {
		if c.n > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", c.name, c.n))
		}
	}
	if len(parts) == 0 {
		return "the middleware has counted nothing"
	}
	return "the middleware counted: " + strings.Join(parts, ", ")
}
