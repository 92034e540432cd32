package handlertest

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/memstore"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

func claim(name string) receipts.Claim {
	return receipts.Claim{Scope: "s", Key: []byte(name), State: receipts.StateDone}
}

// What an attempt that was undone alone had stored is not taken for committed, and a transaction that kept no attempt
// counts as rolled back.
func TestSpySeesPartsThatAreUndone(t *testing.T) {
	planted := errors.New("planted")
	for name, c := range map[string]struct {
		kept   map[string]bool
		commit error
		asked  int // how often a COMMIT was to be failed
		want   ended
	}{
		"both kept":          {map[string]bool{"a": true, "b": true}, nil, 1, ended{committed: true, outputs: []string{"a", "b"}}},
		"one undone":         {map[string]bool{"a": false, "b": true}, nil, 1, ended{committed: true, outputs: []string{"b"}}},
		"the last undone":    {map[string]bool{"a": true, "b": false}, nil, 1, ended{committed: true, outputs: []string{"a"}}},
		"all undone":         {map[string]bool{"a": false, "b": false}, planted, 0, ended{outputs: []string{}}},
		"one undone, failed": {map[string]bool{"a": false, "b": true}, planted, 1, ended{}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			db := memstore.NewDatabase()
			var got []ended
			asked := 0
			s := &spy[*memstore.Tx]{
				Store:  db.Store(),
				ended:  func(_ context.Context, how ended) { got = append(got, how) },
				commit: func() error { asked++; return c.commit },
			}
			tx, err := s.Begin(ctx, receipts.TxOptions{})
			require.NoError(t, err)
			_, err = tx.Claim(ctx, []receipts.Claim{claim("a"), claim("b")})
			require.NoError(t, err)
			for _, name := range []string{"a", "b"} {
				require.NoError(t, tx.Part(ctx))
				require.NoError(t, tx.Raw().Add(name, 1))
				_, err := tx.AddOutputs(ctx, []receipts.Output{{Scope: "s", Key: []byte(name), Topic: name}})
				require.NoError(t, err)
				if c.kept[name] {
					require.NoError(t, tx.Keep(ctx))
					continue
				}
				require.NoError(t, tx.Undo(ctx))
				require.NoError(t, tx.Unclaim(ctx, []receipts.Claim{claim(name)}))
			}
			err = tx.Commit(ctx)
			assert.Equal(t, c.commit != nil && c.asked > 0, err != nil)
			require.NoError(t, tx.Rollback(ctx)) // as the middleware does, whatever came before
			assert.Equal(t, []ended{c.want}, got)
			assert.Equal(t, c.asked, asked)
		})
	}
}

// A transaction without anything of a message's in it does not end a clean slate.
func TestSpyHeldClaimIsNothingCommitted(t *testing.T) {
	ctx := t.Context()
	s := &spy[*memstore.Tx]{Store: memstore.NewDatabase().Store()}
	for _, want := range []bool{true, false} {
		var got ended
		s.ended = func(_ context.Context, how ended) { got = how }
		tx, err := s.Begin(ctx, receipts.TxOptions{})
		require.NoError(t, err)
		_, err = tx.Claim(ctx, []receipts.Claim{claim("a")})
		require.NoError(t, err)
		require.NoError(t, tx.Commit(ctx))
		assert.Equal(t, want, got.committed)
	}
}
