package stage

import (
	"context"
	"database/sql"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// freshTx is a transaction in which every claim is fresh, but those with the key "held".
type freshTx struct{ receipts.Tx[*sql.Tx] }

func (freshTx) Claim(_ context.Context, claims []receipts.Claim) ([]receipts.ClaimResult, error) {
	results := make([]receipts.ClaimResult, len(claims))
	for i, c := range claims {
		results[i].Status = receipts.ClaimFresh
		if string(c.Key) == "held" {
			results[i].Status = receipts.ClaimHeld
		}
	}
	return results, nil
}

func (freshTx) Unclaim(context.Context, []receipts.Claim) error { return nil }
func (freshTx) Keep(context.Context) error                      { return nil }
func (freshTx) Commit(context.Context) error                    { return nil }

func claims(keys ...string) []receipts.Claim {
	list := make([]receipts.Claim, len(keys))
	for i, k := range keys {
		list[i].Key = []byte(k)
	}
	return list
}

// A point is passed once for each message whose work is in the transaction at that moment; the point between two messages is
// passed only where there is another one to come.
func TestPointsAreCountedInMessages(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		claimed   []receipts.Claim
		unclaimed []receipts.Claim
		kept      int
		between   int
		commit    int
	}{
		"a lone message":   {claimed: claims("a"), commit: 1},
		"three":            {claimed: claims("a", "b", "c"), kept: 3, between: 2, commit: 3},
		"with a duplicate": {claimed: claims("a", "held", "c"), kept: 2, between: 1, commit: 2},
		"one failed":       {claimed: claims("a", "b", "c"), kept: 2, between: 2, unclaimed: claims("b"), commit: 2},
		"all duplicates":   {claimed: claims("held")},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for p, want := range map[Point]int{MidBatch: test.between, BeforeCommit: test.commit, AfterCommit: test.commit} {
				death := NewTrigger(Kill{Point: p, After: 1000}, func(LastWords) { t.Error("it is not dead yet") })
				tx := &killingTx[*sql.Tx]{Tx: freshTx{}, trigger: death}
				_, err := tx.Claim(t.Context(), test.claimed)
				require.NoError(t, err)
				for range test.kept {
					require.NoError(t, tx.Keep(t.Context()))
				}
				require.NoError(t, tx.Unclaim(t.Context(), test.unclaimed))
				require.NoError(t, tx.Commit(t.Context()))
				assert.Equal(t, want, 1000-death.kill.After, p)
			}
		})
	}
}

// What was passed before an order is given does not count, and a point that is not meant never does.
func TestATriggerThatIsSetLater(t *testing.T) {
	t.Parallel()
	trigger := NewTrigger(Kill{}, func(LastWords) { t.Error("it is not dead yet") })
	trigger.Pass(BeforeCommit, 100, LastWords{})
	trigger.Set(Kill{Point: BeforeCommit, After: 3})
	trigger.Pass(AfterCommit, 100, LastWords{})
	trigger.Pass(BeforeCommit, 2, LastWords{})
	assert.Equal(t, 1, trigger.kill.After)
}
