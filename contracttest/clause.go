package contracttest

import (
	"context"
	"slices"
	"strings"

	"github.com/penstock-mq/penstock/sdk"
)

// Clause is one numbered rule of the contract with the function that checks it.
type Clause struct {
	// ID is the number, which never changes its meaning. A suffix after a slash marks a further check of one clause.
	ID string
	// Name is a few words for reports.
	Name string
	// Text is the rule.
	Text string
	// Capability is the tag of the capability that the clause needs; empty: every driver has to keep it.
	Capability string
	// Hooks are the hooks of the [Harness] that the clause needs, by their field names.
	Hooks []string
	// Check returns nil when the rule was seen to hold.
	Check func(ctx context.Context, e *Env) error
}

// Clauses lists the clauses for drivers and for the engine above them, in the order of their ids. The caller owns the
// slice.
func Clauses() []Clause {
	all := slices.Concat(
		publishClauses(),
		deliveryClauses(), settleClauses(), engineClauses(),
		orderClauses(),
		groupClauses(),
		lifeClauses(),
		faultClauses(), engineFaultClauses(),
		capabilityClauses(),
	)
	slices.SortStableFunc(all, func(a, b Clause) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// declares tells whether the capability of that tag is declared.
func declares(c sdk.Capabilities, tag string) bool {
	return map[string]bool{
		"":                    true,
		"durable":             c.Durable,
		"unroutable-detected": c.UnroutableDetected,
		"redelivers":          c.Redelivers,
		"delivery-count":      c.DeliveryCount,
		"delayed-requeue":     c.DelayedRequeue,
		"reject":              c.Reject,
		"tx-settle":           c.TxSettle,
		"ordered":             c.Ordered,
		"key-ordered":         c.KeyOrdered,
		"order-after-requeue": c.OrderAfterRequeue,
		"groups":              c.Groups,
		"lease":               c.Lease > 0,
		"settle-confirmed":    c.Settle == sdk.SettleConfirmed,
		"max-payload":         c.MaxPayload > 0,
	}[tag]
}
