package pgxstore_test

import (
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest/wire"
	"github.com/penstock-mq/penstock/middleware/receipts"
	"github.com/penstock-mq/penstock/middleware/receipts/pgxstore"
)

// TestServerGoneBetweenBeginAndClaim has a transaction lose its connection before it has sent anything, and find no other one.
func TestServerGoneBetweenBeginAndClaim(t *testing.T) {
	db := newDatabase(t)
	p := wire.Test(t, wire.Options{Upstream: db.at.Address, Protocol: wire.Postgres})
	through := open(t, db.at.At(p.Address()))
	must(t, through.Ping(t.Context()))
	for name, end := range map[string]func(tx receipts.Tx[*pgxstore.Tx]) error{
		"rollback": func(tx receipts.Tx[*pgxstore.Tx]) error { return tx.Rollback(t.Context()) },
		"commit": func(tx receipts.Tx[*pgxstore.Tx]) error {
			if err := tx.Commit(t.Context()); through.store.Classify(err) != receipts.ClassOutage {
				t.Errorf("commit after a claim that failed: %v", err)
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			tx, err := through.store.Begin(t.Context(), receipts.TxOptions{Budget: time.Minute})
			must(t, err)
			back := p.Refuse()
			defer back()
			p.Cut()
			_, err = tx.Claim(t.Context(), []receipts.Claim{{Scope: "s", Key: []byte("k"), State: receipts.StateDone, At: noon}})
			if class := through.store.Classify(err); class != receipts.ClassOutage {
				t.Errorf("the claim gave class %d: %v", class, err)
			}
			must(t, end(tx))
			back()
			tx, err = through.store.Begin(t.Context(), receipts.TxOptions{})
			must(t, err)
			must(t, tx.Rollback(t.Context()))
		})
	}
}
